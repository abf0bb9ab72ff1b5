"""The first numbers that options take, and the last that they do not, on both sides of each limit."""

from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from mca_config.errors import McaError
from mca_models.megatron.log_probs.vocabulary import TokenValues
from mca_train.config.arguments import DataArguments, LaunchArguments, LoraArguments
from mca_train.data.sources import Source
from mca_train.losses.preference_options import KtoOptions, PreferenceOptions
from mca_train.plan.options import PlanOptions


def source(**options: Any) -> Source:
    return Source(path="data.jsonl", **options)


def data(**options: Any) -> DataArguments:
    return DataArguments(model_name_or_path="model", train_file="data.jsonl", **options)


def exo_pair(**options: Any) -> PreferenceOptions:
    return PreferenceOptions(kind="exo_pair", **options)


def planned(**options: Any) -> PlanOptions:
    return PlanOptions(gpus=1, **options)


LIMITS: list[tuple[Callable[..., Any], str, list[float], list[float]]] = [
    (PreferenceOptions, "beta", [0.0, -1e-9], [1e-9, 2.0]),
    (PreferenceOptions, "label_smoothing", [-1e-9, 0.5, 1.0], [0.0, 1e-9, 0.499]),
    (exo_pair, "label_smoothing", [0.0, 0.5], [1e-9, 0.499]),
    (PreferenceOptions, "rpo_alpha", [-1e-9], [0.0, 1.0]),
    (KtoOptions, "beta", [0.0, -1e-9], [1e-9, 2.0]),
    (KtoOptions, "desirable_weight", [-1e-9], [0.0, 1.0]),
    (KtoOptions, "undesirable_weight", [-1e-9], [0.0, 1.0]),
    (PlanOptions, "gpus", [0, -1], [1]),
    (planned, "images", [-1], [0, 1]),
    (planned, "videos", [-1], [0, 1]),
    (planned, "clips", [-1], [0, 1]),
    (planned, "image_size", [0, -1], [1]),
    (planned, "video_frames", [0, -1], [1]),
    (planned, "clip_seconds", [0.0, -1.0, inf, nan], [1e-9, 1e9]),
    (data, "seq_length", [1, 0], [2]),
    (data, "shuffle_buffer_size", [0, -1], [1]),
    (data, "max_train_samples", [0, -1], [1]),
    (data, "max_eval_samples", [0, -1], [1]),
    (data, "preprocessing_num_workers", [0, -1], [1]),
    (data, "video_max_frames", [0, -1], [1]),
    (data, "video_fps", [0.0, -1.0, inf], [0.01, 1.0]),
    (data, "video_max_seconds", [0.0, inf], [0.5, 1.0]),
    (data, "audio_max_seconds", [0.0, inf], [0.5, 1.0]),
    (LaunchArguments, "nproc_per_node", [0, -1], [1]),
    (LoraArguments, "lora_rank", [0, -1], [1]),
    (LoraArguments, "lora_dropout", [-1e-9, 1.0], [0.0, 0.999]),
    (source, "weight", [0.0, -1.0, inf, nan], [1e-9, 2.0]),
    (source, "max_samples", [0, -1], [1]),
    (TokenValues, "temperature", [0.0, -1.0, inf, nan], [1e-9, 2.0]),
]


@pytest.mark.parametrize(
    ("options", "name", "wrong", "right"), LIMITS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_number_is_taken_up_to_its_limit(
    options: Callable[..., Any], name: str, wrong: list[float], right: list[float]
) -> None:
    for value in right:
        assert getattr(options(**{name: value}), name) == value
    for value in wrong:
        with pytest.raises(McaError, match=f"(?s){name.split('_')[-1]}.*expected|exo_pair needs"):
            options(**{name: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda: PreferenceOptions(kind="dpo"), "dpo_loss"),  # type: ignore[arg-type]
        (lambda: PreferenceOptions(kind="ipo", label_smoothing=0.1), "dpo_label_smoothing is for"),
        (lambda: PreferenceOptions(kind="sigmoid", simpo_gamma=0.0), "simpo_gamma is for"),
        (lambda: PreferenceOptions(kind="orpo", rpo_alpha=0.0), "rpo_alpha"),
        (lambda: PlanOptions(search=True), "add --gpus"),
        (lambda: PlanOptions(search=True, gpus=1, dry_run=True), "--search excludes"),
        (lambda: PlanOptions(search=True, gpus=1, plot=Path()), "--search excludes"),
        (lambda: PlanOptions(hardware=Path()), "add --device"),
        (lambda: data(streaming=True, preprocessing_num_workers=1), "does nothing with streaming"),
        (lambda: LoraArguments(lora_rank=1, adapter_name_or_path="a"), "remove one of the two"),
    ],
)
def test_options_that_exclude_each_other_are_one_error(options: Callable[[], Any], words: str) -> None:
    with pytest.raises(McaError, match=words):
        options()


def test_options_that_go_together_are_taken() -> None:
    for kind in ("sigmoid", "robust", "exo_pair"):
        PreferenceOptions(kind=kind, label_smoothing=0.1)  # type: ignore[arg-type]
    PreferenceOptions(kind="simpo", simpo_gamma=0.0, rpo_alpha=0.0)
    PlanOptions(search=True, gpus=1)
    PlanOptions(hardware=Path(), device="h200")
    PlanOptions(dry_run=True, plot=Path())
    data(streaming=True)
    assert not LoraArguments().is_enabled
    assert LoraArguments(lora_rank=1).is_enabled and LoraArguments(adapter_name_or_path="a").is_enabled
