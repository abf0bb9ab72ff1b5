"""Full logits through Megatron's forward pipeline schedule.

No loss is computed and nothing is trained.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from mca_config.checks import (
    fp8_token_multiple,
    length_multiple,
    require_learned_positions,
    sequence_multiple,
)
from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.media import placeholders
from mca_models.megatron import platform
from mca_models.megatron.distributed import parallel
from mca_models.megatron.layers.rope import length_dependent_ropes, set_longest_sequence
from mca_models.megatron.layers.zigzag import restore_token_order, take_rank_tokens
from mca_models.megatron.live_model import LiveModel
from mca_models.megatron.types import GptModel


@torch.no_grad()
def model_logits(models: LiveModel, input_ids: Tensor) -> Tensor:
    """Return the logits; see ``VirtualModels.logits``."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    require_no_images(models.config, input_ids)
    batch, length = input_ids.shape
    if models.config.embedding.learned_positions:
        require_learned_positions(length, models.config.max_position_embeddings)
    tokens = _padded(models, input_ids.to(platform.current_device()))
    steps = micro_batch_group(models)
    rows = tokens.shape[0] // steps
    ropes = length_dependent_ropes(*models.chunks)
    set_longest_sequence(ropes, length)
    with inference(models):
        outputs = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[_micro(tokens, rows, length) for _ in models.chunks],
            model=list(models.chunks),
            num_microbatches=steps,
            seq_length=tokens.shape[1],
            micro_batch_size=rows,
            forward_only=True,
            collect_non_loss_data=True,
        )
    shape = (tokens.shape[0], tokens.shape[1], models.config.head.num_labels or models.config.vocab_size)
    set_longest_sequence(ropes, 0)
    return _broadcast_logits(models, outputs, shape)[:batch, :length]


def require_no_images(config: McaModelConfig, input_ids: Tensor) -> None:
    """Raise if ``input_ids`` has placeholders of images, which would be treated as words.

    Raises:
        McaError: A placeholder of an image or a video is among ``input_ids``.
    """
    for medium, token in placeholders(config.vision_fields).items():
        if bool((input_ids == token).any()):
            raise McaError(
                f"input_ids have {token}, the placeholder of {medium}s, which logits and log_probs do not support; "
                "pass text only, or use McaTrainer.token_values, which takes the images of its samples"
            )


def _padded(models: LiveModel, tokens: Tensor) -> Tensor:
    """Pad each row with token 0 to a length that the layout can shard, and the rows to whole micro-batches."""
    batch, length = tokens.shape
    layout = models.rank_context.layout
    multiple = sequence_multiple(
        layout,
        models.megatron.sequence_parallel,
        tokens=fp8_token_multiple(models.megatron.fp8, models.megatron.fp8_recipe),
        step=length_multiple(tokens.device.type, models.megatron.transformer_impl, packed=False),
    )
    columns = -length % multiple
    rows = -batch % micro_batch_group(models)
    return torch.nn.functional.pad(tokens, (0, columns, 0, rows))


def micro_batch_group(models: LiveModel) -> int:
    """Return the multiple of micro-batches that the interleaved schedule needs; 1 for other schedules."""
    layout = models.rank_context.layout
    group = models.megatron.microbatch_group_size_per_vp_stage or layout.pp
    return int(group) if layout.vpp > 1 else 1


def _micro(tokens: Tensor, rows: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Yield this context rank's part of each micro-batch: ``[rows, seq / cp]`` tokens and positions.

    Padding after ``length`` takes the last token's position, because it may exceed the model's positions.
    """
    group = parallel.context_group()
    positions = torch.arange(tokens.shape[1], device=tokens.device).clamp(max=length - 1).expand(rows, -1)
    for micro in torch.split(tokens, rows):
        yield {
            "input_ids": take_rank_tokens(micro, 1, group.rank(), group.size()).contiguous(),
            "position_ids": take_rank_tokens(positions, 1, group.rank(), group.size()).contiguous(),
        }


def _forward_step(
    iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor, bool], Tensor]]:
    output: Tensor = model(**next(iterator), attention_mask=None)

    def collect(logits: Tensor, non_loss_data: bool = False) -> Tensor:
        return logits

    return output, collect


@contextmanager
def inference(models: LiveModel) -> Iterator[None]:
    """Run the block in evaluation mode on the model's groups, without the MTP layers."""
    chunks: list[GptModel] = list(models.chunks)
    parallel.activate_process_groups(chunks)
    modes = [(module, module.training) for module in models.chunks.modules()]
    depth, predicting = models.megatron.mtp_num_layers, [chunk.mtp_process for chunk in chunks]
    models.chunks.eval()
    models.megatron.mtp_num_layers = None
    for chunk in chunks:
        chunk.mtp_process = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        models.megatron.mtp_num_layers = depth
        for chunk, before in zip(chunks, predicting, strict=True):
            chunk.mtp_process = before


def _broadcast_logits(models: LiveModel, outputs: list[Tensor], shape: tuple[int, int, int]) -> Tensor:
    """Return the last stage's logits, gathered over tensor and context ranks, on all pipeline ranks."""
    group = parallel.pipeline_group()
    if group.rank() == group.size() - 1:
        cut = models.config.head.num_labels is None  # classification scores are replicated over tensor ranks
        logits = torch.cat([_gather_logits(output.float(), shape[2], cut=cut) for output in outputs])
    else:
        logits = torch.empty(shape, device=platform.current_device())
    if group.size() > 1:
        last = torch.distributed.get_global_rank(group, group.size() - 1)
        torch.distributed.broadcast(logits, last, group=group)
    return logits


def _gather_logits(logits: Tensor, vocab: int, *, cut: bool) -> Tensor:
    """Gather ``[rows, seq, vocab]`` of one micro-batch from this rank's ``[rows, seq / cp, padded / tp]``."""
    if cut:
        logits = torch.cat(gathered(logits, parallel.tensor_group()), -1)[..., :vocab]
    context = parallel.context_group()
    if context.size() == 1:
        return logits
    by_rank = torch.cat(gathered(logits.transpose(0, 1), context))
    (ordered,) = restore_token_order(by_rank, (by_rank.shape[0],), context.size())
    return ordered.transpose(0, 1)


def gathered(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Gather ``x`` of every rank of ``group``."""
    if group.size() == 1:
        return [x]
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x, group=group)
    return parts
