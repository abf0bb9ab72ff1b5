"""Megatron's training step on this rank: data parallelism, optimizer, and the pipeline's schedule."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.engine.ddp_wrappers import ddp_wrapper, defer_vision_grad_sync, register_wrapper, unwrap
from mca_train.engine.finite import name_nan_gradient
from mca_train.engine.offload import reload_main_params
from mca_train.engine.optimizer import build_optimizer
from mca_train.engine.pipeline import Pipeline
from mca_train.engine.rng import preserved_rng
from mca_train.losses import moe_aux, mtp
from mca_train.losses.token_loss import ItemCount, LossFunction, StepLoss, count_step, num_targets
from mca_train.types import Chunk, TrainingArguments, Upstream, Wrapper

_FIXED = ("freeze", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon")
_PART_RATES = (
    *("vision_learning_rate", "audio_learning_rate", "projector_learning_rate"),
    *("decoupled_lr", "decoupled_min_lr"),
)
_RUN_RATES = ("learning_rate", "min_lr")


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
        """Return ``requires_grad`` of every parameter."""
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
        """Return Megatron's gradient buffers of all chunks."""
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
