"""Images, videos and clips that a plan assumes for each published model, to twelve digits, and their record.

    .venv/bin/python packages/mca-train/tests/plan/test_recorded_media.py    # records what the planner says now

Change the record only together with the reason for the change.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.model_config import McaModelConfig
from mca_models.templates import config_from_hf, get_family
from mca_train.plan.audio_memory import plan_clips
from mca_train.plan.vision_memory import plan_images, plan_videos

HERE = Path(__file__).parent
CONFIGS = HERE.parents[2] / "mca-models/tests/data/vision_configs"
RECORD = HERE / "recorded_media.json"
TRAINED = (
    frozenset({"language"}),
    frozenset({"language", "projector"}),
    frozenset({"language", "vision", "audio", "projector"}),
)
SIZES: Any = SimpleNamespace(sequences=3, width=2)


def media(name: str) -> dict[str, list[float]]:
    """Return the numbers of an image, two videos and a clip in a sequence, by medium and trained parts."""
    config = config_from_hf(json.loads((CONFIGS / f"{name}.json").read_text()))
    found: dict[str, list[float]] = {}
    for trained in TRAINED:
        for medium, each in (
            ("images", plan_images(config, trained, 1 << 16, takes=True)),
            ("clips", plan_clips(config, trained, 1 << 16, takes=True)),
        ):
            if each is None:
                continue
            kept = [line.bytes for line in each.lines(SIZES)]
            values = [each.count, each.tokens, each.flops(2), each.running(SIZES), *kept]
            found[f"{medium}, {' '.join(sorted(trained))}"] = [float(f"{value:.12g}") for value in values]
    return found | videos(config)


def videos(config: McaModelConfig) -> dict[str, list[float]]:
    """Return the numbers of two videos in a sequence; empty for a model without."""
    family = get_family(config.model_type).vision
    if family is None or family.video_tokens is None:
        return {}
    each = plan_videos(config, TRAINED[-1], 1 << 17, takes=True, count=2, frames=7)
    assert each is not None
    kept = [line.bytes for line in each.lines(SIZES)]
    values = [each.count, each.tokens, each.length, each.pixels, each.flops(2), each.running(SIZES), *kept]
    return {"videos": [float(f"{value:.12g}") for value in values]}


def names() -> list[str]:
    """Return the names of the published configurations."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


RECORDED: dict[str, dict[str, list[float]]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}


@pytest.mark.parametrize("name", names())
def test_media_of_published_models_are_those_on_record(name: str) -> None:
    found = media(name)
    assert found.keys() == RECORDED[name].keys()
    for what, values in found.items():
        assert values == pytest.approx(RECORDED[name][what], rel=1e-9), what


def main() -> None:
    """Write the record."""
    rows = (f"{json.dumps(name)}: {json.dumps(media(name))}" for name in names())
    RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
