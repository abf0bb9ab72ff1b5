"""Forward and backward passes of models with images, of all parts or of some, on every kind of layout."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cases import Case
from layouts import arguments
from vision_reference import LENGTH, ROWS, Mixed, batch_of

DENSE = (
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_vl",
    "internvl",
    "mistral3",
    "glm4v",
    "gemma3",
    "cohere2_vision",
    "aya_vision",
    "gemma4-31b",
    "gemma4-e2b",
    "gemma4_unified",
    "llava",
    "vipllava",
    "llava_next",
    "llava_onevision",
    "idefics3",
    "smolvlm",
    "lfm2_vl",
    "lfm3_vl",
    "minicpmv4_6",
    "lighton_ocr",
    "qianfan_ocr",
    "got_ocr2",
    "glm_ocr",
    "glmga",
    "ovis2",
    "exaone4_5",
    "deepseek_vl",
    "glm46v",
    "qwen2_audio",
    "qwen3_asr",
    "voxtral",
    "audioflamingo3",
    "glmasr",
    "qwen2_5_omni_thinker",
)
VIDEOS = tuple(
    f"{model}-video"
    for model in (
        "qwen2_vl",
        "qwen2_5_vl",
        "exaone4_5",
        "qwen3_vl",
        "qwen3_5",
        "lfm3_vl",
        "minicpmv4_6",
        "glm4v",
        "glm_ocr",
        "gemma4-31b",
        "gemma4-e2b",
        "gemma4_unified",
        "llava_onevision",
    )
)
SPARSE_VIDEOS = ("qwen3_vl_moe-video", "qwen3_5_moe-video", "glm4v_moe-video")
SPARSE = (
    "qwen3_5_moe",
    "qwen3_vl_moe",
    "qwen3_omni_moe_thinker",
    "glm4v_moe",
    "glm46v-moe",
    "gemma4-moe",
    "llama4-moe",
    "kimi_k25-moe",
    "minimax_m3_vl-moe",
    "mistral3-mistral4-moe",
)


def sizes(layout: str) -> str:
    """The part of a layout's name that says how many ranks there are of what."""
    for word in ("packed", "recompute", "overlap", "-"):
        layout = layout.replace(word, "")
    return layout


def of_all_parts(
    reference: Mixed, layout: str, more: dict[str, Any] | None = None, **of_ddp: Any
) -> tuple[Any, list[Any]]:
    """A model all of which trains, and its chunks in Megatron's wrapper."""
    from mca_models.megatron import AutoModel
    from mca_models.templates.parts.vision_language import model_parts

    settings: dict[str, Any] = {"calculate_per_token_loss": True, "moe_aux_loss_coeff": 0.0}
    settings["moe_router_bias_update_rate"] = 0.0  # transformers leaves the bias of experts as it is
    if "recompute" in layout:
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    model = AutoModel.from_pretrained(reference.path, arguments(sizes(layout), **settings, **(more or {})))
    model.train_parts(model_parts(model.config))
    return model, wrapped(model, layout, **of_ddp)


def wrapped(model: Any, layout: str, **of_ddp: Any) -> list[Any]:
    """Its chunks in Megatron's wrapper."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    overlap = "overlap" in layout
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, **of_ddp)
    chunks = [DistributedDataParallel(model.megatron, ddp, chunk) for chunk in model.chunks]
    model.megatron.finalize_model_grads_func = finalize_model_grads
    if overlap:
        model.megatron.no_sync_func = chunks[0].no_sync
    return chunks


def forward_backward(
    reference: Mixed, layout: str, model: Any, chunks: list[Any], losses: list[float]
) -> None:
    """The gradients of all rows, from zero on."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    per_batch = 2 if "packed" in layout else 1
    for chunk in chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=lambda iterator, chunk: forward_step(iterator, chunk, losses),
        data_iterator=[batches(reference, model, layout, per_batch) for _ in chunks],
        model=chunks,
        num_microbatches=len(_of_replica(per_batch)),
        seq_length=LENGTH * per_batch if "packed" in layout else LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )


def _of_replica(per_batch: int) -> list[range]:
    from megatron.core import parallel_state

    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    starts = range(replica * per_batch, len(ROWS), replicas * per_batch)
    return [range(start, start + per_batch) for start in starts]


def batches(reference: Mixed, model: Any, layout: str, per_batch: int) -> Iterator[dict[str, Any]]:
    """This data-parallel rank's micro-batches, this context rank's part of them."""
    from mca_models.megatron.distributed import parallel
    from mca_models.megatron.layers.zigzag import take_rank_tokens

    group = parallel.context_group()
    sections = model.config.mrope is not None
    for rows in _of_replica(per_batch):
        whole = batch_of(reference, rows, sections=sections)
        images = {"images": whole.pop("images")} if "images" in whole else {}
        if "packed" in layout:
            yield packed(whole, group.rank(), group.size(), sections=sections) | images
            continue
        yield {
            name: take_rank_tokens(x, x.dim() - 1, group.rank(), group.size()).contiguous()
            for name, x in whole.items()
        } | images


def packed(whole: dict[str, torch.Tensor], rank: int, size: int, *, sections: bool) -> dict[str, Any]:
    """The rows one after the other in one; positions stay whole."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from mca_models.megatron.layers.zigzag import take_rank_tokens

    count = len(whole["input_ids"])
    ends = torch.arange(0, LENGTH * count + 1, LENGTH, dtype=torch.int32)
    batch: dict[str, Any] = {
        name: take_rank_tokens(x, 1, rank, size).reshape(1, -1) for name, x in whole.items() if x.dim() == 2
    }
    if sections:
        batch["position_ids"] = whole["position_ids"].reshape(3, 1, -1)
    batch["packed_seq_params"] = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=LENGTH,
        max_seqlen_kv=LENGTH,
    )
    return batch


def forward_step(iterator: Iterator[dict[str, Any]], chunk: Any, seen: list[float]) -> Any:
    batch = next(iterator)
    mask = batch["loss_mask"]
    losses = chunk(**batch, attention_mask=None)

    def loss(losses: torch.Tensor) -> Any:
        total = (losses.float() * mask).sum()
        seen.append(float(total.detach()))
        return total, mask.sum().int(), {}

    return losses, loss


def compute_gradients(
    work: list[Mixed], layout: str, folder: Path, **settings: Any
) -> list[str | list[float]]:
    """Row losses of each model on this rank, or what went wrong; the gradients are exported. Runs on every rank."""
    found: list[str | list[float]] = []
    for reference in work:
        try:
            found.append(_one(reference, layout, folder / f"{reference.path.name}-{layout}", settings))
        except Exception as error:  # the same on every rank: go on with the other models
            found.append(f"{type(error).__name__}: {error}")
    return found


def compute_each(work: dict[Case, Mixed], folder: Path) -> list[str | list[float]]:
    """Return what `compute_gradients` finds for each case. Runs on every rank."""
    return [compute_gradients([reference], case.layout, folder)[0] for case, reference in work.items()]


def _one(reference: Mixed, layout: str, path: Path, settings: dict[str, Any]) -> list[float]:
    model, chunks = of_all_parts(reference, layout, settings)
    losses: list[float] = []
    for _ in range(2 if "overlap" in layout else 1):
        losses.clear()
        forward_backward(reference, layout, model, chunks, losses)
    with torch.no_grad():
        for _, tensor in model.local_params():
            if isinstance(tensor, torch.nn.Parameter):
                tensor.copy_(tensor.main_grad if tensor.requires_grad else torch.zeros_like(tensor))
    model.save_pretrained_as_hf(path)
    return losses
