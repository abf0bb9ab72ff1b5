/* Asks before every call to the C library on a file under MCA_FAULT_ROOTS (separated by colons) whether it is to fail.
 *
 * Loaded with LD_PRELOAD, or into a running process, whose calls faults_install() redirects; faults_ask(f) has
 * f(name, path) answer from now on with the errno that the call is to fail with, 0 if it is not; faults_ask(NULL) ends
 * it. What f calls itself is not asked about. A close that fails has closed.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

static int (*asked)(const char *name, const char *path);
static __thread int asking;

void faults_ask(int (*answer)(const char *, const char *)) { asked = answer; }

static int under_roots(const char *path) {
    const char *roots = getenv("MCA_FAULT_ROOTS");
    while (roots && *roots) {
        size_t length = strcspn(roots, ":");
        if (length && !strncmp(path, roots, length) && (path[length] == '/' || !path[length])) return 1;
        roots += length + (roots[length] == ':');
    }
    return 0;
}

static int path_of(int fd, char *path) {
    char link[64];
    if (fd == AT_FDCWD) strcpy(link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlink, link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
    return length > 0;
}

/* What f answers, an exception that Python is about to raise put aside. */
static int ask(int (*answer)(const char *, const char *), const char *name, const char *path) {
    static int (*ensure)(void);
    static void (*release)(int), (*fetch)(void **, void **, void **), (*restore)(void *, void *, void *);
    if (!restore) {
        ensure = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
        release = dlsym(RTLD_DEFAULT, "PyGILState_Release");
        fetch = dlsym(RTLD_DEFAULT, "PyErr_Fetch");
        restore = dlsym(RTLD_DEFAULT, "PyErr_Restore");
    }
    int state = ensure();
    void *kind, *value, *trace;
    fetch(&kind, &value, &trace);
    int error = answer(name, path);
    restore(kind, value, trace);
    release(state);
    return error;
}

/* Whether this call is to fail; errno is then set. */
static int fails(const char *name, int fd, const char *path) {
    int (*answer)(const char *, const char *) = asked;
    if (!answer || asking) return 0;
    char whole[2 * PATH_MAX] = "";
    int before = errno, fault = 0;
    if (path && *path == '/') strncpy(whole, path, sizeof whole - 1);
    else if (path_of(fd, whole) && path && *path) {
        strcat(whole, "/");
        strncat(whole, path, sizeof whole - strlen(whole) - 1);
    }
    if (under_roots(whole)) {
        asking = 1;
        fault = ask(answer, name, whole);
        asking = 0;
    }
    errno = fault ? fault : before;
    return fault;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_FD(type, name, failed, declared, given) \
    type name declared { \
        static __typeof__(&name) real; \
        if (!real) real = REAL(name); \
        return fails(#name, fd, NULL) ? failed : real given; \
    }
#define ON_PATH(type, name, at, failed, declared, given) \
    type name declared { \
        static __typeof__(&name) real; \
        if (!real) real = REAL(name); \
        return fails(#name, at, path) ? failed : real given; \
    }
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        static int (*real)(const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        int mode = va_arg(rest, int); \
        va_end(rest); \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        return fails(#name, AT_FDCWD, path) ? -1 : real(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int fd, const char *path, int flags, ...) { \
        static int (*real)(int, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        int mode = va_arg(rest, int); \
        va_end(rest); \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        return fails(#name, fd, path) ? -1 : real(fd, path, flags, mode); \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
ON_PATH(FILE *, fopen, AT_FDCWD, NULL, (const char *path, const char *mode), (path, mode))
ON_PATH(FILE *, fopen64, AT_FDCWD, NULL, (const char *path, const char *mode), (path, mode))

ON_FD(ssize_t, read, -1, (int fd, void *data, size_t size), (fd, data, size))
ON_FD(ssize_t, pread, -1, (int fd, void *data, size_t size, off_t at), (fd, data, size, at))
ON_FD(ssize_t, pread64, -1, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FD(ssize_t, preadv, -1, (int fd, const struct iovec *parts, int n, off_t at), (fd, parts, n, at))
ON_FD(ssize_t, preadv64, -1, (int fd, const struct iovec *parts, int n, off64_t at), (fd, parts, n, at))
ON_FD(ssize_t, preadv64v2, -1, (int fd, const struct iovec *parts, int n, off64_t at, int flags),
      (fd, parts, n, at, flags))
ON_FD(ssize_t, readv, -1, (int fd, const struct iovec *parts, int n), (fd, parts, n))
ON_FD(ssize_t, copy_file_range, -1, (int in, off64_t *from, int fd, off64_t *at, size_t size, unsigned flags),
      (in, from, fd, at, size, flags))
ON_FD(ssize_t, sendfile64, -1, (int fd, int in, off64_t *at, size_t size), (fd, in, at, size))
ON_FD(ssize_t, write, -1, (int fd, const void *data, size_t size), (fd, data, size))
ON_FD(ssize_t, writev, -1, (int fd, const struct iovec *parts, int n), (fd, parts, n))
ON_FD(ssize_t, pwrite, -1, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
ON_FD(ssize_t, pwrite64, -1, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FD(ssize_t, pwritev64, -1, (int fd, const struct iovec *parts, int n, off64_t at), (fd, parts, n, at))
ON_FD(ssize_t, pwritev64v2, -1, (int fd, const struct iovec *parts, int n, off64_t at, int flags),
      (fd, parts, n, at, flags))

ON_FD(off_t, lseek, -1, (int fd, off_t at, int from), (fd, at, from))
ON_FD(off64_t, lseek64, -1, (int fd, off64_t at, int from), (fd, at, from))
ON_FD(int, posix_fadvise64, errno, (int fd, off64_t at, off64_t size, int how), (fd, at, size, how))
ON_FD(int, lockf64, -1, (int fd, int how, off64_t size), (fd, how, size))
ON_FD(ssize_t, sendfile, -1, (int fd, int in, off_t *at, size_t size), (fd, in, at, size))

ON_FD(int, fsync, -1, (int fd), (fd))
ON_FD(int, syncfs, -1, (int fd), (fd))
ON_FD(int, fdatasync, -1, (int fd), (fd))
ON_FD(int, sync_file_range, -1, (int fd, off64_t at, off64_t size, unsigned flags), (fd, at, size, flags))
ON_FD(int, ftruncate, -1, (int fd, off_t size), (fd, size))
ON_FD(int, ftruncate64, -1, (int fd, off64_t size), (fd, size))
ON_FD(int, posix_fallocate, errno, (int fd, off_t at, off_t size), (fd, at, size))
ON_FD(int, posix_fallocate64, errno, (int fd, off64_t at, off64_t size), (fd, at, size))
ON_FD(int, fallocate, -1, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
ON_FD(int, fallocate64, -1, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size))
ON_FD(int, flock, -1, (int fd, int how), (fd, how))
ON_FD(int, fchmod, -1, (int fd, mode_t mode), (fd, mode))
ON_FD(int, fchown, -1, (int fd, uid_t user, gid_t group), (fd, user, group))
ON_FD(int, futimens, -1, (int fd, const struct timespec times[2]), (fd, times))
ON_FD(int, fstat, -1, (int fd, struct stat *found), (fd, found))
ON_FD(int, fstat64, -1, (int fd, struct stat64 *found), (fd, found))
ON_FD(int, __fxstat, -1, (int version, int fd, struct stat *found), (version, fd, found))
ON_FD(int, __fxstat64, -1, (int version, int fd, struct stat64 *found), (version, fd, found))
ON_FD(int, fstatfs64, -1, (int fd, struct statfs64 *found), (fd, found))
ON_FD(int, fstatvfs, -1, (int fd, struct statvfs *found), (fd, found))
ON_FD(int, fstatvfs64, -1, (int fd, struct statvfs64 *found), (fd, found))
ON_FD(ssize_t, flistxattr, -1, (int fd, char *names, size_t size), (fd, names, size))
ON_FD(ssize_t, fgetxattr, -1, (int fd, const char *name, void *value, size_t size), (fd, name, value, size))
ON_FD(int, fsetxattr, -1, (int fd, const char *name, const void *value, size_t size, int flags),
      (fd, name, value, size, flags))
ON_FD(int, dup, -1, (int fd), (fd))
ON_FD(DIR *, fdopendir, NULL, (int fd), (fd))
ON_FD(void *, mmap, (void *)-1, (void *where, size_t size, int allowed, int flags, int fd, off_t at),
      (where, size, allowed, flags, fd, at))
ON_FD(void *, mmap64, (void *)-1, (void *where, size_t size, int allowed, int flags, int fd, off64_t at),
      (where, size, allowed, flags, fd, at))

ON_PATH(int, stat, AT_FDCWD, -1, (const char *path, struct stat *found), (path, found))
ON_PATH(int, stat64, AT_FDCWD, -1, (const char *path, struct stat64 *found), (path, found))
ON_PATH(int, lstat, AT_FDCWD, -1, (const char *path, struct stat *found), (path, found))
ON_PATH(int, lstat64, AT_FDCWD, -1, (const char *path, struct stat64 *found), (path, found))
ON_PATH(int, fstatat, fd, -1, (int fd, const char *path, struct stat *found, int flags), (fd, path, found, flags))
ON_PATH(int, fstatat64, fd, -1, (int fd, const char *path, struct stat64 *found, int flags), (fd, path, found, flags))
ON_PATH(int, statx, fd, -1, (int fd, const char *path, int flags, unsigned mask, struct statx *found),
        (fd, path, flags, mask, found))
ON_PATH(int, __xstat, AT_FDCWD, -1, (int version, const char *path, struct stat *found), (version, path, found))
ON_PATH(int, __xstat64, AT_FDCWD, -1, (int version, const char *path, struct stat64 *found), (version, path, found))
ON_PATH(int, __lxstat, AT_FDCWD, -1, (int version, const char *path, struct stat *found), (version, path, found))
ON_PATH(int, __lxstat64, AT_FDCWD, -1, (int version, const char *path, struct stat64 *found), (version, path, found))
ON_PATH(int, statfs64, AT_FDCWD, -1, (const char *path, struct statfs64 *found), (path, found))
ON_PATH(int, statvfs, AT_FDCWD, -1, (const char *path, struct statvfs *found), (path, found))
ON_PATH(int, statvfs64, AT_FDCWD, -1, (const char *path, struct statvfs64 *found), (path, found))
ON_PATH(ssize_t, listxattr, AT_FDCWD, -1, (const char *path, char *names, size_t size), (path, names, size))
ON_PATH(ssize_t, llistxattr, AT_FDCWD, -1, (const char *path, char *names, size_t size), (path, names, size))
ON_PATH(ssize_t, getxattr, AT_FDCWD, -1, (const char *path, const char *name, void *value, size_t size),
        (path, name, value, size))
ON_PATH(ssize_t, lgetxattr, AT_FDCWD, -1, (const char *path, const char *name, void *value, size_t size),
        (path, name, value, size))
ON_PATH(int, setxattr, AT_FDCWD, -1, (const char *path, const char *name, const void *value, size_t size, int flags),
        (path, name, value, size, flags))
ON_PATH(int, lsetxattr, AT_FDCWD, -1, (const char *path, const char *name, const void *value, size_t size, int flags),
        (path, name, value, size, flags))
ON_PATH(int, access, AT_FDCWD, -1, (const char *path, int mode), (path, mode))
ON_PATH(int, faccessat, fd, -1, (int fd, const char *path, int mode, int flags), (fd, path, mode, flags))
ON_PATH(int, linkat, fd, -1, (int fd, const char *path, int fd2, const char *to, int flags), (fd, path, fd2, to, flags))
ON_PATH(ssize_t, readlink, AT_FDCWD, -1, (const char *path, char *to, size_t size), (path, to, size))
ON_PATH(ssize_t, readlinkat, fd, -1, (int fd, const char *path, char *to, size_t size), (fd, path, to, size))
ON_PATH(char *, realpath, AT_FDCWD, NULL, (const char *path, char *to), (path, to))
ON_PATH(int, chdir, AT_FDCWD, -1, (const char *path), (path))
ON_PATH(int, truncate, AT_FDCWD, -1, (const char *path, off_t size), (path, size))
ON_PATH(int, truncate64, AT_FDCWD, -1, (const char *path, off64_t size), (path, size))
ON_PATH(DIR *, opendir, AT_FDCWD, NULL, (const char *path), (path))
ON_PATH(int, mkdir, AT_FDCWD, -1, (const char *path, mode_t mode), (path, mode))
ON_PATH(int, mkdirat, fd, -1, (int fd, const char *path, mode_t mode), (fd, path, mode))
ON_PATH(int, rmdir, AT_FDCWD, -1, (const char *path), (path))
ON_PATH(int, unlink, AT_FDCWD, -1, (const char *path), (path))
ON_PATH(int, unlinkat, fd, -1, (int fd, const char *path, int flags), (fd, path, flags))
ON_PATH(int, remove, AT_FDCWD, -1, (const char *path), (path))
ON_PATH(int, link, AT_FDCWD, -1, (const char *path, const char *to), (path, to))
ON_PATH(int, symlink, AT_FDCWD, -1, (const char *to, const char *path), (to, path))
ON_PATH(int, symlinkat, fd, -1, (const char *to, int fd, const char *path), (to, fd, path))
ON_PATH(int, rename, AT_FDCWD, -1, (const char *path, const char *to), (path, to))
ON_PATH(int, renameat, fd, -1, (int fd, const char *path, int fd2, const char *to), (fd, path, fd2, to))
ON_PATH(int, renameat2, fd, -1, (int fd, const char *path, int fd2, const char *to, unsigned flags),
        (fd, path, fd2, to, flags))
ON_PATH(int, chmod, AT_FDCWD, -1, (const char *path, mode_t mode), (path, mode))
ON_PATH(int, fchmodat, fd, -1, (int fd, const char *path, mode_t mode, int flags), (fd, path, mode, flags))
ON_PATH(int, chown, AT_FDCWD, -1, (const char *path, uid_t user, gid_t group), (path, user, group))
ON_PATH(int, lchown, AT_FDCWD, -1, (const char *path, uid_t user, gid_t group), (path, user, group))
ON_PATH(int, fchownat, fd, -1, (int fd, const char *path, uid_t user, gid_t group, int flags),
        (fd, path, user, group, flags))
ON_PATH(int, utimensat, fd, -1, (int fd, const char *path, const struct timespec times[2], int flags),
        (fd, path, times, flags))

/* Functions of a buffered file, whose own calls to the system nobody sees. */
#define ON_FILE(type, name, failed, declared, given) \
    type name declared { \
        static __typeof__(&name) real; \
        if (!real) real = REAL(name); \
        return fails(#name, fileno(file), NULL) ? failed : real given; \
    }

ON_FILE(size_t, fread, 0, (void *data, size_t size, size_t n, FILE *file), (data, size, n, file))
ON_FILE(size_t, fwrite, 0, (const void *data, size_t size, size_t n, FILE *file), (data, size, n, file))
ON_FILE(char *, fgets, NULL, (char *data, int size, FILE *file), (data, size, file))
ON_FILE(int, fseeko64, -1, (FILE *file, off64_t at, int from), (file, at, from))
ON_FILE(off64_t, ftello64, -1, (FILE *file), (file))

int fclose(FILE *file) {
    static int (*real)(FILE *);
    if (!real) real = dlsym(RTLD_NEXT, "fclose");
    int failed = fails("fclose", fileno(file), NULL);
    int code = real(file);
    if (failed) errno = failed;
    return failed ? EOF : code;
}

#define WITH_ARGUMENT(name, type) \
    int name(int fd, type what, ...) { \
        static int (*real)(int, type, ...); \
        va_list rest; \
        va_start(rest, what); \
        void *argument = va_arg(rest, void *); \
        va_end(rest); \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        return fails(#name, fd, NULL) ? -1 : real(fd, what, argument); \
    }

WITH_ARGUMENT(fcntl, int)
WITH_ARGUMENT(fcntl64, int)
WITH_ARGUMENT(ioctl, unsigned long)

struct dirent *readdir(DIR *folder) {
    static struct dirent *(*real)(DIR *);
    if (!real) real = dlsym(RTLD_NEXT, "readdir");
    return fails("readdir", dirfd(folder), NULL) ? NULL : real(folder);
}

struct dirent64 *readdir64(DIR *folder) {
    static struct dirent64 *(*real)(DIR *);
    if (!real) real = dlsym(RTLD_NEXT, "readdir64");
    return fails("readdir64", dirfd(folder), NULL) ? NULL : real(folder);
}

int close(int fd) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "close");
    int failed = fails("close", fd, NULL);
    int code = real(fd);
    if (failed) errno = failed;
    return failed ? -1 : code;
}

/* The pointers through which one table of relocations calls functions of this file. */
static void redirect(ElfW(Addr) base, const ElfW(Rela) *table, size_t size, const ElfW(Sym) *symbols, const char *names,
                     void *self, ElfW(Addr) own) {
    for (const ElfW(Rela) *each = table; table && each < table + size / sizeof *each; each++) {
        const ElfW(Sym) *symbol = symbols + ELF64_R_SYM(each->r_info);
        if (!ELF64_R_SYM(each->r_info) || each->r_addend || ELF64_ST_TYPE(symbol->st_info) == STT_OBJECT) continue;
        void *ours = dlsym(self, names + symbol->st_name), **slot = (void **)(base + each->r_offset);
        Dl_info found;
        if (!ours || *slot == ours || !dladdr(ours, &found) || (ElfW(Addr))found.dli_fbase != own) continue;
        size_t page = sysconf(_SC_PAGESIZE);
        mprotect((void *)((ElfW(Addr))slot & -page), page, PROT_READ | PROT_WRITE);
        *slot = ours;
    }
}

static int redirect_object(struct dl_phdr_info *object, size_t size, void *self) {
    Dl_info here;
    dladdr(redirect_object, &here);
    if (object->dlpi_addr == (ElfW(Addr))here.dli_fbase || strstr(object->dlpi_name, "/libc.so")
        || strstr(object->dlpi_name, "/ld-linux") || strstr(object->dlpi_name, "linux-vdso")) return 0;
    for (int n = 0; n < object->dlpi_phnum; n++) {
        if (object->dlpi_phdr[n].p_type != PT_DYNAMIC) continue;
        ElfW(Addr) found[DT_NUM] = {0};
        for (ElfW(Dyn) *entry = (void *)(object->dlpi_addr + object->dlpi_phdr[n].p_vaddr); entry->d_tag; entry++)
            if (entry->d_tag > 0 && entry->d_tag < DT_NUM) found[entry->d_tag] = entry->d_un.d_ptr;
        const ElfW(Sym) *symbols = (void *)found[DT_SYMTAB];
        const char *names = (void *)found[DT_STRTAB];
        redirect(object->dlpi_addr, (void *)found[DT_JMPREL], found[DT_PLTRELSZ], symbols, names, self,
                 (ElfW(Addr))here.dli_fbase);
        redirect(object->dlpi_addr, (void *)found[DT_RELA], found[DT_RELASZ], symbols, names, self,
                 (ElfW(Addr))here.dli_fbase);
    }
    return 0;
}

/* Have everything that is loaded call this file's functions, as if it had been loaded with LD_PRELOAD. */
void faults_install(void) {
    Dl_info here;
    dladdr(redirect_object, &here);
    dl_iterate_phdr(redirect_object, dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD));
}
