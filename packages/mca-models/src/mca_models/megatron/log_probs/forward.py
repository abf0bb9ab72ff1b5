"""Log-probabilities of given tokens through Megatron's forward schedule; nothing is trained.

Sequences are rows of a micro-batch, padded on the right, or packed. `_Rows` maps tokens to context ranks; `chunks`
computes values from the last stage's hidden states.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor

from mca_config.checks import require_learned_positions
from mca_config.errors import McaError, raise_problems
from mca_config.types import JsonObject
from mca_models.megatron import platform
from mca_models.megatron.distributed import parallel
from mca_models.megatron.distributed.collectives import run_on_all_ranks_unwrapped
from mca_models.megatron.distributed.parallel import LiveModel
from mca_models.megatron.factory.limits import packed_problems
from mca_models.megatron.features.feature import Setup
from mca_models.megatron.features.features import active_features
from mca_models.megatron.features.router_replay import (
    LIVE,
    checked_experts,
    recorded_experts,
    require_experts,
    require_replayed,
    routed_passes,
    set_routed_experts,
)
from mca_models.megatron.features.sequence_media import MediaArguments, SequenceMedia, media_joiner
from mca_models.megatron.forward import (
    GivenMedia,
    gathered,
    inference,
    located_media,
    media_checksum,
    micro_batch_group,
    require_same_inputs,
    row_multiple,
)
from mca_models.megatron.layers.attention import set_packed_lengths
from mca_models.megatron.layers.rope import length_dependent_ropes, set_longest_sequence
from mca_models.megatron.layers.zigzag import rank_token_ranges, take_rank_tokens
from mca_models.megatron.log_probs.chunks import ChunkedOutput, preserved_output, token_values
from mca_models.megatron.log_probs.vocabulary import TokenValues
from mca_models.megatron.tensors import weights_dtype
from mca_models.megatron.types import GptModel, MegatronModule, PackedSeqParams


class LogProbs(NamedTuple):
    """fp32 values of the shape of the tokens; 0 for first tokens of sequences and for padding."""

    log_probs: Tensor
    entropy: Tensor | None


class RoutedLogProbs(NamedTuple):
    """`LogProbs` with the experts of each token."""

    log_probs: Tensor
    entropy: Tensor | None
    routed_experts: Tensor
    """int16 ``[batch, seq, layers with experts, topk]``; -1 for padding."""


@dataclass(frozen=True)
class Batch:
    """Arguments of ``VirtualModels.log_probs``.

    Args:
        input_ids: ``[batch, seq]``.
        mask: ``[batch, seq]``, False for padding on either side; None: no padding.
        cu_seqlens: ``[sequences + 1]``: boundaries of packed sequences in the one row of ``input_ids``.
        packed: Pack the sequences of a micro-batch into one row.
        micro_batch_size: Sequences of a micro-batch.
        chunk_size: Number of tokens whose logits exist at a time.
        routed_experts: ``[batch, seq, layers, topk]``, -1 for tokens whose experts the routers choose; None: for all.
        return_routed_experts: Also return the experts.
        media: Media of each sequence; None: of no sequence.
    """

    input_ids: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None
    packed: bool
    micro_batch_size: int
    chunk_size: int
    routed_experts: Tensor | None = None
    return_routed_experts: bool = False
    media: GivenMedia | None = None

    def __post_init__(self) -> None:
        ids = tuple(self.input_ids.shape)
        if len(ids) != 2:
            raise McaError(f"input_ids has shape {list(ids)}; expected [batch, seq]")
        if self.mask is not None and tuple(self.mask.shape) != ids:
            raise McaError(f"mask has shape {list(self.mask.shape)}; expected {list(ids)}, as input_ids")
        if self.routed_experts is not None and tuple(self.routed_experts.shape[:2]) != ids:
            raise McaError(
                f"routed_experts has shape {list(self.routed_experts.shape)}; expected [{ids[0]}, {ids[1]}, layers, "
                "topk], as input_ids, with -1 for tokens without"
            )
        if min(self.micro_batch_size, self.chunk_size) < 1:
            raise McaError("micro_batch_size and chunk_size must be at least 1")
        if self.cu_seqlens is None:
            return
        ends = self.cu_seqlens.tolist()
        if (
            self.mask is not None
            or ids[0] != 1
            or ends[:1] != [0]
            or ends[-1] != ids[1]
            or ends != sorted(ends)
        ):
            raise McaError(
                "cu_seqlens must increase from 0 to the length of the only row of input_ids, without a mask"
            )

    def positions(self) -> list[Tensor]:
        """Return for each sequence that is not empty the flat positions of its tokens in ``input_ids``."""
        return [positions for positions in self._all_positions() if len(positions)]

    def located_media(self, models: LiveModel) -> list[SequenceMedia | None]:
        """Return the media of each sequence that is not empty."""
        flat = self.input_ids.flatten()
        positions = self._all_positions()
        found = located_media(models, [flat[each.to(flat.device)] for each in positions], self.media)
        return [media for media, each in zip(found, positions, strict=True) if len(each)]

    def _all_positions(self) -> list[Tensor]:
        width = self.input_ids.shape[1]
        if self.cu_seqlens is not None:
            ends = self.cu_seqlens.tolist()
            return [torch.arange(a, b) for a, b in pairwise(ends)]
        if self.mask is None:
            return [torch.arange(row * width, (row + 1) * width) for row in range(len(self.input_ids))]
        return [
            row * width + present.nonzero().flatten() for row, present in enumerate(self.mask.cpu().bool())
        ]


@torch.no_grad()
def model_log_probs(
    models: LiveModel, make_batch: Callable[[], Batch], values: TokenValues
) -> LogProbs | RoutedLogProbs:
    """Compute log-probabilities; see ``VirtualModels.log_probs``.

    Args:
        models: The model.
        make_batch: Returns the batch; may raise on some ranks only.
        values: Function that computes the values of each token.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batch, media = _checked_batch(models, make_batch)
    rows = _Rows(models, batch, media)
    with (
        inference(models),
        _computing(models, batch.chunk_size, values),
        routed_passes(list(models.chunks), record=batch.return_routed_experts),
    ):
        outputs: list[Tensor] = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[rows.micro_batches(chunk) for chunk in models.chunks],
            model=list(models.chunks),
            num_microbatches=rows.count,
            seq_length=rows.length,
            micro_batch_size=rows.height,
            forward_only=True,
            collect_non_loss_data=True,
        )
        routed = rows.routed_experts() if batch.return_routed_experts else None
    kinds = 1 + values.entropy
    group = parallel.pipeline_group()
    shape = (kinds, rows.count * rows.height, rows.length)
    if group.rank() == group.size() - 1:
        values_by_row = torch.cat([rows.whole(output.view(kinds, rows.height, -1)) for output in outputs], 1)
    else:
        values_by_row = torch.empty(shape, device=platform.current_device())
    if group.size() > 1:
        torch.distributed.broadcast(
            values_by_row, torch.distributed.get_global_rank(group, group.size() - 1), group=group
        )
    found = LogProbs(*rows.spread(values_by_row), *(() if values.entropy else (None,)))
    return found if routed is None else RoutedLogProbs(*found, routed)


def _checked_batch(
    models: LiveModel, make_batch: Callable[[], Batch]
) -> tuple[Batch, list[SequenceMedia | None]]:
    """Return this replica's batch and media, or raise on all ranks if one cannot be computed; collective."""
    batches: list[tuple[Batch, list[SequenceMedia | None]]] = []

    def check() -> tuple[int, int]:
        batch = make_batch()
        media = batch.located_media(models)
        if batch.packed:
            _require_packs(models)
        if models.config.embedding.learned_positions:
            longest = max(map(len, batch.positions()), default=0)
            require_learned_positions(longest, models.config.max_position_embeddings)
        if batch.return_routed_experts:
            require_experts(models.config, "return_routed_experts")
        if batch.routed_experts is not None:
            checked = checked_experts(models.config, batch.routed_experts, "routed_experts")
            batch = replace(batch, routed_experts=checked)
        batches.append((batch, media))
        return models.rank_context.coordinates.dp, media_checksum(media, _checksum(batch.routed_experts))

    require_same_inputs(run_on_all_ranks_unwrapped(check))
    return batches[0]


def _checksum(experts: Tensor | None) -> int:
    """Return a CRC-32 of ``experts``; 0 for None."""
    if experts is None:
        return 0
    return zlib.crc32(experts.cpu().contiguous().numpy().tobytes(), zlib.crc32(str(experts.shape).encode()))


def _require_packs(models: LiveModel) -> None:
    megatron = models.megatron
    setup = Setup(
        config=models.config,
        features=active_features(models.config),
        layout=models.rank_context.layout,
        settings={name: getattr(megatron, name) for name in ("cp_comm_type", "attention_backend")},
        implementation=megatron.transformer_impl,
        packed=True,
    )
    raise_problems(packed_problems(setup), "packed log_probs")


class _Rows:
    """Sequences in the rows of micro-batches, with equal numbers and lengths on all ranks.

    Attributes:
        count: Micro-batches.
        height: Rows of each.
        length: Tokens of a row, over all context ranks.
    """

    def __init__(self, models: LiveModel, batch: Batch, media: Sequence[SequenceMedia | None]) -> None:
        self._models, self._batch, layout = models, batch, models.rank_context.layout
        self._media = media
        self._device = platform.current_device()
        self._sequence_positions = batch.positions()
        size = batch.micro_batch_size
        self._longest = max(map(len, self._sequence_positions), default=0)
        self._groups = [
            self._sequence_positions[i : i + size] for i in range(0, len(self._sequence_positions), size)
        ]
        self._multiple = row_multiple(layout, models.megatron, self._device, packed=batch.packed)
        self.height = 1 if batch.packed else size
        lengths = [[self._padded(len(positions)) for positions in group] for group in self._groups]
        length = max([sum(each) if batch.packed else max(each) for each in lengths], default=self._multiple)
        box = torch.tensor([len(self._groups), length], device=self._device)
        torch.distributed.all_reduce(box, torch.distributed.ReduceOp.MAX)  # replicas share experts
        count, self.length = box.tolist()
        group = micro_batch_group(models)
        self.count = -(-max(count, 1) // group) * group

    def _padded(self, tokens: int) -> int:
        return -(-tokens // self._multiple) * self._multiple

    def micro_batches(self, chunk: MegatronModule) -> Iterator[JsonObject]:
        """Yield this context rank's inputs of a chunk, after setting the longest sequence in its ropes."""
        ropes, decodes = length_dependent_ropes(chunk), bool(chunk.pre_process)
        ids = self._batch.input_ids.flatten().to(self._device)
        group = parallel.context_group()
        for number in range(self.count):
            tokens = torch.zeros(3, self.height, self.length, dtype=torch.int64, device=self._device)
            for row, start, positions in self._sequence_rows(number):
                cut = slice(start, start + len(positions))
                tokens[0, row, cut] = ids[positions.to(self._device)]
                tokens[1, row, start : start + len(positions) - 1] = tokens[
                    0, row, start + 1 : start + len(positions)
                ]
            lengths = self._lengths(number)
            tokens[2] = self._positions(number, lengths)
            set_longest_sequence(
                ropes, max((len(positions) for _, _, positions in self._sequence_rows(number)), default=0)
            )
            own = self._rank_tokens(lengths, group.rank(), group.size())
            local = tokens[..., own]
            media = self._joined_media(number, decodes=decodes)
            yield {
                **media.keywords(weights_dtype(chunk)),
                "input_ids": local[0].contiguous(),
                "labels": local[1].contiguous(),
                "position_ids": local[2].contiguous() if media.sections is None else media.sections,
                "packed_seq_params": self._packed(lengths) if self._batch.packed else None,
                "routed_experts": self._replayed_experts(number, own),
            }

    def _joined_media(self, number: int, *, decodes: bool) -> MediaArguments:
        """Return the arguments of a chunk for the media of a micro-batch; ``decodes``: with the pixels."""
        size, group = self._batch.micro_batch_size, parallel.context_group()
        found = list(self._media[number * size : (number + 1) * size])
        lengths: Sequence[int] = self._lengths(number)
        if not self._batch.packed:
            lengths = [self.length] * self.height
        joined = media_joiner(self._models.config, decodes=decodes).join(
            found,
            lengths,
            lambda whole, axis: take_rank_tokens(whole, axis, group.rank(), group.size()).contiguous(),
            packed=self._batch.packed,
        )
        return joined.to(self._device)

    def _replayed_experts(self, number: int, own: Tensor) -> Tensor | None:
        """Return the experts ``[height, own tokens, layers, topk]`` of a micro-batch."""
        given = self._batch.routed_experts
        if given is None:
            return None
        flat = given.flatten(0, 1).to(self._device)
        rows = flat.new_full((self.height, self.length, *flat.shape[1:]), LIVE)
        for row, start, positions in self._sequence_rows(number):
            rows[row, start : start + len(positions)] = flat[positions.to(self._device)]
        return rows[:, own]

    def _sequence_rows(self, number: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield row, first token and positions in the batch of each sequence of a micro-batch."""
        start = 0
        for index, positions in enumerate(self._groups[number] if number < len(self._groups) else ()):
            yield (0, start, positions) if self._batch.packed else (index, 0, positions)
            start += self._padded(len(positions))

    def _lengths(self, number: int) -> tuple[int, ...]:
        """Return the lengths of the sequences in a row, padding included."""
        if not self._batch.packed:
            return (self.length,)
        lengths = [self._padded(len(positions)) for _, _, positions in self._sequence_rows(number)]
        rest = self.length - sum(lengths)
        return (*lengths, rest) if rest else tuple(lengths)

    def _positions(self, number: int, lengths: tuple[int, ...]) -> Tensor:
        """Return the positions of a row's tokens; padding takes the last token's, as it may exceed the maximum."""
        true = (
            [len(positions) for _, _, positions in self._sequence_rows(number)]
            if self._batch.packed
            else [self._longest]
        )
        true += [0] * (len(lengths) - len(true))
        positions = [
            torch.arange(n).clamp(max=max(most - 1, 0)) for n, most in zip(lengths, true, strict=True)
        ]
        return torch.cat(positions).to(self._device)

    def _rank_tokens(self, lengths: Sequence[int], rank: int, size: int) -> Tensor:
        """Return the indices of a context rank's tokens in a row."""
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        ranges = rank_token_ranges(tuple(lengths), rank, size)
        return torch.cat(
            [
                torch.arange(starts[r.sequence] + r.start, starts[r.sequence] + r.start + r.length)
                for r in ranges
            ]
        ).to(self._device)

    def _packed(self, lengths: Sequence[int]) -> PackedSeqParams:
        from megatron.core.packed_seq_params import PackedSeqParams as Params

        on_host = torch.tensor([0, *lengths]).cumsum(0).int()
        ends, longest = on_host.to(self._device), max(lengths)
        params: PackedSeqParams = Params(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        set_packed_lengths(params, on_host)
        return params

    def whole(self, output: Tensor) -> Tensor:
        """Gather ``[kinds, height, length]`` of all context ranks, in the ranks' order until `spread`."""
        return torch.cat(gathered(output, parallel.context_group()), -1)

    def spread(self, values_by_row: Tensor) -> Tensor:
        """Put each value at its token: ``[kinds, batch, seq]``."""
        size = parallel.context_group().size()
        out = torch.zeros(len(values_by_row), self._batch.input_ids.numel(), device=self._device)
        for number in range(len(self._groups)):
            lengths = self._lengths(number)
            order = torch.cat([self._rank_tokens(lengths, rank, size) for rank in range(size)])
            rows = torch.empty_like(values_by_row[:, : self.height])
            rows[..., order] = values_by_row[:, number * self.height : (number + 1) * self.height]
            for row, start, positions in self._sequence_rows(number):
                out[:, positions[1:].to(self._device)] = rows[:, row, start : start + len(positions) - 1]
        return out.view(len(values_by_row), *self._batch.input_ids.shape)

    def routed_experts(self) -> Tensor:
        """Return the recorded experts of all layers at their tokens: ``[batch, seq, layers, topk]``; collective."""
        shape = require_experts(self._models.config, "return_routed_experts")
        sizes = len(shape.layers), shape.topk
        by_row = torch.zeros(
            self.count, self.height, self.length, *sizes, dtype=torch.int32, device=self._device
        )
        for chunk in self._models.chunks:
            for layer, passes in recorded_experts(chunk):
                for number, experts in enumerate(passes):
                    own = experts.unflatten(0, (-1, self.height)).transpose(0, 1)
                    by_row[number, :, self._router_tokens(number), layer] = own.int()
        split = [parallel.pipeline_group(), parallel.context_group()]
        split += [parallel.tensor_group()] if self._models.megatron.sequence_parallel else []
        for group in split:
            if group.size() > 1:
                torch.distributed.all_reduce(by_row, group=group)  # each element is 0 on all ranks but one
        ids = self._batch.input_ids
        found = torch.full((ids.numel(), *sizes), LIVE, dtype=torch.int16, device=self._device)
        for number in range(len(self._groups)):
            for row, start, positions in self._sequence_rows(number):
                known = by_row[number, row, start : start + len(positions)]
                found[positions.to(self._device)] = known.to(torch.int16)
        return found.view(*ids.shape, *sizes)

    def _router_tokens(self, number: int) -> Tensor:
        """Return the indices in a row of the tokens that a router of this rank sees."""
        context, tensor = parallel.context_group(), parallel.tensor_group()
        own = self._rank_tokens(self._lengths(number), context.rank(), context.size())
        return own.chunk(tensor.size())[tensor.rank()] if self._models.megatron.sequence_parallel else own


def _forward_step(
    iterator: Iterator[JsonObject], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor, bool], Tensor]]:
    inputs = next(iterator)
    experts = inputs.pop("routed_experts")
    set_routed_experts(model, experts)
    output: Tensor = model(**inputs, attention_mask=None)
    require_replayed(model)

    def collect(values: Tensor, non_loss_data: bool = False) -> Tensor:
        return values

    return output, collect


@contextmanager
def _computing(models: LiveModel, tokens: int, values: TokenValues) -> Iterator[None]:
    """Make the chunk with the output layer return ``values`` of its labels, in this block."""
    chunks: list[GptModel] = [chunk for chunk in models.chunks if chunk.post_process]
    with preserved_output(chunks):
        for chunk in chunks:
            chunk._postprocess = ChunkedOutput(chunk, tokens, token_values(values, models.config.vocab_size))
        yield
