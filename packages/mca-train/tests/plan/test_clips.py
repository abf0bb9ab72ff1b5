"""Audio clips that a plan assumes, for published models."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mca_config.errors import UsageError
from mca_models.templates import config_from_hf
from mca_train.cli import main
from mca_train.plan.audio_memory import PlannedMedia, plan_clips
from mca_train.plan.vision_memory import plan_images

CONFIGS = Path(__file__).parents[3] / "mca-models/tests/data/vision_configs"
TOKENS = {"qwen2-audio-7b": 750, "qwen2.5-omni-7b": 750, "qwen3-omni-30b-a3b": 390, "qwen3-asr-1.7b": 390}
"""Tokens of a clip of 30 seconds."""
SIZES = SimpleNamespace(sequences=1, width=2)
"""One sequence in bf16."""
ALL = frozenset({"language", "vision", "audio", "projector"})


def published(name):
    config = config_from_hf(json.loads((CONFIGS / f"{name}.json").read_text()))
    return config


@pytest.mark.parametrize("name", TOKENS)
def test_clips_of_published_models_are_counted(name):
    clips = plan_clips(published(name), ALL, 4096, takes=True, count=2)
    assert clips is not None and clips.tokens == TOKENS[name]
    kept = {line.what: line.bytes for line in clips.lines(SIZES)}
    assert set(kept) == {"audio projector", "audio tower", "spectrograms"}
    one = plan_clips(published(name), ALL, 4096, takes=True)
    assert sum(kept.values()) == pytest.approx(2 * sum(each.bytes for each in one.lines(SIZES)))
    frozen = plan_clips(published(name), frozenset({"language"}), 4096, takes=True)
    assert frozen.lines(SIZES) == []


def test_clips_that_cannot_be_planned_raise_one_error():
    audio, text = published("qwen2-audio-7b"), published("qwen2.5-vl-72b")
    with pytest.raises(UsageError, match="--clip_seconds 31: clips of qwen2_audio have at most 30 seconds"):
        plan_clips(audio, ALL, 4096, takes=True, seconds=31)
    with pytest.raises(
        UsageError, match="--clips 6: they are 4506 tokens, and a sequence has 4096 without images"
    ):
        plan_clips(audio, ALL, 4096, takes=True, count=6)
    assert plan_clips(audio, ALL, 700, takes=True) is None
    for config, takes in ((text, True), (audio, False)):
        assert plan_clips(config, ALL, 4096, takes=takes) is None
        with pytest.raises(UsageError, match=r"--clips: a .* model has no audio tower that a plan knows"):
            plan_clips(config, ALL, 4096, takes=takes, count=1)


def test_each_tower_is_trained_apart():
    config, freed = published("qwen2.5-omni-7b"), frozenset({"language", "audio"})
    media = PlannedMedia(
        images=plan_images(config, freed, 4096, takes=True), clips=plan_clips(config, freed, 4096, takes=True)
    )
    both, trained = media.flops(1)
    assert media.images is not None and media.clips is not None
    assert trained == media.clips.flops(1) < both
    assert {line.what for line in media.lines(SIZES)} >= {"audio tower"}
    assert "vision tower" not in {line.what for line in media.lines(SIZES)}


def test_the_plan_reports_clips(tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((CONFIGS / "qwen2-audio-7b.json").read_text())
    file = tmp_path / "run.yaml"
    values = {"model_name_or_path": str(model), "output_dir": str(tmp_path / "out"), "max_steps": 1}
    file.write_text(json.dumps(values | {"train_file": str(tmp_path / "rows.jsonl"), "seq_length": 2048}))
    words = [
        "plan",
        "sft",
        str(file),
        "--device",
        "h100-80",
        "--gpus",
        "8",
        "--clips",
        "2",
        "--clip_seconds",
        "10",
    ]
    main(words)
    assert (
        "audio        2 of 10 seconds in each sequence, 250 tokens each, frozen tower"
        in capsys.readouterr().out
    )
    main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["clips"] == {"in_each_sequence": 2, "frames": 1000, "tokens_of_each": 250}
    assert main([*words[:-1], "0"]) == 2
