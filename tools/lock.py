"""Keeps `uv.lock` free of index addresses.

    python tools/lock.py strip     takes the addresses out of uv.lock (before committing it)
    python tools/lock.py update    locks anew after a pyproject.toml changed, and strips
    python tools/lock.py check     proves that what git is about to commit is clean (CI)

The committed lock pins every version and hash and names no index, so it works behind any mirror. `uv` fills the
addresses of the machine it runs on into the working copy (the flat index `wheelhouse` in pyproject.toml is what
lets it accept a lock without them); `strip` takes them out again. Standard library only.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_REGISTRY = re.compile(r'registry = "(?:https?|file)://[^"]*"')
_FILE = re.compile(r'\{ (?:url|path) = "[^"]*?([^"/]+)"')
_SIZE = re.compile(r'(hash = "[^"]*"), size = \d+')  # only some indexes tell it
_ADDRESS = re.compile(r'"(?:https?|file)://[^"]*"')
_PACKAGE = re.compile(r'^name = "([^"]+)"\nversion = "([^"]+)"', re.MULTILINE)

# Hosts of package registries and paths of one machine, spelled so that this file does not match itself.
_FORBIDDEN = re.compile(
    r"py[p]i\.org|python[h]osted\.org|registry\.npm[j]s|deb\.deb[i]an\.org|crates[.]io/|download\.pyt[o]rch"
    r"|(?<![\w.$}])/(?:ro[o]t|ho[m]e/\w+|wor[k]/\w+|Us[e]rs/\w+)/"
)


def strip(text: str) -> str:
    """`text` of a lock file with every index address, download address and file size taken out.

    Args:
        text: A uv.lock, as uv writes it or already stripped.
    """
    return _SIZE.sub(r"\1", _FILE.sub(r'{ filename = "\1"', _REGISTRY.sub('registry = "default"', text)))


def addresses(text: str) -> list[str]:
    """The addresses that a stripped lock may not hold."""
    return _ADDRESS.findall(text)


def versions(text: str) -> set[tuple[str, str]]:
    """Every (name, version) that a lock pins."""
    return set(_PACKAGE.findall(text))


def forbidden(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of each registry host or machine path in `text`."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _FORBIDDEN.search(line):
            yield number, found.group()


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    ).stdout


def _staged(name: str) -> str:
    """A file as the next commit holds it, whatever uv made of the working copy since."""
    return _git("show", f":{name}")


def _relock(lock: str) -> str:
    """`lock` after `uv lock`, stripped, made in a copy that holds only what locking reads."""
    with tempfile.TemporaryDirectory(prefix="mca-lock-") as folder:
        copy = Path(folder)
        (copy / "uv.lock").write_text(lock)
        shutil.copytree(ROOT / "wheelhouse", copy / "wheelhouse")
        for source in [ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")]:
            target = copy / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
        subprocess.run(
            [os.environ.get("UV", "uv"), "lock", "--quiet"],
            cwd=copy,
            check=True,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        return strip((copy / "uv.lock").read_text())


def _changes(before: str, after: str) -> Iterator[str]:
    old, new = versions(before), versions(after)
    yield from (f"uv.lock: re-locking drops {name} {version}" for name, version in sorted(old - new))
    yield from (f"uv.lock: re-locking adds {name} {version}" for name, version in sorted(new - old))
    if old == new and before != after:
        yield "uv.lock: re-locking keeps every version but changes other lines"


def _problems_of_lock(lock: str) -> Iterator[str]:
    if found := addresses(lock):
        yield f"uv.lock: {len(found)} addresses, the first {found[0]}; run `python tools/lock.py strip`"
        return
    if strip(lock) != lock:
        yield "uv.lock: not as `python tools/lock.py strip` leaves it"
    yield from _changes(lock, _relock(lock))


def _problems_of_files(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        try:
            text = _staged(name)
        except UnicodeDecodeError:
            continue  # a binary file
        for number, found in forbidden(text):
            yield f"{name}:{number}: names {found}"


def check() -> int:
    """Print what is wrong with the files in git's index (in a fresh clone: the commit); 0 if nothing is."""
    names = _git("ls-files", "-z").split("\0")[:-1]
    lock = _staged("uv.lock")
    problems = [*_problems_of_lock(lock), *_problems_of_files(names)]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        print(f"lock: {len(versions(lock))} versions pinned, {len(names)} files, no address")
    return 1 if problems else 0


def main() -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", choices=["strip", "update", "check"])
    command = parser.parse_args().command
    if command == "check":
        return check()
    path = ROOT / "uv.lock"
    text = strip(path.read_text())
    path.write_text(_relock(text) if command == "update" else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
