import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mca_train.launch import environment
from mca_train.launch.failures import report_failure


def run(body, ranks=2, grace="launcher._GRACE", **options):
    """Run ``body`` in each rank; ``grace`` is how many seconds the others have after the first failure."""
    code = textwrap.dedent(
        f"""
        import os, sys, time
        from mca_config.errors import McaError, UsageError
        from mca_train.launch import launcher
        launcher._GRACE = {grace}
        from mca_train.launch.launcher import fork_ranks
        from mca_train.launch.launcher import scratch_folder
        from mca_train.launch.failures import raising_on_signals
        def target():
            rank = int(os.environ["RANK"])
{textwrap.indent(textwrap.dedent(body), " " * 12)}
        with raising_on_signals(), scratch_folder() as folder:
            code = fork_ranks(target, {ranks}, folder)
        sys.exit(code)
        """
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **options
    )


def test_the_launcher_is_there_before_torch_which_would_start_its_threads():
    code = "import sys, mca_train.cli, mca_train.launch.launcher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_ranks_have_their_variables_and_only_rank_0_speaks():
    done = run("print(rank, os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])", ranks=3)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 3 0\n", "")


def test_the_rank_that_failed_first_is_told_and_the_others_end_at_once():
    body = """
    if rank == 1:
        raise RuntimeError("broken here")
    time.sleep(600)
    """
    done = run(body, ranks=3, grace=0.2)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.startswith("rank 1 failed:")
    assert "RuntimeError: broken here" in done.stderr


def test_users_errors_are_one_line():
    done = run("raise McaError('no such file')")
    assert (done.returncode, done.stderr) == (1, "error: no such file\n")


def test_a_killed_rank_is_told_with_its_last_words():
    body = """
    print("last words", flush=True)
    if rank == 1:
        os.kill(os.getpid(), 9)
    time.sleep(600)
    """
    done = run(body, grace=0.2)
    assert done.returncode == 1
    assert "rank 1 was killed by SIGKILL without a report" in done.stderr
    assert "[rank 1] last words" in done.stderr


def _own_failures(fault):
    """One rank ends by ``fault``; the other notices as a collective would."""
    mark = "os.path.join(os.environ['TMPDIR'], 'gone')"
    return f"""
    if rank == 1:
        open({mark}, 'w').close()
        {fault}
    while not os.path.exists({mark}):
        time.sleep(0.001)
    """


@pytest.mark.parametrize(
    ("fault", "reported", "code"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL", 1),
        ("os._exit(0)", "ended with exit code 0", 1),
        ("sys.exit(0)", "ended with exit code 0", 1),
        ("os._exit(3)", "ended with exit code 3", 3),
    ],
)
def test_the_silent_rank_is_blamed_and_not_the_one_that_lost_it(fault, reported, code, tmp_path):
    body = _own_failures(fault) + "raise RuntimeError('connection closed by peer')"
    done = run(body, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.returncode == code
    assert done.stderr == (
        f"error: rank 1 {reported} without a report\n"
        "then rank 0 lost another rank: RuntimeError: connection closed by peer\n"
    )


def test_a_rank_that_leaves_the_others_waiting_is_told(tmp_path):
    variables = os.environ | {"TMPDIR": str(tmp_path)}
    done = run(_own_failures("sys.exit(0)") + "time.sleep(600)", grace=0.2, env=variables)
    assert (done.returncode, done.stderr) == (1, "error: rank 1 ended with exit code 0 without a report\n")


def test_a_rank_that_failed_does_not_write_its_last_words_for_ever():
    body = """
    import atexit
    from mca_train.launch import launcher
    launcher._LAST_WORDS = 1.0
    if rank == 0:
        atexit.register(time.sleep, 600)
        atexit.register(print, "last words", flush=True)
        raise McaError("no such file")
    time.sleep(600)
    """
    done = run(body, grace=0.2)
    assert (done.returncode, done.stdout, done.stderr) == (1, "last words\n", "error: no such file\n")


def test_nobody_else_can_take_the_port_where_ranks_will_meet():
    body = """
    import socket
    if rank == 0:
        try:
            socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        except OSError as error:
            print(os.strerror(error.errno))
    """
    done = run(body)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Address already in use\n", "")


def test_a_signal_before_training_leaves_nothing(tmp_path):
    body = "print('ready', flush=True)\ntime.sleep(600)"
    code = textwrap.dedent(
        f"""
        import sys, time
        from mca_train import cli
        from mca_train.launch import failures
        from mca_train.launch.launcher import scratch_folder
        def work(*_):
            with failures.raising_on_signals(), scratch_folder():
{textwrap.indent(body, " " * 16)}
        cli._run = work
        sys.exit(cli.main(["pretrain"]))
        """
    )
    for number, said in ((signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP"), (signal.SIGINT, "SIGINT")):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.communicate(timeout=120) == ("", f"stopped by {said}\n")
        assert process.returncode == 128 + number
        assert list(tmp_path.iterdir()) == []


def test_under_nohup_launcher_and_ranks_ignore_sighup():
    body = """
    import signal
    for process in (os.getppid(), os.getpid()):
        os.kill(process, signal.SIGHUP)
    time.sleep(0.2)
    print("trained")
    """
    done = run(body, ranks=1, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")


def test_ranks_may_all_leave_early():
    assert run("sys.exit(0)").returncode == 0


def test_what_the_communication_library_aborts_is_not_the_cause(tmp_path):
    fault = "raise RuntimeError('broken here')"
    done = run(_own_failures(fault) + "os.abort()", env=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith("rank 1 failed:\nTraceback")
    assert done.stderr.endswith("RuntimeError: broken here\n")


def test_wrong_usage_ends_with_2_and_words_of_an_exit_are_told():
    assert run("raise UsageError('no such key')").returncode == 2
    done = run("sys.exit('no more')")
    assert (done.returncode, done.stderr) == (1, "error: no more\n")


@pytest.mark.parametrize(("asked", "threads"), [("", len(os.sched_getaffinity(0)) // 2 or 1), ("3", 3)])
def test_ranks_with_a_gpu_do_not_get_the_launchers_one_thread(asked, threads, monkeypatch):
    monkeypatch.setenv("MCA_THREADS", asked)
    assert environment.threads_per_rank(2, gpu=True) == threads
    assert environment.threads_per_rank(10_000, gpu=True) == (3 if asked else 1)
    body = "print('ready', flush=True)\nprint(os.environ['OMP_NUM_THREADS'], flush=True)\ntime.sleep(600)"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    process = _started(body, spawned=True)
    assert process.stdout.readline() == f"{threads}\n"
    process.send_signal(signal.SIGINT)
    process.wait(timeout=120)


def _started(body, spawned=False):
    imports = "import os, signal, sys, time"
    launch = f"spawn_ranks([sys.executable, '-c', {imports + chr(10) + body!r}], 2, folder)"
    code = textwrap.dedent(
        f"""
        {imports}
        from mca_train.launch.launcher import fork_ranks, spawn_ranks
        from mca_train.launch.launcher import scratch_folder
        def target():
{textwrap.indent(textwrap.dedent(body), " " * 12)}
        with scratch_folder() as folder:
            code = {launch if spawned else "fork_ranks(target, 2, folder)"}
        sys.exit(code)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def _met(folder):
    """Has each rank write its process in a file, and go on when both have."""
    return textwrap.dedent(f"""
    with open(os.path.join({str(folder)!r}, "new" + os.environ["RANK"]), "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, os.path.join({str(folder)!r}, os.environ["RANK"]))
    while not all(os.path.exists(os.path.join({str(folder)!r}, rank)) for rank in "01"):
        time.sleep(0.01)
    print("ready", flush=True)
    time.sleep(600)
    """)


def test_sigterm_reaches_every_rank(tmp_path):
    body = """
    def stop(*_):
        os._exit(0)
    signal.signal(signal.SIGTERM, stop)
    """
    process = _started(textwrap.dedent(body) + _met(tmp_path))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0


def test_sigint_ends_all_ranks(tmp_path):
    process = _started(_met(tmp_path))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130


@pytest.mark.parametrize("spawned", [False, True])
def test_ranks_die_with_a_killed_launcher(spawned, tmp_path):
    process = _started(_met(tmp_path), spawned)
    process.kill()
    process.wait()
    for rank in "01":
        while _runs(int((tmp_path / rank).read_text())):  # one that stays ends in pytest's limit
            time.sleep(0.01)


def _runs(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def test_without_a_launcher_the_failure_goes_to_stderr(capsys):
    def target():
        raise ValueError("x")

    assert report_failure(target, None, 3) == 1
    assert "rank 3 failed" in capsys.readouterr().err
