"""Frames of a video that the model sees, by the processor's choice and the limit of the run."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.errors import McaError
from mca_train.data.medium_tokens import Grid
from mca_train.data.video_files import VideoFacts
from mca_train.data.video_tokens import VideoTokens


def sampled(total: int, chosen: list[float], most: int | None, step: int = 2) -> tuple[int, ...]:
    asked: list[Any] = []
    processor = SimpleNamespace(
        temporal_patch_size=step, sample_frames=lambda metadata: asked.append(metadata) or chosen
    )
    tokens: Any = SimpleNamespace(processor=processor, _arguments=SimpleNamespace(video_max_frames=most))
    facts: Any = SimpleNamespace(frames=total, fps=4.0, width=6, height=5, seconds=total / 4)
    found = VideoTokens._sample(tokens, facts)
    for each in asked:
        sizes = (each.total_num_frames, each.fps, each.width, each.height, each.duration)
        assert sizes == (total, 4.0, 6, 5, total / 4)
    return found


CHOSEN = [float(3 * index) for index in range(10)]


@pytest.mark.parametrize(
    ("most", "frames"),
    [
        (None, [*range(0, 30, 3)]),
        (10, [*range(0, 30, 3)]),
        (4, [0, 9, 18, 27]),
        (5, [0, 9, 18, 27]),
        (2, [0, 27]),
        (9, [0, 3, 9, 12, 15, 18, 24, 27]),
    ],
)
def test_a_limit_takes_frames_at_equal_distances_up_to_the_last(most: int | None, frames: list[int]) -> None:
    """Take a multiple of two frames, which the tower merges."""
    assert sampled(30, CHOSEN, most) == tuple(frames)


def test_fewer_frames_than_are_merged_are_all_taken() -> None:
    assert sampled(1, [], 4) == (0,) and sampled(2, [0.0, 1.0], 4) == (0, 1)
    assert sampled(2, [], None, step=3) == (0, 1)
    assert VideoFacts.__dataclass_fields__.keys() >= {"frames", "fps", "width", "height"}


@pytest.mark.parametrize(("counted", "processed"), [((2, 3), (2, 3)), ((2, 2), (2, 3)), ((2, 3), (2, 2))])
def test_a_video_that_changes_before_it_is_read_is_an_error(
    counted: tuple[int, int], processed: tuple[int, int]
) -> None:
    """Compare the placeholders with those of the file's size and with those of the processor's outputs."""
    rows = Grid(2, 3, 4)
    tokens: Any = SimpleNamespace(
        grid=lambda facts: Grid(*counted, 4),
        processor=lambda **given: {},
        _sampled=lambda facts: (0,),
        _output_grid=lambda outputs, grid: Grid(*processed, grid.frames),
        _tower_inputs=lambda outputs: "inputs",
    )
    video: Any = SimpleNamespace(place="clip.mp4", facts=lambda: None, frames=lambda indices: None)
    if counted == processed:
        assert VideoTokens.tensors(tokens, video, rows) == "inputs"
        return
    with pytest.raises(McaError, match=r"^video clip.mp4 had 4 x 2 x 3 tokens .* has 4 x 2 x 2 now"):
        VideoTokens.tensors(tokens, video, rows)
