"""Files changed at random: every command ends soon, in one line or with a result, and never with a traceback."""

import json
import random
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mca_convert.cli import main

NASTY: list[Any] = [
    *(None, True, 0, -1, 7, 65536, 10**6, 10**18, 10**400, 0.5, 1e308, float("inf"), float("nan")),
    *("", "x", "\ud800", "\x1b[31m", "a\0b", "x" * 3000, [], [0], [[]], ["x"], {}, {"x": 1}),
]
BYTES = (b"[", b"{", b"\xff", b"\0", b"9" * 5000, b"[" * 5000, b'"\\ud800"', b"Infinity", b",")
HF = ("config.json", "config.json", "model.safetensors")
MCA = ("mca_config.json", "iter_0000001/manifest.json", "latest_checkpointed_iteration.txt")


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths of all values of a JSON document."""
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield (*path, key)
            yield from places(value, (*path, key))


def changed(text: bytes, draw: random.Random) -> bytes:
    """JSON ``text`` with another value, key or order in it, or other bytes."""
    if draw.random() < 0.3:
        at = draw.randrange(len(text))
        return text[:at] + draw.choice((b"", *BYTES)) + text[at + draw.randrange(4) :]
    try:
        document = json.loads(text)
        *path, last = draw.choice(list(places(document)))
    except (ValueError, IndexError):  # no JSON, or nothing in it
        return draw.choice(BYTES)
    owner = document
    for key in path:
        owner = owner[key]
    value = owner.pop(last)
    if isinstance(owner, dict) and (what := draw.randrange(8)):
        owner[last if what > 1 else draw.choice(("x", "\ud800", "a\0", "\x1b"))] = (
            value if what == 1 else draw.choice(NASTY)
        )
    return json.dumps(document).encode()


def spoil(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    if file.suffix != ".safetensors":
        file.write_bytes(changed(data, draw))
        return
    (length,) = struct.unpack("<Q", data[:8])
    header = changed(data[8 : 8 + length], draw)
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_changed_files_end_in_one_line(case: str, tiny, convert, tmp_path: Path, capsys) -> None:
    draw, source, work = random.Random(case), tiny(case), tmp_path / "work"
    mca, copy, output = convert(source, "mca"), work / "copy", work / "out"
    for _ in range(60):
        shutil.rmtree(work, ignore_errors=True)
        original, names = draw.choice(((source, HF), (mca, MCA)))
        shutil.copytree(original, copy)
        name = draw.choice(names)
        spoil(copy / name, draw)
        checkpoint = ["--checkpoint_path", str(copy)]
        conversion = [*checkpoint, "--output_path", str(output)]
        command = draw.choice((conversion, ["plan", "--json", *checkpoint], ["inspect", str(copy)]))
        capsys.readouterr()
        started = time.process_time()
        code = main(command)
        reported, told_as_error = capsys.readouterr()
        assert time.process_time() - started < 10
        assert code in (0, 1) and (code == 0 or told_as_error or reported)
        assert all(line.isprintable() for line in (reported + told_as_error).split("\n"))
        assert len(told_as_error) < 10_000 and "out of memory" not in told_as_error
        assert output.exists() is (code == 0 and command is conversion)
        assert {entry.name for entry in work.iterdir()} <= {"copy", "out"}
