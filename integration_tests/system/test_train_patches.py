"""The trainer's patches of Megatron, and tests that fail when a patch is no longer needed."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from harness import prepare_parent, run_ranks
from train_cases import arguments, make_trainer, quietly, tiny_checkpoint
from train_settings import OVERLAP, TP, ZERO

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def states_held(checkpoint: Path, output_dir: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Elements of the means of gradients, by name, that this rank writes, and those it asks for."""
    from mca_train.checkpoint import distributed_optimizer, optimizer_state

    trainer = make_trainer(checkpoint, output_dir, max_steps=1, **changes)
    quietly(trainer.train)
    engine = trainer.engine
    padding, over = 0, 0
    for buffer in (each for part in engine.optimizer.chained_optimizers for each in part.buffers):
        padding += sum(bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets)
        for start, stop, bucket in buffer.param_index_map.values():
            over += len(distributed_optimizer.bucket_shares(buffer.buckets[bucket], start, stop, 2)) > 1
    found: dict[str, Any] = {"padding": padding, "over a border": over}
    for name, loading in (("written", False), ("asked", True)):
        state = optimizer_state._sharded(engine.optimizer, engine.chunks, loading=loading)
        leaves = [leaf for _, _, leaf in optimizer_state._leaves(state)]
        built = [
            leaf.build() if hasattr(leaf, "build") else leaf for leaf in leaves if ".exp_avg." in leaf.key
        ]
        means = [part for _, _, part in optimizer_state._leaves(built)]
        found[name] = {f"{leaf.key} {leaf.global_offset}": leaf.data.numel() for leaf in means}
    return found


def both_kinds(checkpoint: Path, output_dir: Path) -> list[dict[str, Any]]:
    """`states_held` in one bucket, and in small ones."""
    return [
        states_held(checkpoint, output_dir / str(number), changes)
        for number, changes in enumerate((ZERO, OVERLAP))
    ]


def test_a_rank_holds_its_share_of_a_split_optimizer_when_it_saves(checkpoint, tmp_path):
    found = run_ranks(2, both_kinds, checkpoint, tmp_path)
    for one, other in zip(*found, strict=True):
        assert not one["written"].keys() & other["written"].keys()
        assert one["asked"].keys() | other["asked"].keys() == one["written"].keys() | other["written"].keys()
        both = one["asked"].keys() & other["asked"].keys()
        assert one["over a border"] <= len(both) <= 2 * one["over a border"]  # gate and up are one's
    whole = sum(of_rank[0]["written"][name] for of_rank in found for name in of_rank[0]["written"])
    for in_one, in_small in found:
        assert in_small["padding"] > 0
        assert in_small["over a border"] > 0
        assert sum(in_one["written"].values()) < 0.6 * whole
        assert sum(in_one["asked"].values()) < 0.6 * whole


def test_megatron_still_gathers_all_and_counts_the_padding_it_has_removed():
    """Fail when Megatron has fixed it: then mca_train.checkpoint.distributed_optimizer can go."""
    prepare_parent()
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    gather = inspect.getsource(DistributedOptimizer.get_parameter_state_dp_zero)
    cut = inspect.getsource(DistributedOptimizer.sharded_param_state_fully_reshardable)
    assert "torch.distributed.all_gather(" in gather
    assert "offset_in_world_tensors += gbuf_world_numel_unpadded" in gather
    assert "buffer.param_index_map.items()" in cut


def built(checkpoint: Path, output_dir: Path) -> dict[str, Any]:
    """Marks of a model's parameters, and the tensor groups that its modules name. Runs on every rank."""
    from megatron.core import parallel_state

    from mca_models import AutoModel
    from mca_models.megatron.factory.chunks import set_parameter_attributes

    model: Any = AutoModel.from_pretrained(checkpoint, arguments(output_dir, **TP))
    cut = [tensor for item, tensor in model.local_params() if item.param.shard.axis is not None]
    groups = [
        getattr(holder, name)
        for chunk in model.chunks
        for module in chunk.modules()
        for holder, name in ((module, "tp_group"), (getattr(module, "pg_collection", None), "tp"))
        if getattr(holder, name, None) is not None
    ]
    own = parallel_state.get_tensor_model_parallel_group()
    return {
        "marked": all(tensor.tensor_model_parallel for tensor in cut),
        "marks to set": set_parameter_attributes(model.local_params(), model.config.layout),
        "groups": (len(groups) > 10, all(group is own for group in groups)),
    }


@pytest.fixture(scope="module")
def found(checkpoint, tmp_path_factory):
    return run_ranks(2, built, checkpoint, tmp_path_factory.mktemp("built"))


def test_cut_parameters_are_marked_when_a_model_is_built(found):
    assert [(rank["marked"], rank["marks to set"]) for rank in found] == [(True, 0)] * 2


def test_models_use_megatrons_own_tensor_group(found):
    """Megatron and mca scatter and gather over it by default; with another, results are wrong silently."""
    assert [rank["groups"] for rank in found] == [(True, True)] * 2
