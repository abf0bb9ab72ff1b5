"""Positions of tokens with images and videos among them are those of the installed transformers."""

import copy

import pytest
import tiny_vision
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mca_models.media import ImageSpan, attention_ends, batch_feature_rows, feature_rows, positions

SECTIONED = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
)
VIDEOS = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
)
TOKENS_PER_SECOND = 4  # the default of Qwen 2.5 VL, whose time positions are seconds
Medium = tuple[int, int, int, float]
"""Rows, columns, frames (0: an image) and seconds from one frame to the next."""
Piece = int | Medium
"""So many tokens of text, or an image or video."""


@pytest.fixture(scope="module", params=SECTIONED)
def theirs(request: pytest.FixtureRequest) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(**copy.deepcopy(tiny_vision.described(request.param)))
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


def media(frames: st.SearchStrategy[int]) -> st.SearchStrategy[Medium]:
    side = st.integers(1, 9)
    return st.tuples(side, side, frames, st.sampled_from([0.1, 0.3, 0.5, 1.0, 1.9, 4 / 3]))


def pieces(frames: st.SearchStrategy[int]) -> st.SearchStrategy[list[Piece]]:
    return st.lists(st.one_of(st.integers(1, 12), media(frames)), min_size=1, max_size=8)


def separated(drawn: list[Piece]) -> list[Piece]:
    """Two images never touch: each has a token before it and one after it."""
    found: list[Piece] = []
    for piece in drawn:
        found += [1] if isinstance(piece, tuple) and found and isinstance(found[-1], tuple) else []
        found.append(piece)
    return found


def parts(frames: int, model_type: str) -> int:
    """Return the number of token spans of a medium."""
    return 1 if model_type.startswith("qwen2") else max(frames, 1)


def placed(drawn: list[Piece], model_type: str) -> tuple[int, list[ImageSpan]]:
    """The length, and the spans; from Qwen 3 on a token of text is between two frames."""
    token, spans = 0, []
    for piece in drawn:
        if isinstance(piece, int):
            token += piece
            continue
        rows, columns, frames, seconds = piece
        interval = seconds * TOKENS_PER_SECOND if model_type == "qwen2_5_vl" else 1.0
        for number in range(parts(frames, model_type)):
            token += number > 0
            own = max(frames, 1) // parts(frames, model_type)
            spans.append(ImageSpan(token, rows, columns, own, interval))
            token += spans[-1].tokens
    return token, spans


@settings(max_examples=25, deadline=None)
@given(drawn=pieces(st.just(0)))
def test_positions_are_those_of_transformers(
    theirs: transformers.PreTrainedModel, drawn: list[Piece]
) -> None:
    compare(theirs, separated(drawn))


@settings(max_examples=25, deadline=None)
@given(drawn=pieces(st.integers(0, 5)))
@example(drawn=[(1, 1, 8, 31 / 7)])  # in fp64, the last frame would be one position later
def test_positions_with_videos_are_those_of_transformers(
    theirs: transformers.PreTrainedModel, drawn: list[Piece]
) -> None:
    if theirs.config.model_type in VIDEOS:
        compare(theirs, separated(drawn))


def compare(theirs: transformers.PreTrainedModel, drawn: list[Piece]) -> None:
    length, spans = placed(drawn, theirs.config.model_type)
    kinds = torch.from_numpy((feature_rows(length, spans) >= 0).astype("int32"))[None]
    found = [piece for piece in drawn if isinstance(piece, tuple)]
    numbers = iter(spans)
    for _, _, frames, _ in found:
        for _ in range(parts(frames, theirs.config.model_type)):
            span = next(numbers)
            kinds[0, span.start : span.start + span.tokens] = 2 if frames else 1

    def grids(*, videos: bool) -> torch.Tensor:
        some = [piece for piece in found if bool(piece[2]) == videos]
        return torch.tensor(
            [(max(n, 1), 2 * high, 2 * wide) for high, wide, n, _ in some], dtype=torch.long
        ).view(-1, 3)

    expected, _ = theirs.get_rope_index(
        torch.zeros(1, length).long(),
        mm_token_type_ids=kinds,
        image_grid_thw=grids(videos=False),
        video_grid_thw=grids(videos=True),
        second_per_grid_ts=torch.tensor([seconds for _, _, frames, seconds in found if frames]),
    )
    assert torch.equal(torch.from_numpy(positions(length, spans)), expected[:, 0])


def test_rows_count_the_features_of_a_whole_micro_batch() -> None:
    rows = feature_rows(9, [ImageSpan(1, 1, 2), ImageSpan(4, 2, 2)], first=10)
    assert rows.tolist() == [-1, 10, 11, -1, 12, 13, 14, 15, -1]


def test_rows_of_images_come_before_those_of_clips_of_the_whole_batch() -> None:
    """Audio has the positions of text, and no attention to later tokens."""
    clip, image = ImageSpan(1, 1, 2, medium="audio"), ImageSpan(4, 1, 2)
    rows = [found.tolist() for found in batch_feature_rows([6, 6], [[clip, image], [image]])]
    assert rows == [[-1, 4, 5, -1, 0, 1], [-1, -1, -1, -1, 2, 3]]
    assert positions(6, [clip]).tolist() == [list(range(6))] * 3
    assert attention_ends(6, [clip]).tolist() == list(range(1, 7))
