"""The converter's engine on checkpoints that others wrote: to Hugging Face and to MCA, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import roll_tree
import tiny_hf
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from mca_config.layout import ParallelLayout
from mca_convert.conversion import plan_to_hf, plan_to_mca
from mca_convert.pool import Limits
from mca_models.checkpoint.mca_directory import McaSource
from mca_models.storage.source import ModelSource, read_shard
from mca_models.templates import config_from_hf, get_family
from mca_models.torch_checkpoint.roll import open_roll
from mca_models.torch_checkpoint.torch_dist import open_torch_dist
from mca_train.config.model import model_config

LIMITS = Limits(workers=2, memory=2 << 20)
ROLL = ParallelLayout(
    tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=2
)
TARGET = ParallelLayout(tensor_model_parallel_size=4, expert_model_parallel_size=2)


def _roll(config: Any, hf: dict[str, torch.Tensor], path: Path) -> ModelSource:
    layout = ROLL if config.num_experts else replace(ROLL, expert_model_parallel_size=1)
    roll_tree.write(path, replace(config, layout=layout), hf, roll_tree.local_sequential)
    return open_roll(path)


def _torch_dist(config: Any, hf: dict[str, torch.Tensor], path: Path) -> ModelSource:
    state: dict[str, torch.Tensor] = {}
    for param in get_family(config.model_type).params(config):
        whole = param.to_full([hf[name] for name in param.hf_names()]).clone()
        name = param.mca_name()
        if param.expert is not None:
            head, _, tail = name.partition(".experts.")
            name = f"{head}.experts.experts.{param.expert}.{tail.removesuffix(str(param.expert))}"
        if name.endswith("linear_fc1.weight"):
            state[f"{name}_w"], state[f"{name}_v"] = (half.clone() for half in whole.chunk(2))
        elif param.alias_of is None:
            state[name] = whole
    dcp.save(state, checkpoint_id=path, no_dist=True)
    config.save(path)
    return open_torch_dist(path)


@pytest.mark.parametrize("write", [_roll, _torch_dist])
@pytest.mark.parametrize("case", ["llama", "qwen3-tied", "qwen3_moe", "deepseek_v3"])
def test_conversion_is_bit_exact(tmp_path: Path, case: str, write: Any) -> None:
    directory = tiny_hf.save(case, tmp_path / "source", "bfloat16", vocab_size=74, num_key_value_heads=4)
    hf = load_file(directory / "model.safetensors")
    config = config_from_hf(tiny_hf.read_config(directory))
    config = get_family(config.model_type).with_checkpoint_names(config, hf)
    source = write(config, hf, tmp_path / "foreign")
    plan_to_hf(source).run(tmp_path / "hf", LIMITS)
    converted = load_file(tmp_path / "hf/model.safetensors")
    assert converted.keys() == hf.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in hf.items())
    plan_to_mca(source, TARGET if config.num_experts else replace(TARGET, expert_model_parallel_size=1)).run(
        tmp_path / "mca", LIMITS
    )
    mca = McaSource(tmp_path / "mca")
    for param in mca.params:
        whole = param.to_full([hf[name] for name in param.hf_names()])
        if param.vocab:
            whole = torch.cat([whole, torch.zeros(2, whole.shape[1], dtype=whole.dtype)])
        size = 1 if param.shard.axis is None else 4
        for rank in range(size):
            expected = param.shard.take(whole, rank, size).contiguous().view(torch.uint8).numpy().tobytes()
            assert read_shard(mca, param, rank, size).tobytes() == expected, param.mca_name()


@pytest.mark.parametrize("write", [_roll, _torch_dist])
def test_a_run_is_planned_in_the_dtype_that_it_is_read_in(write: Any, tmp_path: Path) -> None:
    folder = tiny_hf.save("llama", tmp_path / "hf", "bfloat16")
    config = config_from_hf(tiny_hf.read_config(folder))
    source = write(
        replace(config, dtype="float32"), load_file(folder / "model.safetensors"), tmp_path / "mca"
    )
    assert model_config(str(tmp_path / "mca")).dtype == source.config.dtype == "bfloat16"
