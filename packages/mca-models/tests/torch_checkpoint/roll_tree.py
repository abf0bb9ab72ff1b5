"""Writes trees as ROLL's mcore_adapter does: the live state dict of every rank, under the rank's own names."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.weights import Param, Stage

Rename = Callable[[str], str]


def te_grouped(name: str) -> str:
    return name


def local_sequential(name: str) -> str:
    """The local layer spec: norms of their own, one module for each expert."""
    for fused, own in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
        ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
        ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("transformer_layer", "mtp_model_layer"),
    ):
        name = name.replace(fused, own)
    if ".experts.linear_fc" in name:
        head, _, tail = name.partition(".experts.")
        kind = "weight" if ".weight" in tail else "bias"
        module, _, expert = tail.partition(f".{kind}")
        return f"{head}.experts.local_experts.{expert}.{module}.{kind}"
    return name


def wholes(config: McaModelConfig, hf: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every whole parameter, vocabulary rows padded to a multiple of 4 x tp with noise."""
    result = {}
    for param in get_family(config.model_type).params(config):
        whole = param.to_full([hf[name] for name in param.hf_names()])
        if param.vocab:
            rows = -whole.shape[0] % (4 * config.layout.tp)
            whole = torch.cat([whole, torch.full((rows, *whole.shape[1:]), 7.0, dtype=whole.dtype)])
        result[param.mca_name()] = whole
    return result


def write(
    path: Path,
    config: McaModelConfig,
    hf: dict[str, torch.Tensor],
    rename: Rename = te_grouped,
    *,
    cut_down_projections: bool = False,
    grouped_gemm: bool = False,
) -> None:
    """Writes the checkpoint of ``hf`` at ``config.layout`` to ``path``."""
    layout = config.layout
    path.mkdir(parents=True, exist_ok=True)
    config.save(path)
    (path / "latest_checkpointed_iteration.txt").write_text("1")
    params, whole = get_family(config.model_type).params(config), wholes(config, hf)
    for pp in range(layout.pp):
        for rank in range(layout.etp * layout.ep):
            tp, ep, etp = rank % layout.tp, rank // layout.etp, rank % layout.etp
            name = (
                f"mp_rank_{tp:02d}"
                + (f"_{pp:03d}" if layout.pp > 1 else "")
                + (f"_{ep:03d}" if layout.ep > 1 else "")
            )
            saved: dict[str, Any] = {}
            for chunk in config.pipeline_plan().chunks[pp]:
                state: dict[str, Any] = {"decoder.layers.0.self_attention.core_attention._extra_state": None}
                for param in params:
                    if not _on(param, chunk, config, ep):
                        continue
                    piece = _piece(param, whole, (tp, etp), layout, cut_down_projections)
                    state[rename(_live(param, chunk, config, ep))] = piece
                if grouped_gemm:
                    state = _grouped(state)
                saved[f"model{chunk.vp}" if layout.vpp > 1 else "model"] = state
            folder = path / "iter_0000001" / name
            folder.mkdir(parents=True)
            torch.save(saved, folder / "model_optim_rng.pt")


def _on(param: Param, chunk: Any, config: McaModelConfig, ep: int) -> bool:
    if param.expert is not None and param.expert // (config.num_experts // config.layout.ep) != ep:
        return False
    if param.stage is Stage.LAYER:
        return param.layer in chunk.layers
    if param.stage is Stage.MTP:
        return param.layer in chunk.mtp_layers
    if param.stage is Stage.FIRST:
        return chunk.has_embedding or bool(chunk.mtp_layers)
    if param.alias_of:
        return chunk.has_loss and not chunk.has_embedding
    return bool(chunk.has_loss)


def _live(param: Param, chunk: Any, config: McaModelConfig, ep: int) -> str:
    layer = param.layer
    if param.stage is Stage.LAYER and layer is not None:
        layer -= chunk.layers[0]
    expert = param.expert
    if expert is not None:
        expert -= ep * (config.num_experts // config.layout.ep)
    return replace(param, layer=layer, expert=expert).mca_name()


def _piece(
    param: Param, whole: dict[str, torch.Tensor], ranks: tuple[int, int], layout: ParallelLayout, cut: bool
) -> torch.Tensor:
    tensor = whole[param.mca_name()]
    rank, size = (ranks[0], layout.tp) if param.expert is None else (ranks[1], layout.etp)
    if cut and "_down_proj." in param.mca:
        return tensor.chunk(layout.tp)[ranks[0]]
    return param.shard.take(tensor, rank, size)


def _grouped(state: dict[str, Any]) -> dict[str, Any]:
    """Megatron's old grouped module: all experts of a layer in ``weight1`` and ``weight2``."""
    result: dict[str, Any] = {}
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in state.items():
        if ".experts.linear_fc" in name:
            prefix, _, module = name.partition(".experts.")
            found.setdefault(f"{prefix}.experts.weight{module[len('linear_fc')]}", []).append(tensor)
        else:
            result[name] = tensor
    for name, experts in found.items():
        stacked = torch.stack([expert.t() for expert in experts]).contiguous()  # [experts, in, out]
        hidden = stacked.shape[1] if name.endswith("1") else stacked.shape[2]
        result[name] = stacked.view(hidden, -1) if name.endswith("1") else stacked.view(-1, hidden)
    return result
