"""Tokens of an image that is cut into tiles are those that transformers' processors and models count."""

from types import SimpleNamespace

import pytest
import tiny_vision
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from mca_config.errors import McaError
from mca_models.templates import config_from_hf
from mca_models.templates.parts.llava import ONEVISION_GRIDS, best_resolution, tiled_tokens

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


@given(SIDES, SIDES, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_a_picture_is_shrunk_as_in_llava_onevision(height, width, most):
    processor = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    processor.num_image_tokens, processor.vision_aspect_ratio = SIDE**2, f"anyres_max_{most}"
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=ONEVISION_GRIDS)
    hf = tiny_vision.described("llava_onevision")
    del hf["image_grid_pinpoints"]
    vision = {**hf["vision_config"], "image_size": 384, "patch_size": 384 // SIDE}
    config = config_from_hf({**hf, "vision_config": vision, "vision_aspect_ratio": f"anyres_max_{most}"})
    counted = processor._get_number_of_features(height, width, 384, 384)
    try:
        assert tiled_tokens(config, height, width) == counted
    except McaError:  # not a pixel would remain
        assert SIDE**2 <= counted <= SIDE**2 + 6 * SIDE  # ends of rows without columns


def test_an_unknown_limit_of_tiles_is_refused():
    hf = {**tiny_vision.described("llava_onevision"), "vision_aspect_ratio": "square"}
    with pytest.raises(McaError, match=r"'vision_aspect_ratio' of config.json is 'square'"):
        tiled_tokens(config_from_hf(hf), 20, 20)


def test_sizes_that_the_file_leaves_out_are_transformers():
    from transformers import LlavaNextConfig

    hf = tiny_vision.described("llava_next")
    written = config_of(image_grid_pinpoints=LlavaNextConfig().image_grid_pinpoints)
    left_out = config_of(image_grid_pinpoints=hf["image_grid_pinpoints"])
    assert left_out.vision_fields.pop("image_grid_pinpoints")
    for size in ((300, 300), (100, 1000), (900, 500)):
        assert tiled_tokens(left_out, *size) == tiled_tokens(written, *size)
