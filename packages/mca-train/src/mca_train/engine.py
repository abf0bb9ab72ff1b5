"""Megatron's training step on this rank: data parallelism, optimizer, and the pipeline's schedule."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mca_train import moe_losses, prediction_loss
from mca_train.batches import MicroBatch, StepBatch
from mca_train.losses import LossFunction, StepLoss, add_up, megatron_loss
from mca_train.moe_tokens import hand_tokens
from mca_train.numerics import telling_nan
from mca_train.optimizer_offload import settle
from mca_train.rng import kept_rng
from mca_train.step_counts import count_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did."""

    updated: bool
    """False if fp16 overflowed and the step was skipped."""
    grad_norm: float | None


def optimizer_settings(args: Any, params_dtype: torch.dtype) -> dict[str, Any]:
    """Megatron's ``OptimizerConfig`` from HF's names and what was given under Megatron's."""
    settings: dict[str, Any] = {
        "optimizer": "adam",
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "adam_beta1": args.adam_beta1,
        "adam_beta2": args.adam_beta2,
        "adam_eps": args.adam_epsilon,
        "sgd_momentum": 0.0,
        "optimizer_offload_fraction": 1.0,
        "initial_loss_scale": 2.0**16,
        "clip_grad": args.max_grad_norm or 0.0,
        "bf16": params_dtype == torch.bfloat16,
        "fp16": params_dtype == torch.float16,
        "params_dtype": params_dtype,
    }
    settings |= args.optimizer_config_overrides()
    if settings.get("decoupled_lr") == args.learning_rate:
        # the rate of all the rest: groups that differ in nothing cannot be told apart in a checkpoint
        own = settings.get("decoupled_min_lr")
        if own in (None, settings.get("min_lr")):
            del settings["decoupled_lr"]
    return settings


class Pipeline:
    """Runs Megatron's schedule over the chunks of this rank.

    Args:
        chunks: One per virtual stage; Megatron models, or those wrapped for data parallelism.
        loss: What the last stage makes of its output.
        wants_logits: The output is logits instead of the cross entropy of each token.
    """

    def __init__(self, chunks: Sequence[Any], loss: LossFunction, *, wants_logits: bool = False) -> None:
        self.chunks = list(chunks)
        self._loss = loss
        self._wants_logits = wants_logits
        self.configs = list({id(chunk.config): chunk.config for chunk in chunks}.values())
        for config in self.configs:
            config.calculate_per_token_loss = True
        self.models = self.chunks
        moe_losses.balance_experts(self.models)
        prediction_loss.predict(self.models)

    def run(self, batch: StepBatch, *, forward_only: bool, loss: LossFunction | None = None) -> StepLoss:
        """All micro-batches of ``batch``; the loss on this rank, or another ``loss``."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        iterators = [iter(batch.micro_batches) for _ in self.chunks]
        kept: list[Tensor] = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, loss=loss or self._loss),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batch.micro_batches),
            seq_length=batch.seq_length,
            micro_batch_size=batch.micro_batch_size,
            decoder_seq_length=batch.seq_length,
            forward_only=forward_only,
        )
        return add_up(kept, self._device)

    def evaluate(self, batch: StepBatch) -> StepLoss:
        """The loss of ``batch`` on this rank; nothing is trained."""
        with torch.no_grad():
            return self.run(batch, forward_only=True)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """A block in which dropout is off and all parameters are whole: for evaluation and saving."""
        modes = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        yield
        for chunk, mode in zip(self.chunks, modes, strict=True):
            chunk.train(mode)

    def _forward_step(
        self, batches: Iterator[MicroBatch], model: Any, *, loss: LossFunction
    ) -> tuple[Tensor, Any]:
        batch = next(batches).to(self._device)
        output = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            labels=None if self._wants_logits else batch.labels,
            loss_mask=batch.loss_mask,
            padding_mask=hand_tokens(batch, model),
            packed_seq_params=_packed_params(batch),
        )
        return output, megatron_loss(loss, batch)

    @property
    def _device(self) -> torch.device:
        parameter: Tensor = next(self.chunks[0].parameters())
        return parameter.device


def _none(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The loss of a pass that is made for something else."""
    return output.new_zeros(()), batch.loss_mask.new_zeros(())


def _packed_params(batch: MicroBatch) -> Any:
    """What keeps packed sequences apart; None for padded ones."""
    if batch.cu_seqlens is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


class Engine(Pipeline):
    """A pipeline that is trained: wrapped for data parallelism, with Megatron's optimizer.

    Args:
        chunks: Megatron models of this rank, one per virtual stage.
        args: Training arguments.
        loss: What the last stage makes of its output.
        wants_logits: The output is logits instead of the cross entropy of each token.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        args: Any,
        loss: LossFunction,
        *,
        wants_logits: bool = False,
    ) -> None:
        super().__init__(chunks, loss, wants_logits=wants_logits)
        # Megatron's split optimizer looks at .grad of its views of the parameters, on purpose
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        self._args = args
        self._balances_globally = moe_losses.balances_globally(chunks)
        self.params_dtype: torch.dtype = self.configs[0].params_dtype
        self.chunks = self._wrap(chunks)
        self.optimizer = self._build_optimizer()
        self._wire()
        for chunk in self.chunks:
            chunk.train()

    def _wrap(self, chunks: Sequence[Any]) -> list[Any]:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        half = self.params_dtype != torch.float32
        settings = {"grad_reduce_in_fp32": half} | self._args.ddp_config_overrides()
        config = DistributedDataParallelConfig(**settings)
        return [
            DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]

    def _build_optimizer(self) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = OptimizerConfig(**optimizer_settings(self._args, self.params_dtype))
        optimizer = get_megatron_optimizer(config, self.chunks)
        settle(optimizer)
        return optimizer

    def _wire(self) -> None:
        """Gives the schedule what it calls: gradient scale, synchronisation, and the end of a step."""
        from megatron.core.distributed import finalize_model_grads

        calls: dict[str, Any] = {
            "grad_scale_func": self.optimizer.scale_loss,
            "finalize_model_grads_func": finalize_model_grads,
        }
        if self._args.overlap_grad_reduce:
            calls["no_sync_func"] = self._per_chunk("no_sync")
            calls["grad_sync_func"] = self._per_chunk("start_grad_sync")
        if self._args.overlap_param_gather:
            calls["param_sync_func"] = self._per_chunk("start_param_sync")
        for config in self.configs:
            for name, call in calls.items():
                setattr(config, name, call)

    def _per_chunk(self, method: str) -> Any:
        calls = [getattr(chunk, method) for chunk in self.chunks]
        return calls if len(calls) > 1 else calls[0]

    def forward_backward(self, batch: StepBatch) -> StepLoss:
        """Gradients of all micro-batches, reduced over the ranks, and the step's loss on this rank."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with telling_nan():
            if self.configs[0].num_moe_experts or self.configs[0].mtp_num_layers:
                self._begin_step(batch)
            return self.run(batch, forward_only=False)

    def _begin_step(self, batch: StepBatch) -> None:
        """Tells the losses beside the model's own what they are the means of."""
        counts = count_step(batch, self.configs[0].mtp_num_layers or 0)
        moe_losses.begin_step(self.models, counts)
        prediction_loss.begin_step(self.models, counts)
        if len(batch.micro_batches) > 1 and self._balances_globally:
            with kept_rng(), self.at_rest():
                for chunk in self.chunks:
                    chunk.train()  # experts are chosen as in training
                moe_losses.count_load(self.models, lambda: self.run(batch, forward_only=True, loss=_none))

    def optimizer_step(self) -> StepResult:
        """Clips, and updates the parameters."""
        updated, grad_norm, _ = self.optimizer.step()
        return StepResult(bool(updated), None if grad_norm is None else float(grad_norm))

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """With ``overlap_param_gather``, updated parameters otherwise arrive in the next forward pass."""
        overlapping = self._args.overlap_param_gather
        for chunk in self.chunks if overlapping else ():
            chunk.disable_forward_pre_hook()
        with super().at_rest():
            yield
        for chunk in self.chunks if overlapping else ():
            chunk.enable_forward_pre_hook()
