"""The layout that is saved with random states."""

from types import SimpleNamespace
from typing import Any

from mca_config.layout import ParallelLayout
from mca_train.engine.rng import _sizes

AXES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}


def test_each_size_that_decides_which_ranks_draw_alike_is_saved():
    plain: Any = SimpleNamespace(layout=ParallelLayout(expert_tensor_parallel_size=1), world_size=8)
    assert _sizes(plain) == {"ranks": 8, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1}
    for option, axis in AXES.items():
        sizes = {"expert_tensor_parallel_size": 1} | {option: 2}
        ranks: Any = SimpleNamespace(layout=ParallelLayout(**sizes), world_size=8)
        assert _sizes(ranks) == _sizes(plain) | {axis: 2}
