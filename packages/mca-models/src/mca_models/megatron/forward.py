"""Full logits through Megatron's forward pipeline schedule.

No loss is computed and nothing is trained.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from mca_config.errors import McaError, raise_problems
from mca_config.layout import ParallelLayout
from mca_config.types import JsonObject
from mca_models.megatron import platform
from mca_models.megatron.distributed import parallel
from mca_models.megatron.distributed.collectives import run_on_all_ranks_unwrapped
from mca_models.megatron.distributed.parallel import LiveModel
from mca_models.megatron.features.media import image_problems
from mca_models.megatron.features.processor_media import LocatedMedia, sequence_media
from mca_models.megatron.features.sequence_media import SequenceMedia, media_joiner
from mca_models.megatron.layers.rope import length_dependent_ropes, set_longest_sequence
from mca_models.megatron.layers.zigzag import restore_token_order, take_rank_tokens
from mca_models.megatron.tensors import weights_dtype
from mca_models.megatron.types import GptModel, MegatronConfig, MegatronModule

GivenMedia = Sequence[SequenceMedia | Mapping[str, Tensor] | None]
"""For each sequence the outputs of the checkpoint's processor, or located media such as a sample's; None: none."""


@torch.no_grad()
def model_logits(models: LiveModel, input_ids: Tensor, given: GivenMedia | None = None) -> Tensor:
    """Return the logits; see ``VirtualModels.logits``."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    media: list[SequenceMedia | None] = []

    def check() -> tuple[int, int]:
        if input_ids.dim() != 2 or not input_ids.numel():
            raise McaError(f"input_ids has shape {list(input_ids.shape)}; expected [batch, seq] with tokens")
        media.extend(located_media(models, list(input_ids), given))
        return models.rank_context.coordinates.dp, media_checksum(media)

    require_same_inputs(run_on_all_ranks_unwrapped(check))
    batch, length = input_ids.shape
    if models.config.embedding.learned_positions:
        require_learned_positions(length, models.config.max_position_embeddings)
    tokens = _padded(models, input_ids.to(platform.current_device()))
    steps = micro_batch_group(models)
    rows = tokens.shape[0] // steps
    with inference(models):
        set_longest_sequence(length_dependent_ropes(*models.chunks), length)
        outputs = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[_micro(models, chunk, tokens, rows, length, media) for chunk in models.chunks],
            model=list(models.chunks),
            num_microbatches=steps,
            seq_length=tokens.shape[1],
            micro_batch_size=rows,
            forward_only=True,
            collect_non_loss_data=True,
        )
    shape = (tokens.shape[0], tokens.shape[1], models.config.head.num_labels or models.config.vocab_size)
    return _broadcast_logits(models, outputs, shape)[:batch, :length]


def located_media(
    models: LiveModel, sequences: Sequence[Tensor], given: GivenMedia | None
) -> list[SequenceMedia | None]:
    """Return the media of each sequence, after checking that all tokens are in the vocabulary.

    Args:
        models: The model.
        sequences: Tokens of each.
        given: Media of each; None: of none.

    Raises:
        McaError: A token is no row of the embedding, the media are not those of the placeholders, or the model or its
            layout does not support them.
    """
    _require_vocabulary(sequences, models.config.vocab_size)
    if given is None:
        given = [None] * len(sequences)
    if len(given) != len(sequences):
        raise McaError(
            f"media has {len(given)} items; expected {len(sequences)}, one for each sequence or None"
        )
    found: list[SequenceMedia | None] = []
    for number, (tokens, own) in enumerate(zip(sequences, given, strict=True)):
        try:
            found.append(sequence_media(tokens, own, models.config))
        except McaError as error:
            raise McaError(f"media, sequence {number}: {error}") from error
    if any(found):
        layout = models.rank_context.layout
        problems = image_problems(models.config, layout, models.megatron, trains=False)
        raise_problems(problems, f"images for {models.config.model_type} at {layout}")
    return found


def _require_vocabulary(sequences: Sequence[Tensor], vocab_size: int) -> None:
    """Raise for tokens that only some ranks would reject: tensor ranks embed those of other ranks as zeros."""
    tokens = torch.cat([*sequences]) if sequences else torch.empty(0, dtype=torch.int64)
    if tokens.is_floating_point() or tokens.is_complex():
        raise McaError(f"input_ids has dtype {tokens.dtype}; expected integers, the ids of tokens")
    least, most = (int(end) for end in tokens.aminmax()) if tokens.numel() else (0, 0)
    if least < 0 or most >= vocab_size:
        raise McaError(
            f"input_ids has token {least if least < 0 else most}; expected 0 to {vocab_size - 1}, the model's "
            "vocabulary: use its tokenizer, or from_pretrained(..., vocab_size=...)"
        )


def media_checksum(found: Sequence[SequenceMedia | None], start: int = 0) -> int:
    """Return a CRC-32 of the locations of media and of pixels in memory; ``start`` without any.

    Media of samples are files, which are not opened for it.
    """
    spans = [media.places if media else () for media in found]
    if not any(spans):
        return start
    checksum = zlib.crc32(repr(spans).encode(), start)
    for media in found:
        if isinstance(media, LocatedMedia):
            checksum = media.checksum(checksum)
    return checksum


def require_same_inputs(everyone: Sequence[tuple[int, int]]) -> None:
    """Raise if ranks of a replica have different experts or media.

    Args:
        everyone: Replica and checksum of every rank.
    """
    first: dict[int, tuple[int, int]] = {}
    for rank, (replica, checksum) in enumerate(everyone):
        other, expected = first.setdefault(replica, (rank, checksum))
        if checksum != expected:
            raise McaError(
                f"ranks {other} and {rank}, of one replica, have different routed_experts or media; broadcast them "
                "with the tokens"
            )


def _padded(models: LiveModel, tokens: Tensor) -> Tensor:
    """Pad each row with token 0 to a length that the layout can shard, and the rows to whole micro-batches."""
    batch, length = tokens.shape
    columns = -length % row_multiple(models.rank_context.layout, models.megatron, tokens.device, packed=False)
    rows = -batch % micro_batch_group(models)
    return torch.nn.functional.pad(tokens, (0, columns, 0, rows))


def row_multiple(
    layout: ParallelLayout, megatron: MegatronConfig, device: torch.device, *, packed: bool
) -> int:
    """Return the multiple that rows are padded to, so that the layout can shard them."""
    return sequence_multiple(
        layout,
        megatron.sequence_parallel,
        tokens=fp8_token_multiple(megatron.fp8, megatron.fp8_recipe),
        step=length_multiple(device.type, megatron.transformer_impl, packed=packed),
    )


def micro_batch_group(models: LiveModel) -> int:
    """Return the multiple of micro-batches that the interleaved schedule needs; 1 for other schedules."""
    layout = models.rank_context.layout
    group = models.megatron.microbatch_group_size_per_vp_stage or layout.pp
    return int(group) if layout.vpp > 1 else 1


def _micro(
    models: LiveModel,
    chunk: MegatronModule,
    tokens: Tensor,
    rows: int,
    length: int,
    media: Sequence[SequenceMedia | None],
) -> Iterator[JsonObject]:
    """Yield this context rank's part of each micro-batch: ``[rows, seq / cp]`` tokens and positions.

    Padding after ``length`` takes the last token's position, because it may exceed the model's positions.
    """
    group = parallel.context_group()
    positions = torch.arange(tokens.shape[1], device=tokens.device).clamp(max=length - 1).expand(rows, -1)
    joiner = media_joiner(models.config, decodes=bool(chunk.pre_process))

    def cut(whole: Tensor, axis: int) -> Tensor:
        return take_rank_tokens(whole, axis, group.rank(), group.size()).contiguous()

    for number, micro in enumerate(torch.split(tokens, rows)):
        found = list(media[number * rows : (number + 1) * rows])
        found += [None] * (rows - len(found))
        joined = joiner.join(found, [tokens.shape[1]] * rows, cut, packed=False).to(tokens.device)
        yield {
            **joined.keywords(weights_dtype(chunk)),
            "input_ids": cut(micro, 1),
            "position_ids": cut(positions, 1) if joined.sections is None else joined.sections,
        }


def _forward_step(
    iterator: Iterator[JsonObject], model: torch.nn.Module
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
        set_longest_sequence(length_dependent_ropes(*chunks), 0)


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
