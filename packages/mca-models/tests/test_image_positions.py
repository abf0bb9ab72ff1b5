"""Positions of tokens with images among them are those of the installed transformers."""

import copy

import pytest
import tiny_vision
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from mca_models.images import ImageSpan, feature_rows, positions

SECTIONED = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
)
Piece = int | tuple[int, int]
"""So many tokens of text, or an image of so many rows and columns."""


@pytest.fixture(scope="module", params=SECTIONED)
def theirs(request: pytest.FixtureRequest) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(**copy.deepcopy(tiny_vision.described(request.param)))
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


def pieces() -> st.SearchStrategy[list[Piece]]:
    side = st.integers(1, 9)
    return st.lists(st.one_of(st.integers(1, 12), st.tuples(side, side)), min_size=1, max_size=8)


def separated(drawn: list[Piece]) -> list[Piece]:
    """Two images never touch: each has a token before it and one after it."""
    found: list[Piece] = []
    for piece in drawn:
        found += [1] if isinstance(piece, tuple) and found and isinstance(found[-1], tuple) else []
        found.append(piece)
    return found


def placed(drawn: list[Piece]) -> tuple[int, list[ImageSpan]]:
    token, images = 0, []
    for piece in drawn:
        if isinstance(piece, tuple):
            images.append(ImageSpan(token, *piece))
            token += piece[0] * piece[1]
        else:
            token += piece
    return token, images


@settings(max_examples=25, deadline=None)
@given(drawn=pieces())
def test_positions_are_those_of_transformers(
    theirs: transformers.PreTrainedModel, drawn: list[Piece]
) -> None:
    length, images = placed(separated(drawn))
    kinds = torch.from_numpy((feature_rows(length, images) >= 0).astype("int32"))[None]
    grid = torch.tensor([(1, 2 * each.rows, 2 * each.columns) for each in images]).reshape(-1, 3)
    expected, _ = theirs.get_rope_index(
        torch.zeros(1, length).long(), mm_token_type_ids=kinds, image_grid_thw=grid
    )
    assert torch.equal(torch.from_numpy(positions(length, images)), expected[:, 0])


def test_rows_count_the_features_of_a_whole_micro_batch() -> None:
    rows = feature_rows(9, [ImageSpan(1, 1, 2), ImageSpan(4, 2, 2)], first=10)
    assert rows.tolist() == [-1, 10, 11, -1, 12, 13, 14, 15, -1]
