"""Memory that a step takes against what ``mca-train plan`` says, as figures and as a picture."""

import contextlib
import gc
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from tools.gpu_kit.kit import Kit, of_tests
from tools.gpu_kit.speed import _QWEN3, SIZES, TINY

if TYPE_CHECKING:
    from mca_models.megatron.names import Implementation

GIB = 2**30
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RUNS: dict[str, dict[str, Any]] = {
    "0.6b 2048": {"size": "0.6b", "seq_length": 2048},
    "0.6b 8192": {"size": "0.6b", "seq_length": 8192},
    "0.6b 8192 recompute": {"size": "0.6b", "seq_length": 8192, **FULL},
    "0.6b 4096 lora": {
        "size": "0.6b",
        "seq_length": 4096,
        "lora_rank": 16,
        "lora_target_modules": "all-linear",
    },
    "1.7b 4096 split": {"size": "1.7b", "seq_length": 4096, "use_distributed_optimizer": True},
    "8b-shape 4096": {"size": "8b-shape", "seq_length": 4096},
    "0.6b 4096 local layers": {"size": "0.6b", "seq_length": 4096, "transformer_impl": "local"},
}
TINY_RUNS: dict[str, dict[str, Any]] = {
    "tiny 256": {"seq_length": 256},
    "tiny 1024 recompute": {"seq_length": 1024, **FULL},
}
WITHIN = {"cuda": 0.15, "cpu": 0.5}
"""Tolerance relative to the plan; a process without a GPU has other memory too."""


def memory(kit: Kit) -> None:
    """Every run: two steps of the engine."""
    found: dict[str, tuple[float, float]] = {}
    for name, changes in (TINY_RUNS if kit.tiny else RUNS).items():
        planned, measured = _one(kit, name, dict(changes))
        found[name] = planned, measured
        kit.figure(f"{name}: planned GiB", planned)
        kit.figure(f"{name}: measured GiB", measured)
        kit.check(f"{name}: differs from the plan by", abs(measured / planned - 1), WITHIN[kit.device])
    draw(kit, found)


def _one(kit: Kit, name: str, changes: dict[str, Any]) -> tuple[float, float]:
    """Planned and measured."""
    from mca_train.plan.memory import plan_layout
    from mca_train.run.plan_input import make_plan_input

    run = _run_of(kit, name, changes)
    args = run.settings.training
    model, trainer_of = _maker(run)
    plan = plan_layout(make_plan_input(run, model), args, run.layout, 1)
    planned = max(needs.total for needs in plan.stages)
    with measured_peak(kit) as peak:
        trainer = trainer_of()
        trainer.train()
    del trainer
    return planned / GIB, peak[0] / GIB


def _run_of(kit: Kit, name: str, changes: dict[str, Any]) -> Any:
    """The checked run of a configuration."""
    from mca_train.run.rules import check
    from mca_train.run.settings import make_settings
    from mca_train.tasks import TASKS

    folder = kit.scratch / name.replace(" ", "-")
    folder.mkdir()
    size = changes.pop("size", None)
    wide = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 8192}
    document = _QWEN3 | (SIZES[size] if size else TINY | wide | {"num_attention_heads": 8})
    (folder / "config.json").write_text(json.dumps(document))
    values = {
        "model_name_or_path": str(folder),
        "train_file": str(folder / "none.jsonl"),
        "output_dir": str(folder / "out"),
        "max_steps": 2,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "bf16": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": kit.device == "cpu",
        **changes,
    }
    findings = check(TASKS["pretrain"], make_settings(TASKS["pretrain"], values, name), lambda *_: 1)
    if findings.impossible:
        raise RuntimeError("; ".join(findings.impossible))
    return findings.run


def _maker(run: Any) -> tuple["Implementation", Any]:
    """Return the config of the layers, and a function that makes the trainer of the run on full samples."""
    from mca_models import AutoModel
    from mca_models.megatron.factory.transformer_config import choose_implementation
    from mca_train import McaTrainer
    from tools.gpu_kit.speed import tokens_of

    args, length = run.settings.training, run.settings.data.seq_length

    def make() -> Any:
        model: Any = AutoModel.from_config(run.model, args, dtype="bfloat16")
        if run.settings.lora.is_enabled:
            from mca_models.megatron.peft import get_peft_model

            model = get_peft_model(model, run.settings.lora.config("CAUSAL_LM"))
        data = [{"input_ids": row} for row in tokens_of(4, length, run.model.vocab_size)]
        return McaTrainer(model=model, args=args, train_dataset=data)

    return choose_implementation(args), make


@contextlib.contextmanager
def measured_peak(kit: Kit) -> Iterator[list[int]]:
    """Bytes that are held at most in the block: of the GPU, else of the process."""
    gc.collect()
    if kit.device == "cpu":
        with of_tests("memory").peak() as found:
            yield found
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    peak: list[int] = []
    yield peak
    torch.cuda.synchronize()
    peak.append(torch.cuda.max_memory_allocated() - before)


def draw(kit: Kit, found: dict[str, tuple[float, float]]) -> None:
    """Planned and measured beside each other."""
    from mca_train.plots import make_axes, save

    figure, place = make_axes(8.0, 1.2 + 0.5 * len(found), "memory of a rank: planned and measured")
    for number, (planned, measured) in enumerate(found.values()):
        place.barh(
            number - 0.2, planned, height=0.38, color="#9ecae9", label="planned" if not number else None
        )
        place.barh(
            number + 0.2, measured, height=0.38, color="#4c78a8", label="measured" if not number else None
        )
    place.set_yticks(range(len(found)), list(found), fontsize=8)
    place.invert_yaxis()
    place.set_xlabel("GiB", fontsize=8)
    place.legend(fontsize=8, frameon=False)
    save(figure, kit.scratch, "memory")
