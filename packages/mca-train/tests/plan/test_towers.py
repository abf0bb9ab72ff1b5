"""Towers of published models, and the images that a plan counts for them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2VLConfig

from mca_config.errors import UsageError
from mca_config.model_config import McaModelConfig
from mca_models.templates import config_from_hf, get_family
from mca_train.plan.vision_memory import VisionTower, plan_images

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
