import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mca_config.errors import McaError, UsageError
from mca_train.checkpoint.output_files import STATE_FILE, checkpoints, require_free, require_usable
from mca_train.checkpoint.writer import remove_unfinished


@pytest.mark.parametrize(
    "look",
    [lambda folder: require_usable(folder, []), lambda folder: require_free(folder, None, overwrite=False)],
)
def test_a_directory_that_another_rank_takes_away_is_one_that_is_not_there(
    look: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lost = tmp_path / "run", []

    def just_before(name: str) -> Callable[..., Any]:
        plain = getattr(os, name)

        def read(path: Any) -> Any:
            if Path(path) == folder and not lost:
                folder.rmdir()
                lost.append(name)
            return plain(path)

        return read

    folder.mkdir()
    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, just_before(name))
    look(folder)
    assert lost


@pytest.mark.parametrize("look", [lambda folder: remove_unfinished(folder, "checkpoint"), checkpoints])
def test_a_directory_that_cannot_be_listed_is_named(
    look: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error", str(path))

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(McaError, match=f"{tmp_path}: cannot be read"):
        look(tmp_path)


@pytest.mark.parametrize(("count", "end"), [(3, "3"), (4, "3, ...")])
def test_the_first_checkpoints_of_another_run_are_named(count: int, end: str, tmp_path: Path) -> None:
    for step in range(1, count + 1):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / STATE_FILE).write_text("{}")
    with pytest.raises(UsageError, match=rf"\(checkpoint-1, checkpoint-2, checkpoint-{re.escape(end)}\);"):
        require_free(tmp_path, None, overwrite=False)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("runs/out", "is where the run reads"),
        ("runs/out/hf", "is where the run reads"),
        ("runs/out/../out/hf", "is where the run reads"),
        ("runs", "is inside"),
        (".", "is inside"),
        ("runs/out/other", None),
        ("runs/output", None),
        ("other", None),
    ],
)
@pytest.mark.parametrize("position", [0, 1])
def test_a_run_does_not_overwrite_the_model_that_it_reads(
    source: str, words: str | None, position: int, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "out").mkdir(parents=True)
    sources: list[Path | None] = [None, tmp_path / "elsewhere"]
    sources.insert(position, tmp_path / source)
    output_dir = tmp_path / "runs" / "out"
    if words is None:
        require_usable(output_dir, sources)
        return
    with pytest.raises(McaError, match=f"^output_dir: {output_dir} {words}"):
        require_usable(output_dir, sources)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["config.json"], "config.json"),
        (["d.bin", "c.bin", "b.bin", "a.bin"], "a.bin, b.bin, c.bin, d.bin"),
        (["e.bin", "d.bin", "c.bin", "b.bin", "a.bin"], "a.bin, b.bin, c.bin, d.bin, ..."),
        (["notes.txt"], None),
        (["config.json", "train_log.jsonl"], None),
    ],
)
def test_files_of_others_that_a_run_may_replace_are_named(
    files: list[str], words: str | None, tmp_path: Path
) -> None:
    """A log is the trace of a run, whose files it may replace."""
    for name in files:
        (tmp_path / name).touch()
    if words is None:
        require_usable(tmp_path, [])
        return
    with pytest.raises(
        McaError, match=rf"^output_dir: {tmp_path} holds {re.escape(words)}, which mca did not"
    ):
        require_usable(tmp_path, [])
