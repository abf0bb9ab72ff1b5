"""Positions of Qwen's omni models, whose media are text, images, videos and audio, are those of transformers."""

import copy
from typing import Any

import pytest
import tiny_vision
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from mca_models.media import ImageSpan, positions

KINDS = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
PER_SECOND = 25
Piece = tuple[str, int, int, int, float]
"""Kind, rows, columns (of text and audio: tokens), frames, and seconds from one frame to the next."""


@pytest.fixture(scope="module", params=KINDS)
def theirs(request: pytest.FixtureRequest) -> Any:
    config = transformers.AutoConfig.for_model(**copy.deepcopy(tiny_vision.described(request.param)))
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


def pieces() -> st.SearchStrategy[list[Piece]]:
    side, frames = st.integers(1, 9), st.integers(1, 5)
    seconds = st.sampled_from([0.04, 0.1, 0.3, 2 / 3, 1.0, 4 / 3, 1.9, 2.0])
    kinds = st.sampled_from(["text", "image", "video", "audio"])
    return st.lists(st.tuples(kinds, side, side, frames, seconds), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(drawn=pieces())
def test_positions_are_those_of_transformers(theirs: Any, drawn: list[Piece]) -> None:
    kind, config = theirs.config.model_type, theirs.config
    ids: list[int] = [1]
    spans: list[ImageSpan] = []
    grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}
    seconds, frames = [], []
    for medium, rows, columns, count, interval in drawn:
        if medium == "text":
            ids += [1] * columns
        elif medium == "audio":
            spans.append(ImageSpan(len(ids) + 1, 1, columns, medium="audio"))
            ids += [config.audio_start_token_id, *[69] * columns, config.audio_end_token_id]
            frames.append(4 * columns if kind.startswith("qwen2_5") else 8 * columns)
        else:
            count = count if medium == "video" else 1
            exact = kind.startswith("qwen3")
            span = ImageSpan(
                len(ids) + 1, rows, columns, count, interval, PER_SECOND, past_time=True, exact=exact
            )
            spans.append(span)
            ids += [67, *[65 if medium == "image" else 66] * span.tokens, 68]
            grids[medium].append((count, 2 * rows, 2 * columns))
            seconds += [interval] * (medium == "video")
    if not any(grids.values()):
        return  # without them, transformers counts tokens
    expected, _ = theirs.get_rope_index(
        torch.tensor([ids]),
        torch.tensor(grids["image"]).view(-1, 3),
        torch.tensor(grids["video"]).view(-1, 3),
        torch.ones(1, len(ids)),
        audio_seqlens=torch.tensor(frames),
        second_per_grids=torch.tensor(seconds),
    )
    found = torch.from_numpy(positions(len(ids), spans))
    assert torch.equal(found.to(expected.dtype), expected[:, 0])


@pytest.mark.parametrize("change", [{"past_time": False}, {"per_second": 24.0}, {"interval": 1.2}])
def test_other_times_give_other_positions(change: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"interval": 1.5, "per_second": 25.0, "past_time": True}
    known, found = (
        positions(20, [ImageSpan(2, 2, 2, 3, **values)]) for values in (settings, {**settings, **change})
    )
    assert (known != found).any()
