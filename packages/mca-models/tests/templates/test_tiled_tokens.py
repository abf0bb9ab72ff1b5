"""Tokens of an image that is cut into tiles are those that transformers' processors and models count."""

import pytest
import tiny_vision
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from mca_config.errors import McaError
from mca_models.templates import config_from_hf
from mca_models.templates.parts.llava import best_resolution, tiled_tokens

TILE, SIDE = 336, 24
SIDES = st.integers(1, 3000)
SIZES = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda each: [TILE * each[0], TILE * each[1]]),
    min_size=1,
    max_size=5,
)


def config_of(**others):
    hf = tiny_vision.described("llava_next")
    vision = {**hf["vision_config"], "image_size": TILE, "patch_size": TILE // SIDE}
    return config_from_hf({**hf, "vision_config": vision, **others})


@given(SIDES, SIDES, SIZES)
@settings(max_examples=200, deadline=None)
def test_an_image_has_the_tokens_that_llava_next_counts(height, width, sizes):
    best = select_best_resolution((height, width), sizes)
    if best is None:  # not a pixel would remain
        return
    assert best_resolution(height, width, [tuple(each) for each in sizes]) == best
    whole = LlavaNextProcessor.__new__(LlavaNextProcessor)
    across = [pixels // TILE for pixels in best]
    picture, ends = whole._get_unpadded_features(height, width, SIDE, SIDE, *across)
    config = config_of(image_grid_pinpoints=sizes)
    if picture:
        assert tiled_tokens(config, height, width) == picture + ends + SIDE**2
    else:
        with pytest.raises(McaError, match="is too narrow"):
            tiled_tokens(config, height, width)


def test_sizes_that_the_file_leaves_out_are_transformers():
    from transformers import LlavaNextConfig

    hf = tiny_vision.described("llava_next")
    written = config_of(image_grid_pinpoints=LlavaNextConfig().image_grid_pinpoints)
    left_out = config_of(image_grid_pinpoints=hf["image_grid_pinpoints"])
    assert left_out.vision_fields.pop("image_grid_pinpoints")
    for size in ((300, 300), (100, 1000), (900, 500)):
        assert tiled_tokens(left_out, *size) == tiled_tokens(written, *size)
