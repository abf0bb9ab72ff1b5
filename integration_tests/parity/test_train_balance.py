"""Losses of experts and of MTP layers, and experts' biases, are what they are defined as on every layout."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from balance_reference import (
    BIAS_RATE,
    COEFFICIENTS,
    PER_MICRO_BATCH,
    balanced_model,
    expected,
    prediction_loss,
    samples,
)
from cases import needed
from checkpoint_files import read
from gradients import worst_errors
from harness import run_in_turn, run_ranks
from parity import TOLERANCE
from prediction import SCALE
from train_cases import arguments, history, quietly, sparse_checkpoint

pytestmark = pytest.mark.ranks

Settings = dict[str, Any]
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
DP = {"gradient_accumulation_steps": 1}
EP = DP | {"expert_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
PACKED = {"sequence_packing": True, "per_device_train_batch_size": 1}
ALONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def staged(layout: str, virtual: int = 1) -> Settings:
    ranks = (layout.count("|") + 1) // virtual
    return {"pipeline_model_parallel_layout": layout, "pipeline_model_parallel_size": ranks}


PP = staged("Ett|tmL")
# (kind of balancing loss, layout) -> ranks, settings
CASES: dict[tuple[str, str], tuple[int, Settings]] = {
    ("aux_loss", "single"): (1, {}),
    ("aux_loss", "packed"): (1, PACKED),
    ("aux_loss", "weighted"): (1, {"weight": 0.003}),  # all weights together are less than one
    ("aux_loss", "block-recomputed"): (1, AGAIN | {"recompute_method": "block"}),
    ("aux_loss", "tp2"): (2, TP),
    ("aux_loss", "dp2"): (2, DP),
    ("aux_loss", "cp2"): (2, CP),
    ("aux_loss", "own-stage"): (3, staged("Ett|tm|L")),
    ("aux_loss", "stage-alone"): (4, staged("Et|tt|m|L")),
    ("aux_loss", "empty-stage"): (4, staged("Et|ttm||L")),
    ("aux_loss", "virtual-stages"): (2, staged("Et|t|t|mL", virtual=2)),
    ("seq_aux_loss", "alone"): (1, ALONE),
    ("seq_aux_loss", "packed"): (1, PACKED),
    ("seq_aux_loss", "ep2"): (2, EP),
    ("seq_aux_loss", "tp2-packed"): (2, TP | PACKED),
    # padded to multiples of four the samples fill three packs instead of two
    ("seq_aux_loss", "cp2-packed"): (2, CP | PACKED | {"gradient_accumulation_steps": 3}),
    ("seq_aux_loss", "pp2-recomputed"): (2, PP | AGAIN),
    ("global_aux_loss", "alone"): (1, ALONE),
    ("global_aux_loss", "recomputed"): (1, AGAIN),
    ("global_aux_loss", "ep2"): (2, EP),
    ("global_aux_loss", "dp2-alone"): (2, ALONE | {"gradient_accumulation_steps": 4}),
    ("global_aux_loss", "cp2"): (2, CP),
    ("global_aux_loss", "pp2"): (2, PP),
}


def weighted(weight: float, *, reported: bool = True) -> Any:
    """A trainer whose loss takes every target ``weight`` times, and whether it says so."""
    from mca_train import McaTrainer

    class Weighted(McaTrainer):
        def compute_loss(self, output: torch.Tensor, batch: Any, **_: Any) -> Any:
            loss, number = super().compute_loss(output, batch)
            return weight * loss, weight * number

        def num_items(self, batch: Any) -> torch.Tensor:
            return super().num_items(batch) * (weight if reported else 1)

    return Weighted


@dataclass(frozen=True)
class Rank:
    """State of a rank after a step.

    Args:
        logged: Losses of its MTP layer.
        held: Digests of the weights, by their names and by the piece of them.
    """

    logged: list[float]
    held: dict[tuple[Any, ...], str]


def digests(pairs: Iterable[tuple[Any, torch.Tensor]]) -> dict[tuple[Any, ...], str]:
    """Return digests of this rank's weights; those with one key are copies of each other on all ranks and stages."""
    from megatron.core import parallel_state as state

    found = {}
    for item, x in pairs:
        if not getattr(x, "allreduce", True):
            piece = (state.get_expert_model_parallel_rank(), state.get_expert_tensor_parallel_rank())
        else:
            piece = (state.get_tensor_model_parallel_rank(),) * getattr(x, "tensor_model_parallel", False)
        key = (item.param.mca_name(), *piece)
        found[key] = hashlib.sha256(x.detach().contiguous().numpy().tobytes()).hexdigest()
    return found


def gradients(checkpoint: Path, output: Path, settings: Settings) -> Rank:
    """The gradients of the first step, exported as if they were weights; routers' biases as they have moved."""
    from transformers import TrainerCallback

    from mca_models import AutoModel
    from mca_train import TokenDataset

    run = {"max_steps": 1, "learning_rate": 1e-3, "warmup_steps": 0, "max_grad_norm": 1e9}
    run |= {"mtp_loss_scaling_factor": SCALE}
    run |= {"per_device_train_batch_size": PER_MICRO_BATCH, "gradient_accumulation_steps": 2}
    run |= {"train_sampling_strategy": "sequential", "moe_router_bias_update_rate": BIAS_RATE}
    run |= settings
    kind = weighted(run.pop("weight", 1.0))
    args = arguments(output, **run)
    model = AutoModel.from_pretrained(checkpoint, args)

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.kept = [
                (x, x.main_grad.clone()) for _, x in model.local_params() if isinstance(x, torch.nn.Parameter)
            ]

    keep, data = Keep(), TokenDataset.from_samples(samples())
    trainer = kind(model=model, args=args, train_dataset=data, pack_length=32, callbacks=[keep])
    quietly(trainer.train)
    found = Rank(history(trainer, "mtp_1_loss"), digests(model.local_params()))
    with torch.no_grad():
        for parameter, gradient in keep.kept:
            parameter.copy_(gradient)
    model.save_pretrained_as_hf(output / "gradients")
    return found


def all_gradients(checkpoint: Path, folder: Path, cases: dict[str, Settings]) -> dict[str, Rank]:
    return {name: gradients(checkpoint, folder / name, settings) for name, settings in cases.items()}


def settings_of(kind: str, settings: Settings) -> Settings:
    return COEFFICIENTS | {"moe_router_load_balancing_type": kind} | settings


@dataclass(frozen=True)
class Trained:
    """The gradients of every case, and those expected; and what each of its ranks has."""

    folder: Path
    ranks: dict[str, list[Rank]]


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    ranks: dict[str, list[Rank]] = {}
    folder = tmp_path_factory.mktemp("balance")
    checkpoint = balanced_model().save(folder / "model")
    chosen = needed(request, "case", "layout")
    for kind in {kind for kind, _ in chosen}:
        expected(folder / kind, kind)
    for size in (1, 2, 3, 4):
        cases = {
            f"{case}-{layout}": settings_of(case, CASES[case, layout][1])
            for case, layout in chosen
            if CASES[case, layout][0] == size
        }
        if cases:
            found = run_ranks(size, all_gradients, checkpoint, folder, cases, timeout=400)
            ranks |= {case: [each[case] for each in found] for case in cases}
    return Trained(folder, ranks)


DEFAULT = [
    "aux_loss-single",
    "aux_loss-tp2",
    "seq_aux_loss-cp2-packed",
    "seq_aux_loss-pp2-recomputed",
    "global_aux_loss-cp2",
    "global_aux_loss-ep2",
    "global_aux_loss-dp2-alone",
]
"""On two ranks each sum over ranks shows; on one no group is too small."""


@pytest.mark.cases(0, always=DEFAULT)
@pytest.mark.parametrize("case,layout", CASES)
def test_gradients_are_those_of_the_definition(case: str, layout: str, trained: Trained) -> None:
    right, ours = trained.folder / case, trained.folder / f"{case}-{layout}" / "gradients"
    worst = worst_errors(right, ours)
    assert worst[0][1] <= TOLERANCE, worst
    moved, found = read(right), read(ours)
    biases = [name for name in moved if "e_score_correction_bias" in name]
    assert len(biases) == 3
    assert max(float((moved[name] - found[name]).abs().max()) for name in biases) < BIAS_RATE / 10
    ranks = trained.ranks[f"{case}-{layout}"]
    assert all(rank.logged == ranks[0].logged for rank in ranks)
    assert ranks[0].logged == pytest.approx([prediction_loss()], rel=1e-6)  # sums of fp32
    assert_copies_are_equal(ranks)


def assert_copies_are_equal(ranks: list[Rank]) -> None:
    """Bit by bit: ranks that differ in one go different ways from then on."""
    first: dict[tuple[Any, ...], str] = {}
    for rank in ranks:
        assert [key for key, digest in rank.held.items() if first.setdefault(key, digest) != digest] == []


def losses(checkpoint: Path, output: Path, settings: Settings) -> list[float]:
    """The losses of two steps, between evaluations that draw numbers as Transformer Engine's fused attention does."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from mca_models import AutoModel
    from mca_train import McaTrainer, TokenDataset

    def draw(chunk: Any, *_: object) -> None:
        if not chunk.training:
            torch.rand(1)
            with get_cuda_rng_tracker().fork():
                torch.rand(1)

    args = arguments(output, max_steps=2, **settings)
    model = AutoModel.from_pretrained(checkpoint, args)
    data, predicts = TokenDataset.from_samples(samples()), []
    trainer = McaTrainer(model=model, args=args, train_dataset=data, eval_dataset=data)
    (chunk,) = model.chunks
    chunk.register_forward_hook(draw)
    chunk.mtp.register_forward_hook(lambda layers, *_: predicts.append(layers.training))
    quietly(trainer.train)
    assert predicts and all(predicts), "no evaluation needs the MTP layers"
    return history(trainer, "loss")


def test_what_is_counted_before_a_step_or_evaluated_draws_no_dropout(tmp_path: Path) -> None:
    checkpoint = balanced_model().save(tmp_path / "model")
    dropped = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "gradient_accumulation_steps": 2}
    counted = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1e-30}
    plain = run_ranks(1, losses, checkpoint, tmp_path / "plain", dropped)
    assert run_ranks(1, losses, checkpoint, tmp_path / "counted", dropped | counted) == plain
    evaluated = {"eval_strategy": "steps", "eval_steps": 1}
    assert run_ranks(1, losses, checkpoint, tmp_path / "evaluated", dropped | evaluated) == plain


def counted_otherwise(checkpoint: Path, output: Path) -> list[Any]:
    """A loss that counts half of what is reported: what it is reported in training, and how it is evaluated."""
    from mca_config.errors import McaError
    from mca_models import AutoModel
    from mca_train import TokenDataset

    found: list[Any] = []
    data = TokenDataset.from_samples(samples())
    balanced = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3}
    args = arguments(output, max_steps=2, logging_steps=2, **balanced)
    model = AutoModel.from_pretrained(checkpoint, args)
    for weight, reported in ((1.0, True), (0.003, False)):
        kind = weighted(weight, reported=reported)
        trainer = quietly(lambda kind=kind: kind(model=model, args=args, train_dataset=data))
        found.append(quietly(lambda trainer=trainer: trainer.evaluate(data))["eval_loss"])
    with pytest.raises(McaError) as error:
        quietly(trainer.train)
    return [*found, str(error.value)]


def test_a_custom_loss_needs_its_count_with_losses_of_experts(tmp_path: Path) -> None:
    checkpoint = sparse_checkpoint(tmp_path / "model", num_hidden_layers=2)
    plain, lighter, reported = run_ranks(1, counted_otherwise, checkpoint, tmp_path)[0]
    assert lighter == pytest.approx(plain, rel=1e-5)
    assert reported.startswith("step 1: Weighted.compute_loss returned the count 0.")
    assert "override num_items" in reported and "\n" not in reported


DEALT = {
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    "capacity": {"moe_expert_capacity_factor": 0.7, "moe_aux_loss_coeff": 0.0},
}


WITHOUT_LOSS = DP | {"moe_router_load_balancing_type": "none"}
BIASED: dict[str, Settings] = {
    "chosen": WITHOUT_LOSS,
    "dropped": WITHOUT_LOSS | {"moe_expert_capacity_factor": 0.6},
    "filled": WITHOUT_LOSS
    | EP
    | {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
}
"""Options that change the experts that process a token, and not those that it chooses."""


@pytest.fixture(scope="module")
def dealt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dealt")
    plain = sparse_checkpoint(folder / "plain", norm_topk_prob=False, num_hidden_layers=2)
    biased = balanced_model().save(folder / "biased")
    cases = {name: DP | settings for name, settings in DEALT.items()}
    runs = ((plain, "once", cases), (biased, "once", BIASED), (plain, "again", cases))
    run_in_turn(2, *(partial(all_gradients, path, folder / time, some) for path, time, some in runs))
    return folder


def test_what_depends_on_how_tokens_are_dealt_is_the_same_every_time(dealt: Path) -> None:
    for name in DEALT:
        once, again = (read(dealt / time / name / "gradients") for time in ("once", "again"))
        assert all(torch.equal(once[tensor], again[tensor]) for tensor in once)


def moved_biases(checkpoint: Path, run: Path) -> torch.Tensor:
    """Return the change of the first router biases; inputs of later layers depend on dropped tokens."""
    before, after = read(checkpoint), read(run / "gradients")
    first = min(name for name in before if "e_score_correction_bias" in name)
    return (after[first] - before[first]).sign()


def test_biases_of_experts_move_by_the_router_and_not_by_dropped_tokens(dealt: Path) -> None:
    moved = {name: moved_biases(dealt / "biased", dealt / "once" / name).tolist() for name in BIASED}
    assert {-1.0, 1.0} <= {*moved["chosen"]}
    assert moved["dropped"] == moved["filled"] == moved["chosen"]
