"""A step on fake tensors and fake ranks needs what the same step needs on real ones, on every stage.

The tracker is the same in both; so bytes, floating-point operations and messages are equal but for what an allocation
of the library's own makes of real values.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cases import needed
from dry_run_cases import CP, FULL, LORA, MODELS, PP, SPLIT, TP, VPP, be_no_rank, prepared
from harness import run_ranks
from mca_train.dry_run.step import StepNeeds
from mca_train.plan.schedule import Order

pytestmark = pytest.mark.ranks

STEPS = "gradient_accumulation_steps"
WITHIN = 0.02  # what the issue of this command promised; all cases are equal to 1e-3 in fact
OF_IMAGES = {"images": 2, "image_size": 96}
EVALUATED = {"eval_file": "held_out.jsonl", "eval_strategy": "steps", "eval_steps": 5}
FP16 = {"fp16": True, "loss_scale": 1.0}  # so low that no gradient overflows, which skips a real step
AGAIN = {"recompute_granularity": "selective"}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("sft", 1, {}),
    "bf16": ("sft", 1, {"bf16": True}),
    "fp16": ("sft", 1, FP16),
    "lora": ("sft", 1, LORA),
    "dpo": ("dpo", 1, {}),
    "dpo of an adapter": ("dpo", 1, LORA),
    "full recompute": ("sft", 1, FULL),
    "selective recompute": ("sft", 1, {"recompute_granularity": "selective"}),
    "chunked loss": ("sft", 1, {"loss_chunk_size": 64}),
    "offloaded": ("sft", 1, {"optimizer_cpu_offload": True, "bf16": True} | SPLIT),
    "tp sp": ("sft", 2, {TP: 2, "sequence_parallel": True, "bf16": True}),
    "pp": ("pretrain", 2, {PP: 2}),
    "vpp": ("pretrain", 2, {PP: 2, VPP: 2}),
    "pp 4": ("pretrain", 4, {PP: 4, "bf16": True}),
    "cp packed": ("sft", 2, {CP: 2, "sequence_packing": True}),
    "dp split": ("sft", 2, {"bf16": True} | SPLIT),
    "tp pp dpo": ("dpo", 4, {TP: 2, PP: 2} | SPLIT),
    "experts": ("sft", 1, {}),
    "experts fp16": ("sft", 1, FP16),
    "experts ep": ("sft", 2, {"expert_model_parallel_size": 2, "bf16": True} | SPLIT),
    "experts pp recompute": ("sft", 2, {PP: 2} | FULL),
    "experts again": ("sft", 1, AGAIN | {"recompute_modules": ["moe"]}),
    "experts lora ep": ("sft", 2, {"expert_model_parallel_size": 2} | LORA),
    "experts tp": ("sft", 2, {TP: 2, "bf16": True}),
    "packed": ("sft", 1, {"sequence_packing": True}),
    "norms again": ("sft", 1, AGAIN | {"recompute_modules": ["layernorm"], "bf16": True}),
    "mlp again sp": ("sft", 2, AGAIN | {"recompute_modules": ["mlp"], TP: 2, "sequence_parallel": True}),
    "offloaded split": ("sft", 2, {"optimizer_cpu_offload": True, "bf16": True} | SPLIT),
    "dpo pp": ("dpo", 2, {PP: 2}),
    "unnormalized sinkhorn": (
        "sft",
        1,
        {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    ),
    "latent": ("sft", 1, {}),
    "latent again": ("sft", 1, AGAIN | {"recompute_modules": ["mla_up_proj", "layernorm"], "bf16": True}),
    "latent pp": ("sft", 2, {PP: 2, "bf16": True} | SPLIT),
    "latent tp": ("sft", 2, {TP: 2, "sequence_parallel": True}),
    "latent cp": ("sft", 2, {CP: 2}),
    "images": ("sft", 1, {"freeze": [], "bf16": True, STEPS: 2}),
    "images frozen": ("sft", 1, {}),
    "images tp": ("sft", 2, {TP: 2, "sequence_parallel": True, "freeze": ["vision"]}),
    "images pp": ("sft", 2, {PP: 2, "freeze": []}),
    "images cp packed": ("sft", 2, {CP: 2, "sequence_packing": True}),
}


def model_of(name: str) -> str:
    first = name.split()[0]
    return first if first in MODELS else "dense"


def images_in(run: Any) -> Any:
    """Return the images of each sequence, if the model takes any."""
    from mca_train.plan.options import PlanOptions
    from mca_train.run.plan_input import planned_media

    return planned_media(run, PlanOptions(**OF_IMAGES)) if run.model.vision else None


def without_memory(folder: Path, kind: str, changes: dict[str, Any], rank: int, world_size: int) -> StepNeeds:
    """Run in a separate process, which is no rank."""
    from mca_train.dry_run.step import measure_step

    be_no_rank()
    run = prepared(folder, kind, changes | EVALUATED, world_size)
    count = changes.get(STEPS, 4)
    return measure_step(
        run.task, run.settings, run.model, rank, world_size, count, images_in(run), ordered=count
    )


def with_memory(folder: Path, names: list[str]) -> dict[str, StepNeeds]:
    """Runs on every rank."""
    import torch.distributed as dist

    from mca_models import AutoModel
    from mca_train.dry_run.samples import route_evenly
    from mca_train.dry_run.step import Modes, build, measure
    from mca_train.dry_run.tracker import ModuleNames, Tracker
    from mca_train.trainer.loaders import iterate_steps

    found = {}
    for name in names:
        kind, _, changes = CASES[name]
        run = prepared(folder / model_of(name), kind, changes, dist.get_world_size())
        modes = Modes(Tracker(ModuleNames()))
        made = AutoModel.from_config
        trainer, engine = build(run.task, run.settings, run.model, modes, made, images_in(run))
        route_evenly(engine.models)
        found[name] = measure(trainer, engine, modes, next(iterate_steps(trainer.get_train_dataloader())))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("dry")
    for name, config in MODELS.items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest, folder: Path) -> Callable[[str], list[StepNeeds]]:
    """Each rank's figures of each case; cases with equal numbers of ranks share a fork."""
    names = needed(request, "name")

    @cache
    def by_size(size: int) -> list[dict[str, StepNeeds]]:
        return run_ranks(
            size, with_memory, folder, [name for name in names if CASES[name][1] == size], timeout=300
        )

    return lambda name: [rank[name] for rank in by_size(CASES[name][1])]


@pytest.mark.cases(0, always=["images"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_needs_what_it_needs_with_memory_and_ranks(
    name: str, folder: Path, real: Callable[[str], list[StepNeeds]]
) -> None:
    kind, size, changes = CASES[name]
    stages = changes.get(PP, 1)
    for rank in {*range(0, size, size // stages), size - 1 if stages > 1 else 0}:
        given = folder / model_of(name), kind, changes, rank, size
        (planned,) = run_ranks(1, without_memory, *given, process_group=False, timeout=300)
        compare(f"{name}, rank {rank}", planned, real(name)[rank])


def compare(name: str, planned: StepNeeds, real: StepNeeds) -> None:
    for part in ("weights", "gradients", "optimizer", "reference", "flops", "micro_batches", "passes"):
        assert getattr(planned, part) == getattr(real, part), (name, part)
    for part in ("peak", "activations", "temporaries"):
        mine, its = getattr(planned, part), getattr(real, part)
        assert mine == pytest.approx(its, abs=WITHIN * real.peak), (name, part)
    assert (planned.module, planned.operation) == (real.module, real.operation), name
    pp, vpp = (CASES[name.split(", rank")[0]][2].get(key) or 1 for key in (PP, VPP))
    assert planned.order == real.passes, name
    assert list(planned.passes) == list(Order(pp, vpp, planned.micro_batches).passes(planned.stage)), name
    assert {(m.operation, m.ranks): (m.count, m.bytes) for m in planned.messages} == {
        (m.operation, m.ranks): (m.count, m.bytes) for m in real.messages
    }, name


IN_GROUPS = {PP: 2, VPP: 2, "microbatch_group_size_per_vp_stage": 3, STEPS: 6}
UNSEEN = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2, "check_for_nan_in_grad": True}


def of_stages(folder: Path) -> list[StepNeeds]:
    """Run in a separate process, which is no rank and forks one for each stage."""
    from mca_train.dry_run.stages import measure_stages

    be_no_rank()
    run = prepared(folder, "pretrain", IN_GROUPS | UNSEEN, 2)
    return measure_stages(run.task, run.settings, run.model, run.layout, run.world_size, ordered=True)


def test_stages_run_whole_groups_without_processes_that_load_data_and_looks_at_values(folder: Path) -> None:
    ((first, last),) = run_ranks(1, of_stages, folder / "dense", process_group=False, timeout=300)
    for stage, needs in enumerate((first, last)):
        assert list(needs.order) == list(needs.passes) == list(Order(2, 2, 6, 3).passes(stage))
