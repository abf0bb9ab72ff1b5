"""Towers of published models, and the images that a plan counts for them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen2VLConfig

from mca_config.errors import UsageError
from mca_config.model_config import McaModelConfig
from mca_models.templates import config_from_hf, get_family
from mca_train.plan.vision_memory import Extent, Images, VisionTower, _score_keys, plan_images

DATA = Path(__file__).parents[3] / "mca-models/tests/data/vision_configs"


def published(name: str) -> McaModelConfig:
    return config_from_hf(json.loads((DATA / f"{name}.json").read_text()))


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_every_published_tower_is_known(path: Path) -> None:
    config = published(path.stem)
    tower = VisionTower.from_config(config)
    family = get_family(config.model_type).vision
    unread = family is not None and family.image_tokens is None  # it takes no rows with images
    if unread:
        assert tower is None
        return
    assert tower is not None
    assert tower.hidden >= 768
    assert tower.depth > 10 or config.model_type == "gemma4_unified"  # which has no encoder


@pytest.mark.parametrize(("name", "pixels"), [("gemma-3-27b", 896), ("internvl3-78b", 448)])
def test_images_of_one_size_are_256_tokens_each(name: str, pixels: int) -> None:
    config = published(name)
    found = plan_images(config, frozenset(), 4096, takes=True, count=3)
    assert found is not None
    assert (found.count, found.pixels, found.tokens) == (3, pixels, 256)
    assert plan_images(config, frozenset(), 4096, takes=True, pixels=pixels) is not None
    with pytest.raises(
        UsageError, match=f"^--image_size 300: images .* are all of {pixels} pixels; leave it out"
    ):
        plan_images(config, frozenset(), 4096, takes=True, pixels=300)


@pytest.mark.parametrize(
    ("name", "sizes", "left_out", "tokens"),
    [
        ("internvl3-78b", {"image_size": [28, 28], "patch_size": [14, 14]}, None, 1),
        ("gemma-3-27b", {"image_size": 56, "patch_size": 14}, None, 16),
        ("mistral-small-3.2-24b", {}, "model_type", 256),
    ],
)
def test_towers_that_are_small_or_leave_out_what_transformers_fills_in(
    name: str, sizes: dict[str, Any], left_out: str | None, tokens: int
) -> None:
    hf = json.loads((DATA / f"{name}.json").read_text())
    hf["vision_config"] = {
        key: value for key, value in hf["vision_config"].items() if key != left_out
    } | sizes
    found = plan_images(config_from_hf(hf), frozenset(), 4096, takes=True)
    assert found is not None
    assert found.tokens == tokens


def test_a_tower_multiplies_patches_by_every_weight() -> None:
    """Qwen2.5-VL: an embedding of 2 x 3 x 14 x 14 values, gated blocks with scores, and a merger of 2 x 2 patches."""
    found = plan_images(published("qwen2.5-vl-72b"), frozenset(), 4096, takes=True, pixels=56)
    assert found is not None
    hidden, inner, merged, patches = 1280, 3456, 4 * 1280, 16 * found.count
    block = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden * 16
    weights = 32 * block + 1176 * hidden + (merged + 8192) * hidden
    assert found.flops(2) == 2 * 2 * patches * weights


def test_images_may_fill_a_sequence() -> None:
    config = published("qwen2.5-vl-72b")
    found = plan_images(config, frozenset(), 4096, takes=True)
    assert found is not None
    needed = found.tokens + 1
    assert plan_images(config, frozenset(), needed, takes=True) == found
    assert plan_images(config, frozenset(), needed - 1, takes=True) is None
    assert plan_images(config, frozenset(), 2 * needed, takes=True, count=2) is not None
    with pytest.raises(UsageError, match=f"^--images 2: they are {2 * needed} tokens"):
        plan_images(config, frozenset(), 2 * needed - 1, takes=True, count=2)


@pytest.mark.parametrize(
    ("sizes", "inner"),
    [({"embed_dim": 64, "mlp_ratio": 3}, 192), ({"embed_dim": 64, "mlp_ratio": 4}, 256)],
)
def test_the_width_of_an_mlp_may_be_a_multiple_of_the_hidden_size(sizes: dict[str, int], inner: int) -> None:
    hf = Qwen2VLConfig(vision_config={"depth": 2, "num_heads": 4, "hidden_size": 48, **sizes}).to_dict()
    tower = VisionTower.from_config(config_from_hf(hf))
    assert tower is not None
    assert (tower.hidden, tower.inner, tower.features) == (64, inner, 48)


SIZES: Any = SimpleNamespace(sequences=5, width=2)


def images(
    form: Any = "patches", *, words: int = 0, tile: int = 0, kind: str = "siglip_vision_model"
) -> Images:
    """Two images of 3 x 3 tokens, each of 3 x 3 patches; all sizes are different numbers."""
    sizes = {"depth": 7, "hidden": 11, "inner": 13, "features": 17, "merge": 3, "patch": 2, "values": 19}
    tower = VisionTower(
        kind=kind, form=form, projectors=2, side=None, tile=tile, visual_vocab_size=words, **sizes
    )
    return Images(tower=tower, count=2, pixels=18, trained=frozenset({"vision", "projector"}))


@pytest.mark.parametrize(("kind", "factors"), [("siglip_vision_model", 2), ("qwen2_5_vl_vision", 3)])
@pytest.mark.parametrize("words", [0, 23])
def test_forward_passes_of_a_tower_by_hand(kind: str, factors: int, words: int) -> None:
    """A projector takes the 9 patches of a token; a mixture of words takes its scores and its sum for each token."""
    each, patches = images(words=words, kind=kind), 5 * 2 * 81
    assert (each.side, each.tokens, each.patches) == (3, 9, 2 * 81)
    layer = 4 * 11 * 11 + factors * 11 * 13 + 2 * 11 * 81
    projected = 2 * (9 * 11 + 17) * 11 + words * 11 + words * 17 / 9
    assert each.flops(5) == pytest.approx(2 * patches * (7 * layer + 19 * 11 + projected))


@pytest.mark.parametrize(("form", "masks"), [("patches", 0), ("sizes", 1)])
@pytest.mark.parametrize("words", [0, 23])
def test_memory_of_a_tower_by_hand(form: str, masks: int, words: int) -> None:
    """SigLIP's block keeps 4 of attention, 4 norms, and 2 of its MLP; numbers have 2 bytes, and words 4 more."""
    each, patches = images(form, words=words), 5 * 2 * 81
    block = patches * (4 * 11 * 2 + 4 * 2 * 11 + 2 * 13 * 2)
    expected = {
        "vision tower": 7 * block + masks * patches**2 * 2,
        "patches": patches * 19 * 2,
        "projector": 4 * 2 * patches * 11 * 2,
    } | ({"visual words": patches / 9 * 23 * (2 + 4)} if words else {})
    assert {line.what: line.bytes for line in each.lines(SIZES)} == pytest.approx(expected)
    assert each.running(SIZES) == patches * (max(4 * 13, 6 * 11) * 2 + 2 * 11 * 2)
    frozen = replace(each, trained=frozenset({"language"}))
    assert frozen.lines(SIZES) == []
    assert "vision tower" not in {
        line.what for line in replace(each, trained=frozenset({"projector"})).lines(SIZES)
    }


def test_tiles_attend_within_themselves() -> None:
    each = replace(images(tile=12), extent=Extent(tokens=50, tiles=3))
    assert (each.tokens, each.patches, each.length) == (50, 2 * 3 * 36, 2 * 51)
    assert replace(each, num_text_tokens=9).length == 2 * 59


@pytest.mark.parametrize(
    ("window", "inside"),
    [
        (0, 64.0),  # no windows: 8 x 8 patches
        (4, 16.0),
        (3, 9 * 81 / 64),  # 9 x 9 patches with their padding, in windows of 3 x 3
        (8, 64.0),
    ],
)
def test_patches_of_a_sam_tower_attend_within_padded_windows(window: int, inside: float) -> None:
    sizes = {"image_size": 16, "patch_size": 2, "window_size": window, "num_hidden_layers": 3}
    keys = _score_keys({**sizes, "global_attn_indexes": [1]})
    assert keys == (inside, 64, inside)
