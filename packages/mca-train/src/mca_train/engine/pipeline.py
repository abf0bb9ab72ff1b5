"""Megatron's forward pipeline schedule over the chunks of a rank, for evaluating. Training is in `engine`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from mca_config.types import JsonObject
from mca_models.megatron.distributed import parallel
from mca_models.megatron.layers.attention import set_packed_lengths
from mca_models.megatron.layers.rope import length_dependent_ropes, set_longest_sequence
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.engine.ddp_wrappers import all_gathered
from mca_train.engine.stopwatch import Stopwatch
from mca_train.losses import moe_aux, mtp
from mca_train.losses.moe_sequence_ids import hand_tokens
from mca_train.losses.token_loss import LossFunction, StepLoss, add_up, megatron_loss
from mca_train.types import Chunk, Upstream


class Pipeline:
    """Runs Megatron's schedule over the chunks of this rank.

    Args:
        chunks: One per virtual stage; Megatron models, or those wrapped for data parallelism.
        loss: What the last stage makes of its output.
        wants_logits: The output is logits instead of the cross entropy of each token.
    """

    def __init__(self, chunks: Sequence[Chunk], loss: LossFunction, *, wants_logits: bool = False) -> None:
        self.chunks = list(chunks)
        self._loss = loss
        self._wants_logits = wants_logits
        self._kept: list[Tensor] = []
        """Of each micro-batch that the running step has done: the loss's sum, and the number that it is over."""
        self.measured: Stopwatch | None = None
        """Measures the forward passes of training steps, where it is set."""
        self.configs = list({id(chunk.config): chunk.config for chunk in chunks}.values())
        for config in self.configs:
            config.calculate_per_token_loss = True
        self.models = self.chunks
        self._ropes: dict[int, tuple[Chunk, ...]] = {}
        moe_aux.balance_experts(self.models)
        mtp.predict(self.models)

    def run(self, batch: StepBatch, *, forward_only: bool, loss: LossFunction | None = None) -> StepLoss:
        """All micro-batches of ``batch``; the loss on this rank, or another ``loss``."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        parallel.activate_process_groups(self.models)
        iterators = [iter(batch.micro_batches) for _ in self.chunks]
        self._kept = []
        get_forward_backward_func()(
            forward_step_func=partial(
                self._forward_step, loss=loss or self._loss, measured=None if forward_only else self.measured
            ),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batch.micro_batches),
            seq_length=batch.seq_length,
            micro_batch_size=batch.micro_batch_size,
            decoder_seq_length=batch.seq_length,
            forward_only=forward_only,
        )
        for ropes in self._ropes.values():
            set_longest_sequence(ropes, 0)
        return self._added_up()

    def _added_up(self) -> StepLoss:
        return add_up(self._kept, self._device)

    def evaluate(self, batch: StepBatch) -> StepLoss:
        """The loss of ``batch`` on this rank; nothing is trained."""
        with torch.no_grad():
            return self.run(batch, forward_only=True)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """A block in which dropout is off and all parameters are whole: for evaluation and saving. May be nested."""
        modes = [chunk.training for chunk in self.chunks]
        with all_gathered(self.models):
            try:
                for chunk in self.chunks:
                    chunk.eval()
                yield
            finally:
                for chunk, mode in zip(self.chunks, modes, strict=True):
                    chunk.train(mode)

    def _forward_step(
        self,
        batches: Iterator[MicroBatch],
        model: Chunk,
        *,
        loss: LossFunction,
        measured: Stopwatch | None = None,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor | JsonObject, ...]]]:
        given = next(batches)
        batch = given.to(self._device)
        set_longest_sequence(ropes := self._ropes_of(model), batch.longest)
        with nullcontext() if measured is None else measured.running():
            output = model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids if batch.sections is None else batch.sections,
                attention_mask=None,
                labels=None if self._wants_logits else batch.labels,
                loss_mask=batch.loss_mask,
                padding_mask=hand_tokens(batch, model),
                packed_seq_params=_packed_params(batch, given.cu_seqlens),
                **self._images(batch),
            )
        if ropes and output.requires_grad:  # what is computed again comes after other micro-batches' passes
            output.register_hook(lambda gradient: set_longest_sequence(ropes, batch.longest))
        return output, megatron_loss(loss, batch, self._kept)

    def _ropes_of(self, model: Chunk) -> tuple[Chunk, ...]:
        """Those of a chunk that depend on the length of sequences."""
        if id(model) not in self._ropes:
            self._ropes[id(model)] = length_dependent_ropes(model)
        return self._ropes[id(model)]

    def _images(self, batch: MicroBatch) -> JsonObject:
        """What chunks take of images, on the first stage pixels in the weights' dtype."""
        ends = {} if batch.attention_ends is None else {"attention_ends": batch.attention_ends}
        if batch.images is None:
            return ends
        dtype = next(self.chunks[0].parameters()).dtype
        images = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.images.items()}
        return {"images": images, "feature_rows": batch.feature_rows, **ends}

    @property
    def _device(self) -> torch.device:
        parameter: Tensor = next(self.chunks[0].parameters())
        return parameter.device


def _packed_params(batch: MicroBatch, on_host: Tensor | None) -> Upstream:
    """What keeps packed sequences apart; None for padded ones.

    Args:
        batch: On the device.
        on_host: Its ``cu_seqlens`` before it was moved, so that no layer waits for the device to read them.
    """
    if batch.cu_seqlens is None or on_host is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    params: Upstream = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )
    set_packed_lengths(params, on_host)
    return params
