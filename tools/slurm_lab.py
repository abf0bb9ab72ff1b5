"""A SLURM of several nodes on this machine, for trying job scripts: real daemons, nodes that are only names.

    python tools/slurm_lab.py start FOLDER [--nodes 2]     # as root; then: export SLURM_CONF=FOLDER/slurm.conf
    python tools/slurm_lab.py fail FOLDER NODE             # the node dies with all that runs on it
    python tools/slurm_lab.py revive FOLDER NODE
    python tools/slurm_lab.py stop FOLDER

Needs ``slurmctld slurmd slurm-client munge`` (of Debian or Ubuntu). Everything is kept in FOLDER, but for a line in
``/etc/hosts`` that gives the nodes their names; `stop` takes it away again. Nodes have no GPU, and one file system.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
_HOSTS = Path("/etc/hosts")
_MARK = "# slurm_lab"
_PATIENCE = 30.0
_CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SlurmUser=root
SlurmdUser=root
ReturnToService=2
JobRequeue=1
KillWait=5
SlurmdTimeout=120
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
{lines}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN"
)


def lacking() -> str:
    """Return what this machine lacks to start the daemons; empty: nothing."""
    programs = [name for name in PROGRAMS if shutil.which(name) is None]
    if programs:
        return f"{', '.join(programs)} not installed"
    return "" if os.geteuid() == 0 else "the daemons are started as root"


def start(folder: Path, nodes: int = 2) -> None:
    """Start the daemons, and waits until every node takes jobs."""
    for path in (folder / "state", *(folder / name for name in _names(nodes))):
        path.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    host = socket.gethostname().split(".")[0]
    port, *ports = free_ports(1 + nodes)
    names = zip(_names(nodes), ports, strict=True)
    lines = "\n".join(_NODE.format(name=name, host=host, port=port) for name, port in names)
    (folder / "slurm.conf").write_text(_CONF.format(host=host, folder=folder, port=port, lines=lines))
    with _HOSTS.open("a") as hosts:
        hosts.write(f"127.0.0.1 {' '.join(_names(nodes))} {_mark(folder)}\n")
    _start_munge(folder)
    _run(folder, "slurmctld", "-c")
    for name in _names(nodes):
        revive(folder, name)
    _wait_until_idle(folder, nodes)


def _names(nodes: int) -> list[str]:
    return [f"n{number}" for number in range(1, nodes + 1)]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as all_at_once:
        listeners = [all_at_once.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


def _mark(folder: Path) -> str:
    """Return the comment at the end of our line in ``/etc/hosts``."""
    return f"{_MARK} {folder}"


def _start_munge(folder: Path) -> None:
    """The daemon that signs what the others say to each other; with a key and a socket of its own."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
    _run(
        folder,
        "munged",
        "--force",
        f"--key-file={key}",
        f"--socket={files['socket']}",
        f"--pid-file={files['pid']}",
        f"--log-file={files['log']}",
        f"--seed-file={files['seed']}",
    )


def _wait_until_idle(folder: Path, nodes: int) -> None:
    last = time.monotonic() + _PATIENCE
    while time.monotonic() < last:
        found = _run(folder, "sinfo", "-h", "-N", "-o", "%t", check=False)
        if found.split() == ["idle"] * nodes:
            return
        time.sleep(0.2)
    raise SystemExit(f"the nodes do not come up; see {folder}/*.log")


def revive(folder: Path, node: str) -> None:
    """Start a node's daemon."""
    _run(folder, "slurmd", "-N", node)


def fail(folder: Path, node: str) -> None:
    """Ends a node as a machine ends that loses its power."""
    tasks = _tasks_of(folder, node)
    watchers = {parent for task in tasks if (parent := _parent(task)) and parent not in tasks}
    for victim in (int((folder / f"{node}.pid").read_text()), *_only_steps(watchers), *tasks):
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def _parent(process: int) -> int:
    """Its number; 0 if the process is gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return 0


def _only_steps(processes: set[int]) -> list[int]:
    """Return SLURM's processes for a step other than its tasks; they would report that the tasks were killed."""
    names = {process: Path(f"/proc/{process}/comm").read_text() for process in processes}
    return [process for process, name in names.items() if name.startswith("slurmstepd")]


def _tasks_of(folder: Path, node: str) -> list[int]:
    """The processes of jobs that run on ``node`` of this lab."""
    marks = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={folder / 'slurm.conf'}".encode()}
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if marks <= set(path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found


def stop(folder: Path) -> None:
    """Ends what runs on the nodes and the daemons, and takes the names of the nodes away."""
    for node in folder.glob("n*.pid"):
        fail(folder, node.stem)
    for name in ("slurmctld", "munge"):
        for path in folder.glob(f"{name}.pid"):
            with suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)
    lines = _HOSTS.read_text().splitlines(keepends=True)
    _HOSTS.write_text("".join(line for line in lines if not line.endswith(f"{_mark(folder)}\n")))


def _run(folder: Path, *command: str, check: bool = True) -> str:
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("start", "stop", "fail", "revive"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("node", nargs="?")
    parser.add_argument("--nodes", type=int, default=2)
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.what == "start":
        if problem := lacking():
            raise SystemExit(problem)
        start(folder, given.nodes)
    elif given.what == "stop":
        stop(folder)
    elif given.node is None:
        parser.error(f"{given.what} needs the name of a node")
    else:
        (fail if given.what == "fail" else revive)(folder, given.node)


if __name__ == "__main__":
    main()
