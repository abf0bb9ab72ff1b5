"""Signals at every stage: nothing is left and the exit code says so, or the checkpoint is complete and it is 0."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from files import assert_same_tensors

from mca_config.errors import McaError
from mca_convert.cli import main
from mca_convert.interrupts import Interrupted, Interrupts

SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
STAGES = {
    "opening": "mca_convert.conversion.open_checkpoint",
    "planning": "mca_convert.conversion.plan_to_mca",
    "making the folder": "mca_models.storage.staging_folder.StagingFolder._mark",
    "making files": "mca_models.storage.writer.make_file",
    "reading": "mca_convert.reader.SourceFile.read_into",
    "writing": "mca_models.storage.writer._pwrite",
    "small files": "mca_models.checkpoint.mca_directory.write_file",
}


def signalling(
    monkeypatch: pytest.MonkeyPatch, target: str, number: int, *, after: bool = False
) -> list[int]:
    """Has each call of ``target`` raise a signal; returns a list that grows with every one."""
    from importlib import import_module

    parts = target.split(".")
    owner: Any = import_module(
        ".".join(parts[: sum(part[0].islower() or part[0] == "_" for part in parts[:-1])])
    )
    for part in parts[len(owner.__name__.split(".")) : -1]:
        owner = getattr(owner, part)
    original: Callable[..., Any] = getattr(owner, parts[-1])
    raised: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not after:
            raised.append(number)
            signal.raise_signal(number)
        result = original(*args, **kwargs)
        if after:
            raised.append(number)
            signal.raise_signal(number)
        return result

    monkeypatch.setattr(owner, parts[-1], call)
    return raised


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_left(stage, number, tiny, tmp_path: Path, capsys, monkeypatch) -> None:
    source, output = tiny("llama"), tmp_path / "a" / "b"
    capsys.readouterr()
    before = [signal.getsignal(each) for each in SIGNALS]
    raised = signalling(monkeypatch, STAGES[stage], number)
    others = [each for each in SIGNALS if each != number]
    signalling(monkeypatch, "shutil.rmtree", others[0])  # again and again while it cleans up
    assert main(["--checkpoint_path", str(source), "--output_path", str(output)]) == 128 + number
    assert raised and not list(tmp_path.iterdir())
    assert capsys.readouterr().err == f"{SIGNALS[number]}; nothing is left at the output path\n"
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_at_the_renaming_it_comes_too_late(exists, after, tiny, tmp_path: Path, capsys, monkeypatch) -> None:
    source, output = tiny("llama"), tmp_path / "out"
    if exists:
        output.mkdir()
    raised = signalling(monkeypatch, "os.rename", signal.SIGINT, after=after)
    code = main(["--checkpoint_path", str(source), "--output_path", str(output), "--to", "hf"])
    assert raised
    assert code == 0 and "nothing is left" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert_same_tensors(source, output)


def test_after_the_last_file_it_changes_nothing(tiny, tmp_path: Path, capsys, monkeypatch) -> None:
    source, output = tiny("llama"), tmp_path / "out"
    raised = signalling(monkeypatch, "mca_convert.commands._summary", signal.SIGTERM)
    assert main(["--checkpoint_path", str(source), "--output_path", str(output), "--to", "hf"]) == 0
    assert raised and "nothing is left" not in capsys.readouterr().err
    assert_same_tensors(source, output)


def test_an_upload_is_ended_by_a_signal(tiny, tmp_path: Path, monkeypatch) -> None:
    """Its threads are not waited for; the checkpoint stands."""
    output, reader, writer = tmp_path / "out", *os.pipe()
    arguments = ["--checkpoint_path", str(tiny("llama")), "--output_path", str(output), "--quiet"]

    def endless(folder: Path, name: str) -> str:
        thread = threading.Thread(target=time.sleep, args=(30,))
        thread.start()
        signal.raise_signal(signal.SIGTERM)
        thread.join()
        return "never"

    monkeypatch.setattr("mca_models.hub.require_upload", lambda name: None)
    monkeypatch.setattr("mca_models.hub.upload", endless)
    if (process := os.fork()) == 0:
        os.dup2(writer, 2)
        main([*arguments, "--push_to_hub", "org/name"])
        os._exit(0)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 143
    with os.fdopen(reader) as stream:
        last = stream.read().splitlines()[-1]
    assert last == f"terminated; {output} is complete, the upload to org/name is not"
    assert main(["inspect", str(output)]) == 0


def test_an_upload_that_cannot_be_is_refused_before_the_work(
    tiny, tmp_path: Path, capsys, monkeypatch
) -> None:
    output = tmp_path / "out"
    arguments = ["--checkpoint_path", str(tiny("llama")), "--output_path", str(output), "--push_to_hub"]
    assert main([*arguments, "badname"]) == 2
    assert "--push_to_hub badname: expected an id like org/name" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    assert main([*arguments, "org/name"]) == 1
    assert capsys.readouterr().err.startswith("error: --push_to_hub org/name: you are not logged in")
    assert not output.exists()

    def fail(folder: Path, name: str) -> str:
        raise McaError("--push_to_hub org/name: the Hub is full")

    monkeypatch.setattr("mca_models.hub.require_upload", lambda name: None)
    monkeypatch.setattr("mca_models.hub.upload", fail)
    assert main([*arguments, "org/name"]) == 1
    last = f"error: --push_to_hub org/name: the Hub is full ({output} is complete, only the upload failed)"
    assert capsys.readouterr().err.splitlines()[-1] == last and (output / "mca_config.json").exists()


AT_IMPORT = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "MODULE":
            os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Finder())
from mca_convert.cli import main
sys.argv[1:] = ["inspect", "."]
sys.exit(main())
"""


def test_while_the_process_ends_signals_are_ignored() -> None:
    """Python's end puts the default in the place of handlers, and leaves what is ignored."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with Interrupts().listening(to_the_end=True):
            pass
        assert all(signal.getsignal(number) is signal.SIG_IGN for number in SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("module", ["argparse", "mca_config.errors", "mca_convert.inspection"])
def test_while_it_imports(module, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_IMPORT.replace("MODULE", module)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted; nothing is left at the output path\n")


def test_what_is_ignored_stays_ignored(tiny, tmp_path: Path, monkeypatch) -> None:
    """Ignore the signal as nohup does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signalling(monkeypatch, STAGES["writing"], signal.SIGHUP) == []
        assert main(["--checkpoint_path", str(tiny("llama")), "--output_path", str(tmp_path / "out")]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_exit_code_is_that_of_the_first_signal_of_the_work() -> None:
    interrupts = Interrupts()
    assert (interrupts.code, interrupts.word) == (0, "")
    interrupts.check()
    with interrupts.holding() as hold:
        hold()
        for number in (signal.SIGTERM, signal.SIGINT):
            interrupts._arrive(number, None)
        assert (interrupts.code, interrupts.word) == (128 + signal.SIGTERM, "terminated")
        with pytest.raises(Interrupted):
            interrupts.check()
    assert interrupts.code == 0, "the work is done"
    interrupts.check()
    with pytest.raises(Interrupted):
        Interrupts()._arrive(signal.SIGHUP, None)
