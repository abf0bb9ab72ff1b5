"""Parts of a packed parameter in Megatron, compared with transformers' separate tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_hf
import torch
import transformers
from safetensors.torch import load_file, save_file

from mca_config.model_config import McaModelConfig
from mca_models.templates import config_from_hf, get_family
from mca_models.weights import Concat, GroupedHeads, Param, PerTensor, Shard, Transposed


def loaded(case: str, directory: Path) -> tuple[dict[str, torch.Tensor], McaModelConfig, dict[str, Param]]:
    tiny_hf.save(case, directory)
    tensors = load_file(directory / "model.safetensors")
    config = config_from_hf(tiny_hf.read_config(directory))
    family = get_family(config.model_type)
    return (
        tensors,
        config,
        {param.mca_name(): param for param in family.params(family.with_checkpoint_names(config, tensors))},
    )


def hf_model(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory)


def whole(param: Param, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = param.to_full([tensors[name] for name in param.hf_names()])
    return result


def test_gated_delta_net_projections_are_those_of_transformers(tmp_path: Path) -> None:
    tensors, config, params = loaded("qwen3_next", tmp_path)
    net = hf_model(tmp_path).model.layers[0].linear_attn
    x = torch.randn(1, 5, config.hidden_size)
    parts = net.fix_query_key_value_ordering(net.in_proj_qkvz(x), net.in_proj_ba(x))
    expected = torch.cat([part.reshape(1, 5, -1) for part in parts], -1)
    in_proj = whole(params["decoder.layers.0.self_attention.in_proj.weight"], tensors)
    torch.testing.assert_close(x @ in_proj.T, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_a_gated_delta_net_has_whole_key_heads_with_their_values(rank: int, tmp_path: Path) -> None:
    tensors, config, params = loaded("qwen3_5_text", tmp_path)
    del config
    net = hf_model(tmp_path).model.layers[0].linear_attn
    x = torch.randn(3, 32)
    qkv = net.in_proj_qkv(x)
    q, k, v = qkv.split([net.key_dim, net.key_dim, net.value_dim], -1)
    parts = [q, k, v, net.in_proj_z(x), net.in_proj_b(x), net.in_proj_a(x)]
    mine = torch.cat([part.chunk(2, -1)[rank] for part in parts], -1)
    in_proj = params["decoder.layers.0.self_attention.in_proj.weight"]
    piece = in_proj.to_mca([tensors[name] for name in in_proj.hf_names()], rank, 2)
    torch.testing.assert_close(x @ piece.T, mine, rtol=0, atol=1e-5)
    conv = params["decoder.layers.0.self_attention.conv1d.weight"]
    kernel = conv.to_mca([tensors[name] for name in conv.hf_names()], rank, 2)
    expected = torch.cat([w.chunk(2)[rank] for w in net.conv1d.weight.split([32, 32, 40])])
    assert torch.equal(kernel, expected)


def test_gated_attention_is_split_as_megatron_splits_it(tmp_path: Path) -> None:
    tensors, config, params = loaded("qwen3_next", tmp_path)
    attention = hf_model(tmp_path).model.layers[3].self_attn
    x = torch.randn(5, config.hidden_size)
    groups, width = config.attention.num_query_groups, config.attention.kv_channels
    per_group = config.attention.num_attention_heads // groups * width
    query, gate = attention.q_proj(x).view(5, -1, 2 * width).chunk(2, -1)
    mixed = x @ whole(params["decoder.layers.3.self_attention.linear_qkv.weight"], tensors).T
    q, g, k, v = mixed.view(5, groups, -1).split([per_group, per_group, width, width], -1)
    for mine, its in ((q, query), (g, gate), (k, attention.k_proj(x)), (v, attention.v_proj(x))):
        torch.testing.assert_close(mine.reshape(5, -1), its.reshape(5, -1), rtol=0, atol=1e-5)


def test_gpt_oss_experts_have_gate_before_up(tmp_path: Path) -> None:
    tensors, config, params = loaded("gpt_oss", tmp_path)
    experts = hf_model(tmp_path).model.layers[1].mlp.experts
    x, prefix = torch.randn(5, config.hidden_size), "decoder.layers.1.mlp.experts."
    expected = x @ experts.gate_up_proj[3] + experts.gate_up_proj_bias[3]
    fc1, bias = whole(params[f"{prefix}linear_fc1.weight3"], tensors), params[f"{prefix}linear_fc1.bias3"]
    gate, up = (x @ fc1.T + whole(bias, tensors)).chunk(2, -1)
    torch.testing.assert_close(gate, expected[:, ::2], rtol=0, atol=1e-5)
    torch.testing.assert_close(up, expected[:, 1::2], rtol=0, atol=1e-5)
    fc2 = whole(params[f"{prefix}linear_fc2.weight3"], tensors)
    assert torch.equal(fc2, experts.down_proj[3].T)


def test_phi3_packs_queries_with_the_keys_of_their_group(tmp_path: Path) -> None:
    tensors, config, params = loaded("phi3", tmp_path)
    heads, groups, width = (
        config.attention.num_attention_heads,
        config.attention.num_query_groups,
        config.attention.kv_channels,
    )
    q, k, v = tensors["model.layers.0.self_attn.qkv_proj.weight"].split(
        [heads * width, groups * width, groups * width]
    )
    first = whole(params["decoder.layers.0.self_attention.linear_qkv.weight"], tensors).chunk(groups)[0]
    assert torch.equal(first, torch.cat([q[: heads // groups * width], k[:width], v[:width]]))


STACKED = [case for case, (kind, _) in tiny_hf.ALL.items() if get_family(kind).moe and "-dense" not in case]


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", STACKED)
def test_stacked_experts_give_the_same_parameters_as_single_ones(case: str, tmp_path: Path) -> None:
    single, config, params = loaded(case, tmp_path)
    state = {name: x.contiguous() for name, x in hf_model(tmp_path).state_dict().items()}
    save_file(state, tmp_path / "stacked.safetensors")
    stacked = load_file(tmp_path / "stacked.safetensors")
    family = get_family(config.model_type)
    found = family.with_checkpoint_names(config, stacked.keys())
    assert found.extra["fused_experts"]
    assert family.hf_shapes(found) == {name: tuple(x.shape) for name, x in stacked.items()}
    for param in family.params(found):
        assert torch.equal(whole(param, stacked), whole(params[param.mca_name()], single)), param.mca_name()


ROWS = {"q": (3, 4), "k": (3, 4), "v": (6, 4), "z": (6, 4)}
GROUPED = GroupedHeads((1, 1, 2, 2), 1)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (GROUPED, GroupedHeads((1, 1, 1, 1), 1)),
        (GROUPED, GroupedHeads((1, 1, 2, 2), 3)),
        (GROUPED, Concat((3, 3, 6, 6))),
        (GROUPED, GroupedHeads((1, 2, 1, 2), 1)),
        (
            PerTensor(((Concat((1, 1)), 2), (GroupedHeads((1, 1), 1), 2))),
            PerTensor(((Concat((1, 1)), 2), (Concat((1, 1)), 2))),
        ),
        (Transposed(GROUPED), GROUPED),
        (Transposed(GROUPED), Transposed(Concat((3, 3, 6, 6)))),
    ],
)
def test_a_wrong_layout_is_seen(right: Any, wrong: Any) -> None:
    parts = [np.arange(np.prod(shape)).reshape(shape) + 100 * i for i, shape in enumerate(ROWS.values())]
    stored = right.pack(parts)
    assert all((a == b).all() for a, b in zip(parts, right.unpack(stored), strict=True))
    try:
        back = wrong.unpack(stored)
    except ValueError:
        return
    assert len(back) != len(parts) or any(
        a.shape != b.shape or (a != b).any() for a, b in zip(parts, back, strict=True)
    )


def test_a_cut_without_segments_mixes_parts() -> None:
    fused = np.concatenate([np.zeros(4), np.ones(4), np.full(8, 2)])
    right, wrong = Shard(0, segments=(1, 1, 2)), Shard(0)
    assert right.take(fused, 1, 2).tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    assert wrong.take(fused, 1, 2).tolist() == [2] * 8
    assert (right.join([right.take(fused, rank, 2) for rank in range(2)]) == fused).all()
