"""Tokens of a video with sound, placed by hand: two frames of two tokens and three tokens of sound."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.errors import UsageError
from mca_models.media import ImageSpan
from mca_train.data import video_sound
from mca_train.data.video_sound import SoundingVideoTokens

VIDEO, AUDIO, BEGIN, END = 7, 8, 5, 6


@dataclass(frozen=True)
class Grid:
    """Stand-in for the grid of a clip of one second between frames."""

    sound: int = 3
    frames: int = 2
    rows: int = 1
    columns: int = 2
    interval: float = 1.0


def tokens(chunk: int | None) -> SoundingVideoTokens:
    videos: Any = SimpleNamespace(
        token=VIDEO,
        ids=lambda grid: ["video"],
        locate=lambda where, grid: [ImageSpan(int(where[0]), 1, 4, medium="video")],
    )
    audio: Any = SimpleNamespace(token=AUDIO)
    return SoundingVideoTokens(videos, audio, (BEGIN, END), 2.0, chunk)


@pytest.mark.parametrize(
    ("chunk", "runs"),
    [
        # at two positions a second the frames are at 0 and 2, the sound is at 0, 1 and 2
        (None, [("video", 0, 2), ("audio", 0, 2), ("video", 2, 4), ("audio", 2, 3)]),
        (2, [("video", 0, 2), ("audio", 0, 2), ("video", 2, 4), ("audio", 2, 3)]),
        (3, [("video", 0, 4), ("audio", 0, 3)]),
        (
            1,
            [
                ("video", 0, 2),
                ("audio", 0, 1),
                ("video", 2, 3),
                ("audio", 1, 2),
                ("video", 3, 4),
                ("audio", 2, 3),
            ],
        ),
    ],
)
def test_frames_and_sound_are_in_the_order_of_time_or_of_chunks(
    chunk: int | None, runs: list[tuple[str, int, int]]
) -> None:
    made, grid = tokens(chunk), Grid()
    assert made._runs(grid) == runs  # type: ignore[arg-type]
    number = {"video": VIDEO, "audio": AUDIO}
    inside = [number[medium] for medium, first, stop in runs for _ in range(stop - first)]
    assert made.ids(grid) == [BEGIN, *inside, END]  # type: ignore[arg-type]
    where = range(20, 40, 2)
    spans = made.locate(where, grid)  # type: ignore[arg-type]
    assert [(span.medium, *span.run) for span in spans] == runs  # type: ignore[misc]
    lengths = [stop - first for _, first, stop in runs]
    assert [span.start for span in spans] == [where[sum(lengths[:each])] for each in range(len(runs))]
    assert {(span.origin, span.shared_marks) for span in spans} == {(20, chunk is not None)}


def test_a_video_without_sound_is_placed_as_a_video() -> None:
    grid: Any = Grid(0)
    assert tokens(None).ids(grid) == ["video"]
    assert [span.run for span in tokens(2).locate([4], grid)] == [ImageSpan(4, 1, 4, medium="video").run]


@pytest.mark.parametrize(
    ("fields", "kind", "chunk"),
    [
        (None, "chunks", 50),
        ({}, "chunks", 50),
        ({"seconds_per_chunk": 0.5}, "chunks", 12),
        (None, "times", None),
    ],
)
@pytest.mark.parametrize("asked", [False, True])
def test_a_chunk_of_sound_has_the_positions_of_its_seconds(
    asked: bool, fields: Any, kind: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = SimpleNamespace(vision=SimpleNamespace(video_rules=SimpleNamespace(sound=kind)))
    for name, result in (
        ("video_tokens", "frames"),
        ("audio_tokens", "sound"),
        ("get_family", rules),
        ("config_ids", "marks"),
        ("positions_per_second", 25),
    ):
        monkeypatch.setattr(video_sound, name, lambda *_, result=result: result)
    monkeypatch.setattr(video_sound, "SoundingVideoTokens", lambda *given: given)
    config: Any = SimpleNamespace(model_type="m", vision_fields=fields)
    arguments: Any = SimpleNamespace(use_audio_in_video=asked)

    def made() -> Any:
        return video_sound.sounding_video_tokens(config, (), None, arguments)  # type: ignore[arg-type]

    assert made() == (("frames", "sound", "marks", 25, chunk) if asked else "frames")
    monkeypatch.setattr(video_sound, "positions_per_second", lambda config: None)
    if asked:
        with pytest.raises(
            UsageError, match="use_audio_in_video: a m model takes no sound between the frames"
        ):
            made()
