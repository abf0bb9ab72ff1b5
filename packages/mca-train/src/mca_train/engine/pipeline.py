"""Megatron's pipeline schedule over the chunks of a rank: forward passes, and their time. Training is in `engine`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from mca_config.types import JsonObject
from mca_models.megatron import platform
from mca_models.megatron.distributed import parallel
from mca_models.megatron.features.mtp_media import widened_length
from mca_models.megatron.features.router_replay import (
    replay_in_backward,
    require_replayed,
    routed_passes,
    set_routed_experts,
)
from mca_models.megatron.layers.attention import set_packed_lengths
from mca_models.megatron.layers.rope import length_dependent_ropes, set_longest_sequence
from mca_models.megatron.tensors import weights_dtype
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.engine.ddp_wrappers import gathered_params
from mca_train.losses import moe_aux, mtp
from mca_train.losses.moe_sequence_ids import pass_sequence_ids
from mca_train.losses.token_loss import LossFunction, StepLoss, megatron_loss, sum_micro_batches
from mca_train.types import Chunk, Upstream


class Stopwatch:
    """Sums up the time of blocks until it is read.

    On a GPU it records an event before and after each block. They are read where the host waits for the device anyway.
    Only the blocks of the last step are known there.

    Args:
        device: Where the blocks are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type != "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the block."""
        if self._on_host:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._events.append((before, after))

    def begin_step(self) -> None:
        """Discard the blocks of the step before."""
        self._events.clear()

    def read(self, steps: int) -> float:
        """Return the seconds per step and reset.

        Args:
            steps: Number of steps since the last call.
        """
        if self._on_host:
            seconds, self._seconds = self._seconds / max(steps, 1), 0.0
            return seconds
        return float(sum(before.elapsed_time(after) for before, after in self._events)) / 1000


class Pipeline:
    """Runs Megatron's schedule over the chunks of this rank.

    Args:
        chunks: One per virtual stage; Megatron models, or their DDP wrappers.
        loss: Function from the last stage's output to the loss.
        wants_logits: The output is logits instead of the cross entropy of each token.
    """

    def __init__(self, chunks: Sequence[Chunk], loss: LossFunction, *, wants_logits: bool = False) -> None:
        self.chunks = list(chunks)
        self._loss = loss
        self._wants_logits = wants_logits
        self._micro_batch_sums: list[Tensor] = []
        """Loss sum and loss count (fp64 ``[2]``) of each micro-batch done in the running step."""
        self.stopwatch: Stopwatch | None = None
        """Measures the forward passes of training steps, if set."""
        self.configs = list({id(chunk.config): chunk.config for chunk in chunks}.values())
        for config in self.configs:
            config.calculate_per_token_loss = True
        self.models = self.chunks
        self._ropes: dict[int, tuple[Chunk, ...]] = {}
        moe_aux.install_aux_losses(self.models)
        mtp.install_mtp_loss(self.models)

    def run(self, batch: StepBatch, *, forward_only: bool, loss: LossFunction | None = None) -> StepLoss:
        """Run Megatron's schedule over all micro-batches of ``batch``; collective.

        Args:
            batch: This rank's micro-batches ``[b, s / cp]``, of equal padded length ``s``.
            forward_only: Run no backward passes.
            loss: Function from the last stage's output to the loss; None: the pipeline's.

        Returns:
            This rank's sums of loss and loss counts; zeros on stages without the loss.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        parallel.activate_process_groups(self.models)
        iterators = [iter(batch.micro_batches) for _ in self.chunks]
        self._micro_batch_sums = []
        length = widened_length(
            batch.seq_length,
            self.configs[0].mtp_num_layers,
            self.configs[0].pipeline_model_parallel_size,
            has_media=batch.has_media,
        )
        with routed_passes(self.models):
            get_forward_backward_func()(
                forward_step_func=partial(
                    self._forward_step,
                    loss=loss or self._loss,
                    stopwatch=None if forward_only else self.stopwatch,
                    sends_features=length > batch.seq_length,
                ),
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(batch.micro_batches),
                seq_length=length,
                micro_batch_size=batch.micro_batch_size,
                decoder_seq_length=length,
                forward_only=forward_only,
            )
        for ropes in self._ropes.values():
            set_longest_sequence(ropes, 0)
        return self._step_loss()

    def _step_loss(self) -> StepLoss:
        """Return the sums over the micro-batches done so far."""
        return sum_micro_batches(self._micro_batch_sums, self._device)

    def evaluate(self, batch: StepBatch) -> StepLoss:
        """Return the loss of ``batch`` on this rank, without gradients."""
        with torch.no_grad():
            return self.run(batch, forward_only=True)

    @contextmanager
    def params_gathered(self) -> Iterator[None]:
        """Turn dropout off and gather all parameters, for evaluation and saving. Blocks may be nested."""
        modes = [chunk.training for chunk in self.chunks]
        with gathered_params(self.models):
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
        stopwatch: Stopwatch | None = None,
        sends_features: bool = False,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor | JsonObject, ...]]]:
        """Run one micro-batch through ``model``, as Megatron's schedule calls it.

        Returns:
            The output: on the last stage ``[b, s / cp]`` losses or ``[b, s / cp, vocab / tp]`` logits, on others hidden
            states ``[s / cp, b, h]``; and the function from the last stage's output to the loss.
        """
        on_host = next(batches)
        batch = on_host.to(self._device)
        ropes = self._length_dependent_ropes(model)
        set_longest_sequence(ropes, batch.longest)
        set_routed_experts(model, batch.routed_experts)
        with nullcontext() if stopwatch is None else stopwatch.running():
            output = model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids if batch.sections is None else batch.sections,
                attention_mask=None,
                labels=None if self._wants_logits else batch.labels,
                loss_mask=batch.loss_mask,
                padding_mask=pass_sequence_ids(batch, model),
                packed_seq_params=_packed_params(batch, on_host.cu_seqlens),
                **self._images(batch),
                **({"sends_features": True} if sends_features else {}),
            )
        require_replayed(model)
        replay_in_backward(model, batch.routed_experts, output)
        if ropes and output.requires_grad:  # recomputation runs after other micro-batches' passes
            output.register_hook(lambda gradient: set_longest_sequence(ropes, batch.longest))
        return output, megatron_loss(loss, batch, self._micro_batch_sums)

    def _length_dependent_ropes(self, model: Chunk) -> tuple[Chunk, ...]:
        """Return the chunk's rotary embeddings that depend on the sequence length."""
        if id(model) not in self._ropes:
            self._ropes[id(model)] = length_dependent_ropes(model)
        return self._ropes[id(model)]

    def _images(self, batch: MicroBatch) -> JsonObject:
        """Return a chunk's image inputs, with pixels in the weights' dtype."""
        ends: JsonObject = {} if batch.attention_ends is None else {"attention_ends": batch.attention_ends}
        if batch.feature_rows is not None:
            ends["feature_rows"] = batch.feature_rows
        if batch.images is None:
            return ends
        dtype = weights_dtype(self.chunks[0])
        images = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.images.items()}
        return {"images": images, **ends}

    @property
    def _device(self) -> torch.device:
        return platform.current_device()  # a stage may have no parameters


def _packed_params(batch: MicroBatch, on_host: Tensor | None) -> Upstream:
    """Return Megatron's ``PackedSeqParams``; None for padded sequences.

    Args:
        batch: On the device.
        on_host: Its ``cu_seqlens`` on the host, so that no layer waits for the device to read them.
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
