"""Megatron's pipeline schedule over the chunks of a rank, and its training step: data parallelism and optimizer."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_models.megatron import platform
from mca_models.megatron.distributed import parallel
from mca_models.megatron.features.mtp import widened_length
from mca_models.megatron.features.router_replay import (
    replay_in_backward,
    require_replayed,
    routed_passes,
    set_routed_experts,
)
from mca_models.megatron.layers.attention import set_packed_lengths
from mca_models.megatron.layers.rope import length_dependent_ropes, set_longest_sequence
from mca_models.megatron.tensors import weights_dtype
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.engine.ddp_wrappers import (
    ddp_wrapper,
    defer_vision_grad_sync,
    gathered_params,
    register_wrapper,
    unwrap,
)
from mca_train.engine.finite import name_nan_gradient
from mca_train.engine.offload import reload_main_params
from mca_train.engine.optimizer import build_optimizer
from mca_train.engine.rng import preserved_rng
from mca_train.losses import moe_aux, mtp
from mca_train.losses.token_loss import (
    ItemCount,
    LossFunction,
    StepLoss,
    count_step,
    megatron_loss,
    num_targets,
)
from mca_train.types import Chunk, TrainingArguments, Upstream, Wrapper

_FIXED = ("freeze", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon")
_PART_RATES = (
    *("vision_learning_rate", "audio_learning_rate", "projector_learning_rate"),
    *("decoupled_lr", "decoupled_min_lr"),
)
_RUN_RATES = ("learning_rate", "min_lr")


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
        """Return the sums over the micro-batches done so far; zeros on stages without the loss."""
        sums = self._micro_batch_sums or [torch.zeros(2, dtype=torch.float64, device=self._device)]
        total = torch.stack(sums).sum(0)
        return StepLoss(total[0], total[1])

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
                padding_mask=moe_aux.pass_sequence_ids(batch, model),
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


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step."""

    updated: bool
    """False if the step was skipped: fp16 overflowed, or it had no target."""
    grad_norm: float | None
    had_targets: bool = True
    """False if the loss count of the global batch is 0."""


def _fixed_arguments(args: TrainingArguments) -> JsonObject:
    """Return the arguments that are read only when the engine and its optimizer are built.

    If a part has a separate learning rate, those of the run are fixed too: equal ones share a parameter group.
    """
    values = {name: getattr(args, name) for name in (*_FIXED, *_PART_RATES)}
    values |= args.optimizer_config_overrides() | args.ddp_config_overrides()
    values |= {name: getattr(args, name) for name in _RUN_RATES}
    if all(values[name] is None for name in _PART_RATES):
        for name in _RUN_RATES:
            del values[name]
    return values


def _no_loss(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return a zero loss, for a forward pass that only counts the experts' load."""
    return output.new_zeros(()), batch.loss_mask.new_zeros(())


class Engine(Pipeline):
    """Pipeline that is trained: wrapped in Megatron's DDP, with Megatron's optimizer.

    Args:
        chunks: Megatron models of this rank, one per virtual stage.
        args: Training arguments.
        loss: Function from the last stage's output to the loss.
        wants_logits: The output is logits instead of the cross entropy of each token.
        num_items: Function that returns the count that ``loss`` is going to return for a micro-batch.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        args: TrainingArguments,
        loss: LossFunction,
        *,
        wants_logits: bool = False,
        num_items: ItemCount = num_targets,
    ) -> None:
        super().__init__(chunks, loss, wants_logits=wants_logits)
        # Megatron's distributed optimizer reads .grad of its parameter views on purpose
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        self._args = args
        self._num_items = num_items
        self.assumed_counts: list[float] = []
        """Loss count that the MoE and MTP losses of each step since the last log were scaled by."""
        self._loss_count: Tensor | None = None  # of the gradients, over all ranks
        self._needs_global_load = moe_aux.needs_global_load(self.configs[0])
        self.params_dtype: torch.dtype = self.configs[0].params_dtype
        self.chunks = self._wrap(chunks)
        self.optimizer = build_optimizer(self.chunks, args, self.params_dtype)
        self.optimizer_name = args.optimizer or "adam"
        self._fixed_arguments = _fixed_arguments(args)
        self._trained = self._requires_grad()
        self._set_schedule_callbacks()
        for chunk in self.chunks:
            chunk.train()

    def _wrap(self, chunks: Sequence[Chunk]) -> list[Wrapper]:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        settings = {"grad_reduce_in_fp32": True} | self._args.ddp_config_overrides()
        config = DistributedDataParallelConfig(**settings)
        unwrap(chunks)
        wrapped = [
            DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        for wrapper, chunk in zip(wrapped, chunks, strict=True):
            register_wrapper(chunk, wrapper)
            if self._args.overlap_grad_reduce:
                defer_vision_grad_sync(wrapper, chunk)
        return wrapped

    def update_learning_rates(self, args: TrainingArguments) -> None:
        """Use the learning rates of ``args``, which may have changed since the engine was built.

        Raises:
            McaError: An argument changed that cannot be followed any more.
        """
        current = _fixed_arguments(args)
        changed = [
            name
            for name in {**self._fixed_arguments, **current}
            if current.get(name) != self._fixed_arguments.get(name)
        ]
        if changed:
            raise McaError(
                f"{', '.join(changed)} changed after the first train(), which built the optimizer; create a new "
                f"trainer (without {', '.join(_PART_RATES)}, learning_rate and min_lr may change; weight_decay always)"
            )
        if self._requires_grad() != self._trained:
            raise McaError(
                "requires_grad of parameters changed after the first train(), which built the optimizer; create a new "
                "trainer"
            )
        if "learning_rate" not in current:
            for group in self.optimizer.param_groups:
                group["max_lr"], group["min_lr"] = args.learning_rate, args.min_lr

    def _requires_grad(self) -> list[bool]:
        return [param.requires_grad for chunk in self.chunks for param in chunk.parameters()]

    def _set_schedule_callbacks(self) -> None:
        """Set the schedule's callbacks: gradient scale, gradient and parameter synchronization, end of the step."""
        calls: JsonObject = {
            "grad_scale_func": self.optimizer.scale_loss,
            "finalize_model_grads_func": self._finalize,
        }
        if self._args.overlap_grad_reduce:
            calls["no_sync_func"] = self._per_chunk("no_sync")
            calls["grad_sync_func"] = self._per_chunk("start_grad_sync")
        if self._args.overlap_param_gather:
            calls["param_sync_func"] = self._per_chunk("start_param_sync")
        for config in self.configs:
            for name, call in calls.items():
                setattr(config, name, call)

    def _finalize(self, chunks: list[Chunk], _: Tensor | None = None, **options: Upstream) -> None:
        """Reduce the gradients and divide them by the loss count, which may be a fraction."""
        from megatron.core.distributed import finalize_model_grads

        self._loss_count = count = groups.sum_over_data(self._step_loss().targets)
        if self.configs[0].moe_router_enable_expert_bias:
            moe_aux.mask_expert_counts(self.models, count != 0)
        finalize_model_grads(chunks, **options)
        scale = torch.where(count > 0, 1 / count, 1.0).float()
        for chunk in chunks:
            chunk.scale_gradients(scale)

    def _per_chunk(self, method: str) -> Upstream:
        calls = [getattr(chunk, method) for chunk in self.chunks]
        return calls if len(calls) > 1 else calls[0]

    def require_active_engine(self) -> None:
        """Raise if another engine has wrapped the model since.

        Raises:
            McaError: The model has the gradients of another engine.
        """
        if any(
            ddp_wrapper(model) is not chunk for model, chunk in zip(self.models, self.chunks, strict=True)
        ):
            raise McaError(
                "another trainer has trained this model since with its own optimizer, so this trainer cannot "
                "continue; use one trainer, or create a new one for each train()"
            )

    def forward_backward(self, batch: StepBatch, *, accumulate: bool = False) -> StepLoss:
        """Compute the reduced gradients of all micro-batches and return the step's loss on this rank.

        Args:
            batch: The micro-batches.
            accumulate: Add the gradients to those of the last call, instead of replacing them. Biases of routers
                (``moe_router_enable_expert_bias``) are updated in each call.
        """
        self.require_active_engine()
        # Megatron reduces the whole buffer in place, and would reduce earlier gradients twice
        buffers = self._grad_buffers() if accumulate else []
        earlier_grads = [buffer.grad_data.clone() for buffer in buffers]
        earlier_count = self._loss_count if accumulate else None
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with name_nan_gradient():
            if self.configs[0].num_moe_experts or self.configs[0].mtp_num_layers:
                self._begin_step(batch)
            loss = self.run(batch, forward_only=False)
        for buffer, gradients in zip(buffers, earlier_grads, strict=True):
            buffer.grad_data.add_(gradients)
        if earlier_count is not None and self._loss_count is not None:
            self._loss_count = self._loss_count + earlier_count
        return loss

    def _grad_buffers(self) -> list[Upstream]:
        return [
            buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    def _begin_step(self, batch: StepBatch) -> None:
        """Give the MoE and MTP losses the counts that they are averaged over."""
        counts = count_step(batch, self.configs[0].mtp_num_layers or 0, self._num_items)
        if moe_aux.has_losses(self.configs[0]) or self.configs[0].mtp_num_layers:
            self.assumed_counts.append(counts.targets[0])
        moe_aux.begin_step(self.models, counts)
        mtp.begin_step(self.models, counts)
        if len(batch.micro_batches) > 1 and self._needs_global_load:
            with preserved_rng(), self.params_gathered():
                for chunk in self.chunks:
                    chunk.train()  # route as in training
                moe_aux.count_expert_load(
                    self.models, lambda: self.run(batch, forward_only=True, loss=_no_loss)
                )

    def optimizer_step(self) -> StepResult:
        """Clip the gradients and update the parameters; a step without targets updates nothing, on any rank.

        Raises:
            McaError: The loss count of the step is negative or not finite.
        """
        count = 1.0 if self._loss_count is None else float(self._loss_count)
        if not 0 <= count < math.inf:
            raise McaError(
                f"compute_loss returned counts with the sum {count:g} over the global batch; expected 0 or more: "
                "return the number of targets, or the sum of their weights"
            )
        if count == 0:
            return StepResult(updated=False, grad_norm=None, had_targets=False)
        updated, grad_norm, _ = self.optimizer.step()
        return StepResult(bool(updated), None if grad_norm is None else float(grad_norm))

    def reload_main_params(self) -> None:
        """Copy the model's weights into the optimizer's main parameters after something else has changed them."""
        reload_main_params(self.optimizer)

    def sync_params(self) -> None:
        """All-gather fp32 weights after a change to their shards in a distributed optimizer; collective.

        With ``overlap_param_gather`` the next forward pass gathers them.
        """
        args = self._args
        views = args.use_distributed_optimizer and self.params_dtype == torch.float32
        for chunk in self.chunks if views and not args.overlap_param_gather else ():
            chunk.start_param_sync()
