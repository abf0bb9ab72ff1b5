"""Trains, resumes and exports on two ranks again and again, with one call to the C library failing in each run.

A run is ``{"what": ..., "model": ..., "folder": ..., "from": ..., "rank": r, "fault": {"site": ..., "nth": n, "error":
errno}}``: that call of rank r fails (see `fault_sites`); with ``"fault": null`` none. `run_all` takes a list of them;
they share their processes until one ends on one rank alone: when the other only waits for it, both are ended, as a
launcher does. The outcome of each is what came of it on each rank, with the sites that it called or the one that
failed, and the files in ``folder``, which is removed unless the run says ``"keep": true``.
"""

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fault_sites import Fault, heard, watched
from harness import RanksFailed, run_ranks
from train_cases import arguments, history, make_trainer, quietly

RANKS = 2
_IDLE = 10  # looks, 0.03 s apart, at which the other rank does nothing
_GLOO = "gloo_tcp_loop"
_HANGS = 60.0  # seconds, where a run takes less than one
_TIMING = (
    "trainer_state.json",
    "training_args.json",
    "train_log.jsonl",
    "loop_state.json",
    ".metadata",
    "manifest.json",
)
"""Never as long as before: they hold times, paths and random names, or the size of one that does."""
SMALL = {"gradient_accumulation_steps": 1, "count": 4}


def saved(case: dict[str, Any]) -> Any:
    """A trainer whose first step writes a checkpoint, with an export in it."""
    settings = SMALL | {"max_steps": 1, "save_steps": 1, "save_strategy": "steps", "save_hf_model": True}
    trainer = make_trainer(Path(case["model"]), Path(case["folder"]), **settings)
    return lambda: trainer.train() and history(trainer, "loss")


def resumed(case: dict[str, Any]) -> Any:
    """One that goes on from a checkpoint."""
    trainer = make_trainer(Path(case["model"]), Path(case["folder"]), max_steps=2, **SMALL)
    return lambda: trainer.train(resume_from_checkpoint="auto") and history(trainer, "loss")


def exported(case: dict[str, Any]) -> Any:
    """The model, as Hugging Face's checkpoint."""
    from mca_models import AutoModel

    folder = Path(case["folder"])
    model = AutoModel.from_pretrained(Path(case["model"]), arguments(folder))
    return lambda: model.save_pretrained_as_hf(folder / "out")


KINDS = {"save": saved, "resume": resumed, "export": exported}


def outcome(case: dict[str, Any], rank: int, reported: Path) -> dict[str, Any]:
    """Return the outcome of a run on this rank, whose calls go to ``reported``."""
    from mca_config.errors import McaError

    run = KINDS[case["what"]](case)
    fault = case["fault"] and Fault(**case["fault"])
    found: dict[str, Any] = {"error": None, "said": "", "losses": None}
    watch = watched(reported, fault) if not fault or rank == case["rank"] else contextlib.nullcontext()
    try:
        with watch:
            found["losses"] = quietly(run)
    except BaseException as error:
        import traceback

        ours = isinstance(error, McaError)
        found["error"] = "McaError" if ours else type(error).__name__
        found["said"] = str(error) if ours else traceback.format_exc()
    return found


def go_through(cases: list[dict[str, Any]], results: Path) -> None:
    """On every rank: all of ``cases`` until one is not over on both."""
    import torch

    rank, pids = torch.distributed.get_rank(), [0] * RANKS
    torch.distributed.all_gather_object(pids, os.getpid())
    for index, case in enumerate(begun(cases, rank)):
        with told_if_it_hangs(results / f"{index}.{rank}"):
            found = outcome(case, rank, reported(results, index, rank))
        write(results / f"{index}.{rank}", found)
        other, idle = results / f"{index}.{1 - rank}", 0
        while found["error"] and not other.exists() and idle < _IDLE:
            time.sleep(0.03)
            idle = idle + 1 if does_nothing(pids[1 - rank]) else 0
        if found["error"] and not (other.exists() and json.loads(other.read_text())["said"] == found["said"]):
            os.kill(pids[1 - rank], signal.SIGKILL)
            raise RuntimeError("the ranks do not agree")


def begun(cases: list[dict[str, Any]], rank: int) -> Iterator[dict[str, Any]]:
    """Each of ``cases`` when its folder is as it is to be."""
    import torch

    for case in cases:
        if rank == 0 and case["from"] is not None:
            shutil.copytree(case["from"], case["folder"])
        torch.distributed.barrier()
        yield case


def reported(results: Path, index: int, rank: int) -> Path:
    return results / f"reported.{index}.{rank}"


def write(file: Path, found: dict[str, Any]) -> None:
    new = file.with_suffix(f"{file.suffix}.new")
    new.write_text(json.dumps(found))
    new.rename(file)


@contextlib.contextmanager
def told_if_it_hangs(file: Path) -> Iterator[None]:
    """A block that ends within `_HANGS`, or the process ends and says in ``file`` where it stood."""

    def end() -> None:
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(stacks)
            stacks.seek(0)
            write(file, {"error": "it hangs", "said": stacks.read(), "losses": None})
        os._exit(1)

    watch = threading.Timer(_HANGS, end)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def does_nothing(pid: int) -> bool:
    """Return True if no thread of a process or of its children computes or waits for a disk.

    Threads of gloo's connections look for messages every 10 ms, which a rank that has failed does not send.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name != _GLOO and fields.split()[0] in "RD":
                return False
            if not all(does_nothing(int(child)) for child in (task / "children").read_text().split()):
                return False
    return True


def tree(folder: Path) -> dict[str, int]:
    """The size of every file, -1 of directories and of what is never the same."""
    return {
        str(path.relative_to(folder)): -1 if path.is_dir() or path.name in _TIMING else path.stat().st_size
        for path in sorted(folder.rglob("*"))
    }


def run_all(cases: list[dict[str, Any]], scratch: Path) -> list[dict[str, Any]]:
    """The outcomes of ``cases``, in as few groups of ranks as there are runs that end on one alone."""
    found: list[dict[str, Any]] = []
    while cases:
        results = Path(tempfile.mkdtemp(dir=scratch))
        try:
            run_ranks(RANKS, go_through, cases, results, timeout=120 + 10 * len(cases))
        except RanksFailed as error:
            sys.stderr.write(f"{error}\n")
        done = 0
        while done < len(cases) and (by_rank := sorted(results.glob(f"{done}.[01]"))):
            ranks = {file.suffix[1:]: json.loads(file.read_text()) for file in by_rank}
            sites = {rank: heard(reported(results, done, int(rank))) for rank in ("0", "1")}
            found.append({"ranks": ranks, "sites": sites, "tree": tree(Path(cases[done]["folder"]))})
            done += 1
        assert done, "no rank has come to an end"
        for case in cases:
            if not case.get("keep"):
                shutil.rmtree(case["folder"], ignore_errors=True)
        cases = cases[done:]
    return found
