"""Loss curves: fifty fp32 steps on every kind of layout against a single process.

    .venv/bin/python integration_tests/support/loss_curves.py [PATTERN ...]

Prints a row for each curve whose name fits a pattern (default: all, about 8 minutes on 2 cores): the largest relative
differences of loss and gradient norm over the steps, and of the loss on held-out samples. 1 if one is too large.
`--record` instead writes the curves that `tools/concept_pictures.py` draws for docs/validation.md.
"""

import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from harness import run_ranks
from train_cases import filled_packs, sparse_checkpoint, tiny_checkpoint, train_losses
from train_settings import CP, DP, EP, ETP1, PP, SP, TP, VPP

STEPS = 50
TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4

UNEVEN = {"pipeline_model_parallel_layout": "Et|tt|tL", "pipeline_model_parallel_size": 3}
FIRST = PP | {"num_layers_in_first_pipeline_stage": 1}
ZERO = DP | {"use_distributed_optimizer": True}
REDUCE = {"overlap_grad_reduce": True, "ddp_bucket_size": 5000}
GATHER = ZERO | REDUCE | {"overlap_param_gather": True}
PACKED = {"sequence_packing": True}

Curves = dict[str, tuple[int, dict[str, Any]]]
DENSE: Curves = {
    "micro-batch-4": (1, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}),
    "tp2": (2, TP),
    "tp2-sp": (2, SP),
    "pp2": (2, PP),
    "pp2-vpp2": (2, VPP),
    "pp2-first1": (2, FIRST),
    "pp3-uneven": (3, UNEVEN),
    "cp2": (2, CP),
    "dp2": (2, DP),
    "dp2-reduce": (2, DP | REDUCE),
    "dp2-zero": (2, ZERO),
    "dp2-zero-reduce": (2, ZERO | REDUCE),
    "dp2-zero-reduce-gather": (2, GATHER),
    "cp2-zero-reduce-gather": (2, CP | GATHER | {"gradient_accumulation_steps": 4}),
    "tp2-pp2": (4, TP | PP),
    "tp2-sp-pp2-vpp2": (4, SP | VPP),
    "tp2-sp-cp2": (4, SP | CP),
    "pp2-cp2": (4, PP | CP),
    "dp2-tp2-sp-zero": (4, ZERO | SP),
    "dp2-cp2-zero": (4, ZERO | CP),
    "dp2-pp2-zero": (4, ZERO | PP),
    "dp2-pp2-vpp2-zero-reduce-gather": (4, GATHER | VPP),
    "dp2-tp2-sp-pp2-zero-reduce-gather": (8, GATHER | SP | PP),
}
MOE: Curves = {
    "tp2-sp-etp2": (2, SP),
    "tp2-sp-ep2-etp1": (2, SP | EP | ETP1),
    "pp2": (2, PP),
    "pp2-vpp2": (2, VPP),
    "cp2": (2, CP),
    "cp2-ep2": (2, CP | EP),
    "dp2": (2, DP),
    "dp2-zero-reduce-gather": (2, GATHER),
    "ep2": (2, DP | EP),
    "ep2-allgather": (2, DP | EP | {"moe_token_dispatcher_type": "allgather"}),
    "ep2-zero": (2, ZERO | EP),
    "ep2-zero-reduce-gather": (2, GATHER | EP),
    "ep2-pp2-zero-reduce-gather": (4, GATHER | EP | PP),
    "tp2-sp-ep2-etp1-dp2-zero": (4, ZERO | SP | EP | ETP1),
    "tp2-sp-ep2-etp2": (4, DP | SP | EP),
}
LATENT: Curves = {
    "tp2-sp": (2, SP),
    "pp2": (2, PP),
    "pp2-vpp2": (2, VPP),
    "cp2": (2, CP),
    "ep2-zero-reduce-gather": (2, GATHER | EP),
}
PACKS: Curves = {
    "single": (1, {}),
    "tp2-sp": (2, SP),
    "pp2": (2, PP),
    "pp2-vpp2": (2, VPP),
    "cp2": (2, CP),
    "dp2": (2, {"gradient_accumulation_steps": 1}),
    "dp2-zero-reduce-gather": (2, GATHER | {"gradient_accumulation_steps": 1}),
    "tp2-sp-cp2": (4, SP | CP),
}
ALL: Curves = {
    f"{model}/{name}": curve
    for model, curves in {"dense": DENSE, "moe": MOE, "latent": LATENT, "packed": PACKS}.items()
    for name, curve in curves.items()
}
DRAWN = (
    "dense/tp2-sp-pp2-vpp2",
    "dense/cp2-zero-reduce-gather",
    "moe/tp2-sp-ep2-etp1-dp2-zero",
    "moe/pp2-vpp2",
)
RECORDED = Path(__file__).parents[2] / "docs" / "validation" / "loss_curves.json"
SMALL = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
COUNT = 42
RUN = {"gradient_accumulation_steps": 4, "learning_rate": 3e-3}
_SEQUENTIAL = {"train_sampling_strategy": "sequential"}
PACKS_PER_STEP, SAMPLES_PER_PACK = 2, 4


@dataclass(frozen=True)
class Difference:
    """Largest relative differences to the single process.

    Args:
        loss: Of the steps' losses.
        grad_norm: Of the steps' gradient norms.
        evaluation: Of the final loss on held-out samples.
    """

    loss: float
    grad_norm: float
    evaluation: float

    @property
    def small(self) -> bool:
        """Return True if the curves are the same."""
        return max(self.loss, self.evaluation) < TOLERANCE and self.grad_norm < GRADIENT_TOLERANCE


class CurvesOf:
    """Runs curves in ``folder``; the single process of each model once.

    Args:
        folder: For checkpoints and outputs.
        steps: Of a run.
        count: Samples of an epoch.
    """

    def __init__(self, folder: Path, steps: int = STEPS, count: int = COUNT) -> None:
        self._folder, self._run_of = folder, RUN | {"max_steps": steps, "count": count}
        self.single = cache(self._single)

    def _single(self, model: str) -> dict[str, list[float]]:
        changes = (
            {"gradient_accumulation_steps": PACKS_PER_STEP * SAMPLES_PER_PACK} if model == "packed" else {}
        )
        return self._run(1, model, {"sequence_packing": False} | changes)[0]

    def _run(self, size: int, model: str, changes: dict[str, Any]) -> list[dict[str, list[float]]]:
        checkpoint = self._folder / ("dense" if model == "packed" else model)
        if not checkpoint.exists():
            _BUILDERS[checkpoint.name](checkpoint)
        run = self._run_of | (_packed_run() if model == "packed" else {})
        return run_ranks(size, train_losses, checkpoint, self._folder / "out", timeout=600, **(run | changes))

    def layout(self, name: str) -> list[dict[str, list[float]]]:
        """Return the curves of each rank for a name of `ALL`."""
        size, changes = ALL[name]
        return self._run(size, name.partition("/")[0], changes)

    def difference(self, name: str) -> Difference:
        """Return the difference of one curve of `ALL`."""
        single, found = self.single(name.partition("/")[0]), self.layout(name)
        if any(rank["loss"] != found[0]["loss"] for rank in found):
            raise AssertionError(f"{name}: ranks log different losses")
        return Difference(*(worst(single[key], found[0][key]) for key in ("loss", "grad_norm", "eval_loss")))


def worst(one: list[float], other: list[float]) -> float:
    """The largest relative difference."""
    if len(one) != len(other) or not one:
        raise AssertionError(f"{len(one)} and {len(other)} values")
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def _packed_run() -> dict[str, Any]:
    data = filled_packs(10 * PACKS_PER_STEP, SAMPLES_PER_PACK)
    return (
        _SEQUENTIAL
        | PACKED
        | {
            "train_dataset": data,
            "pack_length": 32,
            "gradient_accumulation_steps": PACKS_PER_STEP,
        }
    )


def _sparse(folder: Path) -> None:
    """With the experts' balancing loss in the gradients."""
    sparse_checkpoint(folder, **SMALL, router_aux_loss_coef=0.01, output_router_logits=True)


def _latent(folder: Path) -> None:
    """Latent attention, a dense layer, then experts with a shared one, sigmoid scores, groups and biases."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    attention = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
    }
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    experts |= {"moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1}
    tiny_checkpoint(folder, DeepseekV3Config, DeepseekV3ForCausalLM, **(SMALL | attention | experts))


_BUILDERS = {"dense": lambda folder: tiny_checkpoint(folder, **SMALL), "moe": _sparse, "latent": _latent}


def table(names: Iterable[str], curves: CurvesOf) -> Iterable[tuple[str, Difference]]:
    """Rows, printed as they come."""
    _say("| curve | ranks | loss | gradient norm | held-out loss |\n|---|---|---|---|---|")
    for name in names:
        found = curves.difference(name)
        _say(
            f"| `{name}` | {ALL[name][0]} | {found.loss:.1e} | {found.grad_norm:.1e} | {found.evaluation:.1e} |"
            + ("" if found.small else " **too large** |")
        )
        yield name, found


def record(curves: CurvesOf) -> None:
    """Write the losses of `DRAWN` and of the single processes to `RECORDED`, as ``{model: {layout: losses}}``."""
    drawn: dict[str, dict[str, list[float]]] = {}
    for name in DRAWN:
        model, _, layout = name.partition("/")
        runs = drawn.setdefault(model, {"one process": curves.single(model)["loss"]})
        runs[layout] = curves.layout(name)[0]["loss"]
    RECORDED.write_text(json.dumps(drawn, indent=1) + "\n", encoding="utf-8")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(patterns: list[str]) -> int:
    """Prints the table; 1 if a curve differs."""
    if patterns == ["--record"]:
        with tempfile.TemporaryDirectory() as folder:
            record(CurvesOf(Path(folder)))
        return 0
    names = [name for name in ALL if any(fnmatch(name, pattern) for pattern in patterns or ["*"])]
    with tempfile.TemporaryDirectory() as folder:
        rows = list(table(names, CurvesOf(Path(folder))))
    return int(not rows or not all(found.small for _, found in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
