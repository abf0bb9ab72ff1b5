"""What the trainer mends in Megatron, and when that is no longer needed."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from harness import prepare_parent, run_ranks
from test_train_layouts import OVERLAP, TP
from train_cases import arguments, make_trainer, quietly, tiny_checkpoint

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def saved_positions(checkpoint: Path, output_dir: Path) -> tuple[int, bool]:
    from mca_train.checkpoint.bucket_padding import positions_without_padding

    trainer = make_trainer(checkpoint, output_dir, max_steps=1, **OVERLAP)
    quietly(trainer.train)
    optimizer = trainer.engine.optimizer
    before = [
        dict(buffer.param_index_map) for part in optimizer.chained_optimizers for buffer in part.buffers
    ]
    with positions_without_padding(optimizer) as moved:
        pass
    after = [dict(buffer.param_index_map) for part in optimizer.chained_optimizers for buffer in part.buffers]
    return moved, [list(b.values()) for b in before] == [list(a.values()) for a in after]


def test_padded_buckets_move_parameters_and_all_is_put_back(checkpoint, tmp_path):
    for moved, restored in run_ranks(2, saved_positions, checkpoint, tmp_path):
        assert moved > 0
        assert restored


def test_megatron_still_counts_the_padding_it_has_removed():
    """Fails when Megatron has mended it: then mca_train.checkpoint.bucket_padding can go."""
    prepare_parent()
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    gather = inspect.getsource(DistributedOptimizer.get_parameter_state_dp_zero)
    cut = inspect.getsource(DistributedOptimizer.sharded_param_state_fully_reshardable)
    assert "offset_in_world_tensors += gbuf_world_numel_unpadded" in gather
    assert "buffer.param_index_map.items()" in cut


def marks(checkpoint: Path, output_dir: Path) -> tuple[bool, int]:
    from mca_models import AutoModel
    from mca_models.megatron.layers.tp_marks import mark_parameters

    model: Any = AutoModel.from_pretrained(checkpoint, arguments(output_dir, **TP))
    cut = [tensor for item, tensor in model.held() if item.param.shard.axis is not None]
    return all(tensor.tensor_model_parallel for tensor in cut), mark_parameters(
        model.held(), model.config.layout
    )


def test_cut_parameters_are_marked_when_a_model_is_built(checkpoint, tmp_path):
    assert run_ranks(2, marks, checkpoint, tmp_path) == [(True, 0)] * 2
