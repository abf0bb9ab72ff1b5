"""Seconds of a step and MFU of McaTrainer, in turns with a bare Megatron loop or with Hugging Face's Trainer.

Both stand in one process and take turns, a round of steps each, so that a device that changes its clock changes it for
both. Times go from the end of a step to the end of the next, after the device is done: data, callbacks and log count.
"""

import gc
import statistics
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from tools.gpu_kit.kit import Kit, LeftOut
from tools.gpu_kit.needs import length_for
from tools.gpu_kit.rivals import BareLoop, HuggingFace

ROUNDS, EACH, WARM = 4, 3, 3
ACCUMULATION = 4
_QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
}
SIZES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144},
    # layers of 8B, as many as fit beside a rival
    "8b-shape": {
        **{
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_hidden_layers": 4,
        },
        **{"vocab_size": 32768, "tie_word_embeddings": False},
    },
}
TINY = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256},
}
LIMITS = {"bare": 1.05, "hf": 1.0}
"""Seconds of ours for those of the rival, on a GPU."""


class Rival(Protocol):
    """Reference that runs in turns with McaTrainer."""

    def take(self, steps: int) -> list[float]:
        """Seconds of so many steps."""

    def end(self) -> None:
        """Gives up threads and memory."""

    @property
    def loss(self) -> float:
        """Return the loss of the last step."""


def document_of(size: str, tiny: bool) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    return _QWEN3 | SIZES[size] | (TINY if tiny else {})


LENGTH, TINY_LENGTH = 4096, 64
"""Tokens of a sample."""


def tokens_of(count: int, length: int, vocabulary: int) -> list[torch.Tensor]:
    """Random samples, all of one length."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for _ in range(count)]


def trainer_of(kit: Kit, size: str, length: int, steps: int, **changes: Any) -> Any:
    """McaTrainer of a random model in bf16, on full samples of so many tokens."""
    from mca_config import TrainingArguments
    from mca_models import AutoModel
    from mca_models.templates import config_from_hf
    from mca_train import McaTrainer

    document = document_of(size, kit.tiny)
    settings: dict[str, Any] = {
        "output_dir": str(kit.scratch / "ours"),
        "max_steps": steps,
        "learning_rate": 1e-4,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "bf16": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": steps,
        "use_cpu": kit.device == "cpu",
    }
    args = TrainingArguments(**(settings | changes))
    model = AutoModel.from_config(config_from_hf(document), args, dtype="bfloat16")
    data = [{"input_ids": row} for row in tokens_of(4 * ACCUMULATION, length, document["vocab_size"])]
    if args.per_device_train_batch_size > 1:
        data = [_half_a_target(sample["input_ids"]) for sample in data]
    return McaTrainer(model=model, args=args, train_dataset=data)


def _half_a_target(row: torch.Tensor) -> dict[str, torch.Tensor]:
    half = torch.arange(len(row)) < len(row) // 2
    row = row.masked_fill(half, 1)
    return {"input_ids": row, "labels": row.masked_fill(half, -100)}


def turns(
    kit: Kit,
    seconds: list[float],
    rival: Rival | None = None,
    theirs: list[float] | None = None,
    report: Callable[[], None] = lambda: None,
) -> Any:
    """A callback that times the trainer's steps.

    Args:
        kit: The step's.
        seconds: Gets the time of each step.
        rival: What is given its turn after every `EACH` steps.
        theirs: Gets the times of its steps, of which the first `WARM` do not count.
        report: Called after each round.
    """
    from transformers import TrainerCallback

    class Turns(TrainerCallback):  # type: ignore[misc]
        """Counts from the end of a step to the end of the next."""

        since = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            kit.synchronise()
            if state.global_step > WARM:
                seconds.append(time.perf_counter() - self.since)
            done = state.global_step - WARM
            if rival is not None and theirs is not None and done >= 0 and done % EACH == 0:
                theirs.extend(rival.take(EACH if done else WARM))
                kit.synchronise()
                if done:
                    report()
            self.since = time.perf_counter()

    return Turns()


def speed(kit: Kit, size: str, rival: str) -> None:
    """One size against one rival."""
    if rival == "bare":
        _require_engine(kit, "a bare loop over local layers holds the scores of every layer")
    document = document_of(size, kit.tiny)
    length = _length_here(kit, document, rival)
    trainer = trainer_of(kit, size, length, WARM + ROUNDS * EACH)
    kinds: dict[str, Callable[..., Rival]] = {"bare": BareLoop, "hf": HuggingFace}
    rows = tokens_of(4 * ACCUMULATION, length, document["vocab_size"])
    other = kinds[rival](kit, document, rows, ACCUMULATION)
    ours: list[float] = []
    theirs: list[float] = []

    def report() -> None:
        _report(kit, trainer, "mca", ours, length)
        _report(kit, trainer, rival, theirs[WARM:], length)
        kit.figure(f"seconds of mca for those of {rival}", _ratio(ours, theirs))
        kit.figure("rounds", len(ours) // EACH)

    trainer.add_callback(turns(kit, ours, other, theirs, report))
    try:
        trainer.train()
        loss = other.loss
    finally:
        other.end()
    limit = LIMITS[rival] if kit.device == "cuda" else 100.0
    kit.check(f"seconds of mca for those of {rival}", _ratio(ours, theirs), limit)
    mine = next(log["loss"] for log in trainer.state.log_history if "loss" in log)
    kit.figure("loss", mine)
    kit.check("losses differ by", abs(mine - loss) / loss, 0.1)
    if kit.device == "cuda":
        kit.figure("GiB at most, of both", torch.cuda.max_memory_allocated() / 2**30)


def _length_here(kit: Kit, document: dict[str, Any], rival: str) -> int:
    """Tokens of a sample for which the device has the memory; the figures say how many, and what that should need."""
    if kit.tiny:
        return TINY_LENGTH
    there = None
    if kit.device == "cuda":
        from mca_models.megatron import platform

        platform.set_device()  # whose variable must stand before CUDA begins
        there = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    length, needed = length_for(document, rival, there, LENGTH)
    kit.figure("tokens of a sample", length)
    kit.figure("GiB needed of both, by arithmetic", needed / 2**30)
    return length


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(ours) / statistics.median(theirs[WARM:])


def _report(kit: Kit, trainer: Any, name: str, seconds: list[float], length: int) -> None:
    from mca_train.metrics.throughput import ModelFlops, peak_flops

    median = statistics.median(seconds)
    kit.figure(f"{name}: s a step", median)
    kit.figure(f"{name}: spread", (max(seconds) - min(seconds)) / median)
    kit.figure(f"{name}: tokens/s", ACCUMULATION * length / median)
    flops = ModelFlops.from_config(trainer.model.config).for_tokens(
        ACCUMULATION * length, ACCUMULATION * length**2
    )
    kit.figure(f"{name}: model TFLOP/s", flops / median / 1e12)
    if peak := peak_flops(trainer.args, trainer.model.config.dtype, torch.device(kit.device)):
        kit.figure(f"{name}: MFU", flops / median / peak)


def _require_engine(kit: Kit, why: str) -> None:
    if kit.device == "cuda" and find_spec("transformer_engine") is None:
        raise LeftOut(f"Transformer Engine is not there: {why}")


PAIRS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": ACCUMULATION // 2}
"""Micro-batches of two samples, of which the first half is no target and all the same: a kernel that takes gradients of
other tokens has another norm."""
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "rope": {"apply_rope_fusion": True},
    "cross entropy": {"cross_entropy_loss_fusion": True},
    "cross entropy of te": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
    "none, pairs": PAIRS,
    "cross entropy of te, pairs": {
        **PAIRS,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
    },
    "packed": {"sequence_packing": True},
    "fp8": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "packed, rope": {"sequence_packing": True, "apply_rope_fusion": True},
    "local layers": {"transformer_impl": "local"},
    "local layers, packed": {"transformer_impl": "local", "sequence_packing": True},
}
_ON_CPU = ("none", "cross entropy", "none, pairs")


def fusions(kit: Kit) -> None:
    """Doubt 16: what each fused kernel saves, one after the other; a fused loss is the plain one."""
    _require_engine(kit, "there are no fused kernels")
    found: dict[str, dict[str, float]] = {}
    for name in VARIANTS if kit.device == "cuda" else _ON_CPU:
        try:
            found[name] = _logged(kit, name)
        except Exception:  # the next variant may run
            traceback.print_exc()
        kit.holds(f"fused {name}: runs", name in found)
        plain = "none, pairs" if name.endswith("pairs") else "none"
        if name in found and plain in found:
            for key in ("loss", "grad_norm") if plain != "none" else ("loss",):
                difference = abs(found[name][key] / found[plain][key] - 1)
                kit.check(f"fused {name}: {key} differs by", difference, 1e-2)
        gc.collect()
        if kit.device == "cuda":
            torch.cuda.empty_cache()


def _logged(kit: Kit, name: str) -> dict[str, float]:
    """Return the trainer's log of a variant, whose steps are timed."""
    seconds: list[float] = []
    length = TINY_LENGTH if kit.tiny else LENGTH
    trainer = trainer_of(kit, "0.6b", length, WARM + EACH, **VARIANTS[name])
    trainer.add_callback(turns(kit, seconds))
    trainer.train()
    kit.figure(f"doubt 16, fused {name}: s a step", statistics.median(seconds))
    logged: dict[str, float] = next(log for log in trainer.state.log_history if "loss" in log)
    return logged
