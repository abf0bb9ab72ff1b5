"""Memory that a step adds to the process of a rank, and the prediction of the dry run."""

import json
from pathlib import Path
from typing import Any

import memory
from dry_run_cases import CP, DENSE, EXPERTS, FULL, LORA, PP, SPLIT, TP, be_no_rank, prepared
from mca_train.dry_run.step import StepNeeds

MODEL = DENSE | {
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
}
OF_EXPERTS = EXPERTS | {
    "vocab_size": 4096,
    "hidden_size": 512,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("pretrain", 1, {}),
    "recomputed": ("pretrain", 1, FULL),
    "dpo": ("dpo", 1, {"seq_length": 128}),
    "bf16": ("pretrain", 1, {"bf16": True}),
    "tp sp": ("pretrain", 2, {TP: 2, "sequence_parallel": True}),
    "pp": ("pretrain", 2, {PP: 2, "gradient_accumulation_steps": 2}),
    "dp split": ("pretrain", 2, SPLIT),
    "lora": ("sft", 1, LORA),
    "cp": ("pretrain", 2, {CP: 2}),
    "experts": ("pretrain", 1, {}),
    "experts ep": ("pretrain", 2, {"expert_model_parallel_size": 2} | SPLIT),
}
STEP = {"seq_length": 512, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}


def write_model(folder: Path, name: str) -> None:
    """The configuration of a case's model."""
    model = OF_EXPERTS if name.startswith("experts") else MODEL
    (folder / "config.json").write_text(json.dumps(model))


def taken(folder: Path, name: str) -> int:
    """Bytes of this process at most for building a run and for a step of it; runs on every rank."""
    kind, size, changes = CASES[name]
    return stepped(prepared(folder, kind, STEP | changes, size))[0]


def stepped(run: Any) -> tuple[int, StepNeeds]:
    """The same of a run, and what the tracker counts of its step."""
    from mca_models import AutoModel
    from mca_train.dry_run.samples import route_evenly
    from mca_train.dry_run.step import Modes, build, measure
    from mca_train.dry_run.tracker import ModuleNames, Tracker
    from mca_train.trainer.loaders import iterate_steps

    with memory.peak() as found:
        modes = Modes(Tracker(ModuleNames()))
        trainer, engine = build(run.task, run.settings, run.model, modes, AutoModel.from_config)
        route_evenly(engine.models)
        needs = measure(trainer, engine, modes, next(iterate_steps(trainer.get_train_dataloader())))
    return found[0], needs


def said(folder: Path, name: str, rank: int) -> int:
    """Bytes that the dry run says; runs in a process of its own, which is no rank."""
    from mca_train.dry_run.step import measure_step

    be_no_rank()
    kind, size, changes = CASES[name]
    run = prepared(folder, kind, STEP | changes, size)
    accumulated = run.settings.training.gradient_accumulation_steps
    return measure_step(run.task, run.settings, run.model, rank, size, accumulated).peak
