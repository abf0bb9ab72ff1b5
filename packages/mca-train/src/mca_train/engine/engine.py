"""Megatron's training step on this rank: data parallelism, optimizer, and the pipeline's schedule."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.engine.ddp_wrappers import remember, unwrap, wrapper_of
from mca_train.engine.deferred_grad_sync import reduce_vision_late
from mca_train.engine.finite import telling_nan
from mca_train.engine.loss_scale import share_loss_scale
from mca_train.engine.muon_qkv import split_own_heads
from mca_train.engine.offload import rebuild_hybrids, take_weights
from mca_train.engine.param_groups import rates_of_parts
from mca_train.engine.pipeline import Pipeline
from mca_train.engine.rng import kept_rng
from mca_train.losses import moe_aux, mtp
from mca_train.losses.step_counts import ItemCount, count_step
from mca_train.losses.token_loss import LossFunction, StepLoss, num_targets
from mca_train.types import Chunk, MegatronOptimizer, TrainingArguments, Upstream, Wrapper


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did."""

    updated: bool
    """False if the step was skipped: fp16 overflowed, or it had no target."""
    grad_norm: float | None
    had_targets: bool = True
    """False if the number that the loss of the global batch is over is 0."""


def optimizer_settings(args: TrainingArguments, params_dtype: torch.dtype) -> JsonObject:
    """Megatron's ``OptimizerConfig`` from HF's names and what was given under Megatron's."""
    settings: JsonObject = {
        "optimizer": "adam",
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "adam_beta1": args.adam_beta1,
        "adam_beta2": args.adam_beta2,
        "adam_eps": args.adam_epsilon,
        "sgd_momentum": 0.0,
        "optimizer_offload_fraction": 1.0,
        "initial_loss_scale": 2.0**16,
        "store_param_remainders": False,  # of masters: in a checkpoint they are whole
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


_FIXED = ("freeze", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon")
_OF_PARTS = ("vision_learning_rate", "projector_learning_rate")
_OWN_RATES = (*_OF_PARTS, "decoupled_lr")
_LEAST = "min_lr"


def _decided(args: TrainingArguments) -> JsonObject:
    """The arguments that an engine and its optimizer are made with and do not look at again."""
    own = {name: getattr(args, name) for name in (*_FIXED, *_OF_PARTS)}
    given = own | args.optimizer_config_overrides() | args.ddp_config_overrides()
    return {name: value for name, value in given.items() if name != _LEAST}


def _like_the_rest(args: TrainingArguments) -> list[str]:
    """The rates of parts that are those of all the rest."""
    return [name for name in _OWN_RATES if getattr(args, name) == args.learning_rate]


def _following(args: TrainingArguments, parts: Sequence[JsonObject]) -> dict[str, list[int]]:
    """The places of groups whose highest and whose least rate are the run's, of which a later one may be given."""
    own = {"max_lr": args.learning_rate, "min_lr": args.min_lr}
    following = {
        name: [place for place, group in enumerate(parts) if group.get(name) == value]
        for name, value in own.items()
    }
    if args.decoupled_min_lr is not None and args.decoupled_lr != args.learning_rate:
        following["min_lr"] = [
            place for place in following["min_lr"] if parts[place]["max_lr"] != args.decoupled_lr
        ]
    return following


def _none(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The loss of a pass that is made for something else."""
    return output.new_zeros(()), batch.loss_mask.new_zeros(())


class Engine(Pipeline):
    """A pipeline that is trained: wrapped for data parallelism, with Megatron's optimizer.

    Args:
        chunks: Megatron models of this rank, one per virtual stage.
        args: Training arguments.
        loss: What the last stage makes of its output.
        wants_logits: The output is logits instead of the cross entropy of each token.
        num_items: The number that ``loss`` returns for a micro-batch.
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
        # Megatron's split optimizer looks at .grad of its views of the parameters, on purpose
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        self._args = args
        self._num_items = num_items
        self.weighed_by: list[float] = []
        """For each step since the last log, what losses beside the model's own take for the number that its is over."""
        self._number: Tensor | None = None  # that the loss of the last step is over, on all ranks
        self._balances_globally = moe_aux.balances_globally(self.configs[0])
        self.params_dtype: torch.dtype = self.configs[0].params_dtype
        self.chunks = self._wrap(chunks)
        self.optimizer = self._build_optimizer()
        self.optimizer_name = args.optimizer or "adam"
        self._decided = _decided(args)
        self._trained = self._trains()
        self._shared = _like_the_rest(args)
        self._following = _following(args, self.optimizer.param_groups)
        self._wire()
        for chunk in self.chunks:
            chunk.train()

    def _wrap(self, chunks: Sequence[Chunk]) -> list[Wrapper]:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        half = self.params_dtype != torch.float32
        settings = {"grad_reduce_in_fp32": half} | self._args.ddp_config_overrides()
        config = DistributedDataParallelConfig(**settings)
        unwrap(chunks)
        wrapped = [
            DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        for one, chunk in zip(wrapped, chunks, strict=True):
            remember(chunk, one)
            if self._args.overlap_grad_reduce:
                reduce_vision_late(one, chunk)
        return wrapped

    def _build_optimizer(self) -> MegatronOptimizer:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = OptimizerConfig(**optimizer_settings(self._args, self.params_dtype))
        optimizer = get_megatron_optimizer(config, self.chunks, **rates_of_parts(self._args, config))
        _leave_out_empty(optimizer)
        share_loss_scale(optimizer)
        rebuild_hybrids(optimizer)
        if self._args.optimizer == "muon":
            split_own_heads(self.chunks)
        return optimizer

    def take_rates(self, args: TrainingArguments) -> None:
        """Goes on with the rates of ``args``, which may have changed since the engine was made.

        Raises:
            McaError: What cannot be followed any more has changed too.
        """
        now = _decided(args)
        changed = [name for name in {**self._decided, **now} if now.get(name) != self._decided.get(name)]
        if changed:
            raise McaError(
                f"{', '.join(changed)} changed after the first train(), which made the optimizer; make a new trainer, "
                "or change learning_rate, min_lr and weight_decay alone"
            )
        if self._trains() != self._trained:
            raise McaError(
                "parameters were frozen or thawed after the first train(), which made the optimizer; make a new trainer"
            )
        alike = _like_the_rest(args)
        if parted := [name for name in self._shared if name not in alike]:
            raise McaError(
                f"{', '.join(parted)}: learning_rate was the same at the first train(), which made one group of both; "
                "make a new trainer to train them at different rates"
            )
        own_end = args.decoupled_min_lr not in (None, args.min_lr)
        merged = [name for name in alike if name not in self._shared]
        if merged and not (merged == ["decoupled_lr"] and own_end):
            raise McaError(
                f"{', '.join(merged)}: learning_rate is the same now, it was not at the first train(), and groups of "
                "one rate cannot be told apart in a checkpoint; make a new trainer, or choose a rate beside it"
            )
        groups = self.optimizer.param_groups
        for name, value in (("max_lr", args.learning_rate), ("min_lr", args.min_lr)):
            for place in self._following[name]:
                groups[place][name] = value

    def _trains(self) -> list[bool]:
        """Of each parameter whether it is trained."""
        return [param.requires_grad for chunk in self.chunks for param in chunk.parameters()]

    def _wire(self) -> None:
        """Gives the schedule what it calls: gradient scale, synchronisation, and the end of a step."""
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
        """Reduces the gradients, and divides them by the number that the loss is over, which need not be whole."""
        from megatron.core.distributed import finalize_model_grads

        self._number = number = groups.sum_over_data(self._added_up().targets)
        if self.configs[0].moe_router_enable_expert_bias:
            moe_aux.keep_counts(self.models, number != 0)
        finalize_model_grads(chunks, **options)
        scale = torch.where(number > 0, 1 / number, 1.0).float()
        for chunk in chunks:
            chunk.scale_gradients(scale)

    def _per_chunk(self, method: str) -> Upstream:
        calls = [getattr(chunk, method) for chunk in self.chunks]
        return calls if len(calls) > 1 else calls[0]

    def require_model(self) -> None:
        """Raises if the model trains with another engine by now, which has its gradients.

        Raises:
            McaError: It does.
        """
        if any(wrapper_of(model) is not chunk for model, chunk in zip(self.models, self.chunks, strict=True)):
            raise McaError(
                "another trainer has trained this model since, with an optimizer of its own, so this trainer cannot "
                "go on; train with one trainer, or make a new one each time"
            )

    def forward_backward(self, batch: StepBatch) -> StepLoss:
        """Gradients of all micro-batches, reduced over the ranks, and the step's loss on this rank."""
        self.require_model()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with telling_nan():
            if self.configs[0].num_moe_experts or self.configs[0].mtp_num_layers:
                self._begin_step(batch)
            return self.run(batch, forward_only=False)

    def _begin_step(self, batch: StepBatch) -> None:
        """Tells the losses beside the model's own what they are the means of."""
        counts = count_step(batch, self.configs[0].mtp_num_layers or 0, self._num_items)
        if moe_aux.has_losses(self.configs[0]) or self.configs[0].mtp_num_layers:
            self.weighed_by.append(counts.targets[0])
        moe_aux.begin_step(self.models, counts)
        mtp.begin_step(self.models, counts)
        if len(batch.micro_batches) > 1 and self._balances_globally:
            with kept_rng(), self.at_rest():
                for chunk in self.chunks:
                    chunk.train()  # experts are chosen as in training
                moe_aux.count_load(self.models, lambda: self.run(batch, forward_only=True, loss=_none))

    def optimizer_step(self) -> StepResult:
        """Clips, and updates the parameters; after a step without a target nothing moves, all ranks alike."""
        if self._number is not None and float(self._number) == 0:
            return StepResult(updated=False, grad_norm=None, had_targets=False)
        updated, grad_norm, _ = self.optimizer.step()
        return StepResult(bool(updated), None if grad_norm is None else float(grad_norm))

    def take_weights(self) -> None:
        """The optimizer goes on from the model's weights, which others than it have changed."""
        take_weights(self.optimizer)

    def share_weights(self) -> None:
        """Every rank has the weights in fp32 that others have changed in their shares of a split optimizer.

        With ``overlap_param_gather`` they arrive in the next forward pass anyway. Collective.
        """
        args = self._args
        views = args.use_distributed_optimizer and self.params_dtype == torch.float32
        for chunk in self.chunks if views and not args.overlap_param_gather else ():
            chunk.start_param_sync()


def _leave_out_empty(optimizer: MegatronOptimizer) -> None:
    """Megatron chains an optimizer without an inner one before that of experts, if only experts are trained.

    It has nothing to save, and its loss scale, which is the one that losses get, never sees an overflow.
    """
    singles = getattr(optimizer, "chained_optimizers", [])
    trained = [single for single in singles if not getattr(single, "is_stub_optimizer", False)]
    if 0 < len(trained) < len(singles):
        optimizer.chained_optimizers = trained
