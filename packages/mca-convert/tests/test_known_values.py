"""Pieces compared with sums done by hand, so that a wrong template cannot hide behind its own inverse.

The planted faults show that these checks, and the checks on names, do fail.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from files import hf_tensors

from mca_config.errors import McaError
from mca_convert.conversion import plan_to_mca
from mca_convert.pool import Limits
from mca_models.checkpoint.hf_directory import HfSource
from mca_models.checkpoint.mca_directory import McaSource
from mca_models.templates import FAMILIES
from mca_models.weights import COLUMN, GATED, ROW, Concat, GroupedHeads, Param

TP = 2


def convert(source: Path, target: Path, tp: int = TP) -> McaSource:
    from mca_config.layout import ParallelLayout

    layout = ParallelLayout(tensor_model_parallel_size=tp)
    plan_to_mca(HfSource(source), layout).run(target, Limits(workers=1))
    return McaSource(target)


def pieces(source: McaSource, name: str) -> list[np.ndarray]:
    param = next(param for param in source.params if param.mca_name() == name)
    return [part.info.array() for part in source.parts(param)]


def expected_qkv(hf: dict[str, np.ndarray], prefix: str, heads: int, groups: int, dim: int) -> np.ndarray:
    """Megatron's order: for each group its query heads, its key head, its value head."""
    q, k, v = (hf[f"{prefix}{x}_proj.weight"] for x in "qkv")
    per_group = heads // groups
    rows = []
    for group in range(groups):
        for head in range(group * per_group, (group + 1) * per_group):
            rows += list(q[head * dim : (head + 1) * dim])
        rows += list(k[group * dim : (group + 1) * dim])
        rows += list(v[group * dim : (group + 1) * dim])
    return np.stack(rows)


def check_layer(source: Path, target: Path) -> None:
    """Every kind of parameter of layer 1 against its definition."""
    hf = {name: tensor.numpy() for name, tensor in hf_tensors(source).items()}
    mca = convert(source, target)
    layer, prefix = "decoder.layers.1.", "model.layers.1."
    qkv = expected_qkv(hf, f"{prefix}self_attn.", heads=4, groups=2, dim=16)
    for rank in range(TP):
        rows = len(qkv) // TP
        actual = pieces(mca, f"{layer}self_attention.linear_qkv.weight")[rank]
        assert np.array_equal(actual, qkv[rank * rows : (rank + 1) * rows])
        half = 48 // TP
        gate, up = (
            hf[f"{prefix}mlp.{x}_proj.weight"][rank * half : (rank + 1) * half] for x in ("gate", "up")
        )
        assert np.array_equal(pieces(mca, f"{layer}mlp.linear_fc1.weight")[rank], np.concatenate([gate, up]))
        down = hf[f"{prefix}mlp.down_proj.weight"][:, rank * half : (rank + 1) * half]
        assert np.array_equal(pieces(mca, f"{layer}mlp.linear_fc2.weight")[rank], down)
        out = hf[f"{prefix}self_attn.o_proj.weight"][:, rank * 32 : (rank + 1) * 32]
        assert np.array_equal(pieces(mca, f"{layer}self_attention.linear_proj.weight")[rank], out)
        words = hf["model.embed_tokens.weight"][rank * 35 : (rank + 1) * 35]
        assert np.array_equal(pieces(mca, "embedding.word_embeddings.weight")[rank], words)
    norm = pieces(mca, f"{layer}mlp.linear_fc1.layer_norm_weight")
    assert len(norm) == 1 and np.array_equal(norm[0], hf[f"{prefix}post_attention_layernorm.weight"])


def test_every_piece_is_what_megatron_expects(tiny, tmp_path: Path) -> None:
    check_layer(tiny("llama"), tmp_path / "mca")


def swapped_key_and_value(param: Param) -> Param:
    if "linear_qkv.weight" in param.mca:
        q, k, v = param.hf
        return dataclasses.replace(param, hf=(q, v, k))
    return param


def wrong_interleave(param: Param) -> Param:
    if "linear_qkv.weight" in param.mca:
        return dataclasses.replace(param, layout=Concat((4, 2, 2)))
    return param


def heads_not_grouped(param: Param) -> Param:
    if "linear_qkv.weight" in param.mca:
        return dataclasses.replace(param, layout=GroupedHeads(heads=(4, 2, 2), head_dim=16))
    return param


def gate_and_up_cut_as_one(param: Param) -> Param:
    return dataclasses.replace(param, shard=COLUMN) if param.shard == GATED else param


def row_parallel_cut_by_rows(param: Param) -> Param:
    return dataclasses.replace(param, shard=COLUMN) if param.shard == ROW else param


FAULTS = [
    swapped_key_and_value,
    wrong_interleave,
    heads_not_grouped,
    gate_and_up_cut_as_one,
    row_parallel_cut_by_rows,
]


def plant(monkeypatch: pytest.MonkeyPatch, change) -> None:
    family = FAMILIES["llama"]
    faulty = dataclasses.replace(family, params=lambda config: list(map(change, family.params(config))))
    monkeypatch.setitem(FAMILIES, "llama", faulty)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, fault)
    with pytest.raises((AssertionError, McaError)):
        check_layer(tiny("llama"), tmp_path / "mca")


def test_a_forgotten_parameter_is_caught(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["llama"]
    forgetful = dataclasses.replace(family, params=lambda config: family.params(config)[:-2])
    monkeypatch.setitem(FAMILIES, "llama", forgetful)
    with pytest.raises(McaError, match=r"unexpected tensors? \(lm_head.weight, model.norm.weight"):
        check_layer(tiny("llama"), tmp_path / "mca")


def test_a_transposed_row_parallel_weight_is_caught(tiny, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((tiny("llama") / "config.json").read_bytes())
    tensors = hf_tensors(tiny("llama"))
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(McaError, match=r"down_proj.weight has shape \[48, 32\], expected \[32, 48\]"):
        HfSource(source)
