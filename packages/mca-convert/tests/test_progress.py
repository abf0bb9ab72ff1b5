"""Progress of the commands: a bar on a terminal, or a line every ten seconds; sizes and tables."""

import io
import sys
import time
from typing import Any

import pytest
import tqdm

from mca_convert.output import format_size, progress_bar, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Updates of the bars."""
    made: list[Any] = []

    class Bar:
        n = 0

        def __init__(self, **options: Any) -> None:
            made.append(options)

        def update(self, step: int) -> None:
            self.n += step
            made.append(step)

        def close(self) -> None:
            made.append("closed")

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    return made


def test_a_bar_moves_in_steps_of_16_mib_and_ends_with_all(
    bars: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    step = 16 << 20
    with progress_bar("converting") as show:
        show(0, 0)
        assert bars == [], "nothing to do yet"
        for done in (0, step - 1, step, step + 5, 2 * step - 1, 3 * step, 3 * step + 1):
            show(done, 4 * step)
    options, *updates = bars
    shown = {"unit": "B", "unit_scale": True, "mininterval": 0.2}
    assert options == shown | {"total": 4 * step, "desc": "converting"}
    assert updates == [step, 2 * step, 1, "closed"]
    with progress_bar("converting"):
        pass
    assert len(bars) == 5, "without work there is no bar"


def test_a_line_is_written_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress_bar("converting") as show:
        for now[0], done in ((9.9, 1000), (10.0, 0), (10.0, 2000), (19.9, 3000), (20.0, 4000)):
            show(done, 8000)
        now[0] = 40.0
        show(5, 0)
    assert capsys.readouterr().err.splitlines() == [
        "converting: 2.00 KB of 8.00 KB (25%)",
        "converting: 4.00 KB of 8.00 KB (50%)",
        "converting: 5 bytes of 0 bytes (500%)",
    ]
    with progress_bar("converting", quiet=True) as show:
        now[0] = 100.0
        show(1, 1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 KB"),
        (999_999, "1000.00 KB"),
        (1_000_000, "1.00 MB"),
        (1_500_000_000, "1.50 GB"),
        (10**12, "1.00 TB"),
        (10**16, "10000.00 TB"),
    ],
)
def test_sizes_have_their_unit(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_a_table_has_numbers_to_the_right() -> None:
    rows = [["first", "1.5 GB", "x"], ["a", "12 bytes", "yy"]]
    assert list(table(["name", "size", "note"], rows)) == [
        "name       size  note",
        "first    1.5 GB  x",
        "a      12 bytes  yy",
    ]
    assert list(table(["n", "s"], [["1", "a"], ["2b", "1"]])) == [" n  s", " 1  a", "2b  1"]
