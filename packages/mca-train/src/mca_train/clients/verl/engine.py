"""Engines ``mca`` of verl: the methods of ``BaseEngine`` over mca's model, training step and checkpoints.

`McaEngine` is for language models, `McaValueEngine` for critics, which have one value per token.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup
from verl.utils import tensordict_utils
from verl.utils.device import get_torch_device
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.base import BaseEngineCtx
from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_models.megatron.features.router_replay import routed_passes
from mca_train import groups
from mca_train.batching.micro_batch import StepBatch
from mca_train.batching.packing import ROUTED_EXPERTS
from mca_train.clients.verl.adapters import base_weights, rollout_config, with_adapter
from mca_train.clients.verl.arguments import training_arguments
from mca_train.clients.verl.batches import (
    VerlMicroBatch,
    flat_outputs,
    nested_values,
    step_batch,
    step_collator,
    token_values,
)
from mca_train.clients.verl.checkpoints import VerlCheckpoints, require_supported_checkpoints
from mca_train.clients.verl.delta import Shard, WeightDelta
from mca_train.clients.verl.engine_config import McaEngineConfig
from mca_train.clients.verl.offload import EngineOffload
from mca_train.clients.verl.router_replay import batch_experts, recorded_routing
from mca_train.engine.engine import Engine, Pipeline
from mca_train.engine.optimizer import select_trained_parts
from mca_train.engine.rng import seed_dropout
from mca_train.losses.loss_inputs import chunk_losses
from mca_train.types import MegatronOptimizer, Upstream, VirtualModels

T = TypeVar("T")
LossFunction = Callable[..., tuple[Tensor, dict[str, Upstream]]]


@EngineRegistry.register(model_type="language_model", backend=["mca"], device=["cuda", "cpu"])
class McaEngine(BaseEngine):  # type: ignore[misc]
    """Language model that verl trains, or computes log-probabilities with, on mca's layouts.

    Args:
        model_config: verl's configuration of the model.
        engine_config: Configuration of this engine.
        optimizer_config: verl's configuration of Megatron's optimizer (``optim=megatron``).
        checkpoint_config: Contents of checkpoints.
    """

    _wants_logits = False
    """The pipeline returns the head's output instead of values computed from it."""

    def __init__(
        self,
        model_config: Upstream,
        engine_config: McaEngineConfig,
        optimizer_config: Upstream,
        checkpoint_config: Upstream,
    ) -> None:
        from mca_models.megatron.distributed import parallel

        super().__init__()
        if not isinstance(engine_config, McaEngineConfig):
            raise McaError(f"the engine's configuration is {type(engine_config).__name__}; add engine=mca")
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self._trains = not engine_config.forward_only
        if self._trains:
            require_supported_checkpoints(checkpoint_config)
        self.args = training_arguments(
            model_config, engine_config, optimizer_config if self._trains else None
        )
        parallel.start(self.args.layout(), engine_config.seed)
        self.ranks = groups.current_ranks(self.args.layout())
        self.mode: str | None = None
        self._models: VirtualModels | None = None
        self._pipeline: Pipeline | None = None
        self._loss_function: LossFunction | None = None
        self._outputs: list[dict[str, Upstream]] = []
        self._has_gradients = False
        """The gradient buffers have gradients since `optimizer_zero_grad`."""
        self._has_recorded = False
        """A pass has recorded experts (router replay R2)."""
        self._delta: WeightDelta | None = None
        self._offload: EngineOffload | None = None

    def initialize(self) -> None:
        """Load the model, and build optimizer and learning-rate schedule if it is trained; collective."""
        self._build()
        assert self._pipeline is not None
        optimizer = self._engine.optimizer if self._trains else None
        self._offload = EngineOffload(self._pipeline, optimizer, get_torch_device())
        self._return_to_host()

    def _return_to_host(self) -> None:
        """Offload what verl's configuration says."""
        params = self.is_param_offload_enabled
        self.to("cpu", model=params, optimizer=self.is_optimizer_offload_enabled, grad=params)

    def _build(self) -> None:
        args = self.args
        self._base = self._load()
        models = with_adapter(self._base, self.model_config, args.seed)
        seed_dropout(models, args.seed)
        self._models, self._delta, self._has_gradients = models, None, False
        self._collator = step_collator(
            models,
            self.ranks,
            packed=self.engine_config.use_remove_padding,
            pad_token_id=getattr(self.model_config.tokenizer, "pad_token_id", None) or 0,
        )
        if not self._trains:
            self._pipeline = Pipeline(list(models.chunks), self._loss, wants_logits=self._wants_logits)
            return
        select_trained_parts(models, args)
        self._pipeline = Engine(
            list(models.chunks),
            args,
            self._loss,
            wants_logits=self._wants_logits,
            num_items=self._num_items,
        )
        self._schedule = self._new_schedule()
        self._checkpoints = VerlCheckpoints(
            models,
            self._engine,
            self._schedule,
            args,
            self.ranks,
            self.checkpoint_config,
            self.model_config.get_processor(),
        )

    def _load(self) -> VirtualModels:
        """Return the model without an adapter; collective."""
        from mca_models import AutoModel

        return AutoModel.from_pretrained(
            self.model_config.local_path, self.args, dtype=self.engine_config.dtype, seed=self.args.seed
        )

    def _new_schedule(self) -> Upstream:
        from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler

        return get_megatron_optimizer_param_scheduler(self._engine.optimizer, self.optimizer_config)

    @property
    def models(self) -> VirtualModels:
        """Return the model.

        Raises:
            McaError: `initialize` was not called.
        """
        if self._models is None:
            raise McaError("the engine has no model yet; call initialize() first")
        return self._models

    @property
    def _engine(self) -> Engine:
        if not isinstance(self._pipeline, Engine):
            raise McaError(
                "the engine trains no model; call initialize(), and set engine.forward_only to false"
            )
        return self._pipeline

    @property
    def optimizer(self) -> MegatronOptimizer:
        """Return Megatron's optimizer.

        Raises:
            McaError: The model is not trained.
        """
        return self._engine.optimizer

    @property
    def is_param_offload_enabled(self) -> bool:
        """Return whether parameters and gradients are in host memory while they are not used."""
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Return whether optimizer states are in host memory while they are not used."""
        return bool(self.engine_config.optimizer_offload and self._trains)

    def train_mode(self, **options: Upstream) -> BaseEngineCtx:
        """Return a context in which the model trains."""
        return _Mode(self, "train", **options)

    def eval_mode(self, **options: Upstream) -> BaseEngineCtx:
        """Return a context in which the model is evaluated."""
        return _Mode(self, "eval", **options)

    def optimizer_zero_grad(self) -> None:
        """Set all gradients to zero."""
        self._reload(grad=True)
        for chunk in self._engine.chunks:
            chunk.zero_grad_buffer()
        self._engine.optimizer.zero_grad()
        self._has_gradients = False

    def optimizer_step(self) -> float:
        """Clip the gradients, update the parameters, and return the gradients' norm before clipping."""
        self._reload(model=True, optimizer=True, grad=True)
        result = self._engine.optimizer_step()
        return float("nan") if result.grad_norm is None else result.grad_norm

    def lr_scheduler_step(self) -> float:
        """Advance the learning-rate schedule and return the new rate."""
        from verl.utils.megatron.optimizer import get_megatron_last_lr

        self._schedule.step(1)
        return float(get_megatron_last_lr(self._engine.optimizer))

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Upstream]:
        """Compute log-probabilities and loss of this replica's batch, and the gradients unless ``forward_only``.

        Gradients are added to those since `optimizer_zero_grad`.

        Args:
            data: Sequences as nested tensors.
            loss_function: verl's function of ``model_output`` and the micro-batch; None: no loss.
            forward_only: Compute no gradients.

        Returns:
            On the last pipeline stage ``model_output``, ``loss`` of each micro-batch and ``metrics``; else empty.
        """
        self._reload(model=True, grad=not forward_only)
        self._prepare_output(data)
        micro_batches, indices = self._split(data)
        mode = self.engine_config.router_replay.mode
        records = mode == "R2" and forward_only and ROUTED_EXPERTS not in data.keys()
        self._has_recorded |= records
        if mode == "R2" and not self._has_recorded and ROUTED_EXPERTS in data.keys():
            raise McaError(
                "engine.router_replay.mode is R2, but verl's batch has the experts of the rollout; set "
                "rollout.enable_rollout_routing_replay to false, or the mode to R3"
            )
        experts = None if records or mode == "disabled" else partial(batch_experts, mode=mode)
        batch = step_batch(micro_batches, self._collator, self.ranks, self.models.config, experts)
        self._loss_function, self._outputs = loss_function, []
        if forward_only:
            self._evaluate(batch, records=records)
        else:
            self._engine.forward_backward(batch, accumulate=self._has_gradients)
            self._has_gradients = True
        outputs, self._outputs, self._loss_function = self._outputs, [], None
        if not outputs:
            return {}
        result: dict[str, Upstream] = postprocess_batch_func(output_lst=outputs, indices=indices, data=data)
        return result

    def _evaluate(self, batch: StepBatch, *, records: bool) -> None:
        """Compute the outputs of ``batch``, with the experts of its tokens if ``records``."""
        assert self._pipeline is not None
        models = self.models
        with self._pipeline.params_gathered(), routed_passes(list(models.chunks), record=records):
            self._pipeline.evaluate(batch)
            if records:
                routing = recorded_routing(models, batch.micro_batches)
                for output, experts in zip(self._outputs, routing, strict=bool(self._outputs)):
                    output["model_output"][ROUTED_EXPERTS] = experts

    def _prepare_output(self, data: TensorDict) -> None:
        """Make the model compute what verl asks for in ``data``."""
        models = self.models
        chunk_losses(
            models.chunks,
            self.args.loss_chunk_size,
            wants_logits=False,
            values=token_values(data),
            vocab_size=models.config.vocab_size,
        )

    def _model_output(self, output: Tensor, batch: VerlMicroBatch) -> dict[str, Tensor]:
        """Return verl's ``model_output`` for the model's ``output``."""
        return nested_values(output, batch)

    def _split(self, data: TensorDict) -> tuple[list[TensorDict], Upstream]:
        """Return verl's micro-batches, and the order of samples in them; all replicas have the same number."""
        group = self.get_data_parallel_group()
        layout = self.ranks.layout
        mask = data["loss_mask"]
        targets = (mask.values() if mask.is_nested else mask).sum().to(self.ranks.device)
        torch.distributed.all_reduce(targets, group=group)
        tensordict_utils.assign_non_tensor(
            data, sp_size=layout.cp, batch_num_tokens=targets.item(), dp_size=self.get_data_parallel_size()
        )
        micro_batches, indices = prepare_micro_batches(
            data=data,
            dp_group=group,
            num_batches_divided_by=self.models.megatron.microbatch_group_size_per_vp_stage
            if layout.vpp > 1
            else None,
            same_micro_num_in_dp=True,
        )
        for each in micro_batches:
            tensordict_utils.assign_non_tensor(each, num_micro_batch=len(micro_batches))
        return micro_batches, indices

    def _loss(self, output: Tensor, batch: Upstream) -> tuple[Tensor, Tensor]:
        """Return verl's loss of a micro-batch, and its part of the loss count, which is 1 on each replica.

        Dividing by the sum over replicas gives the mean of their gradients, as verl's losses expect.
        """
        model_output = self._model_output(output, batch)
        metrics: dict[str, Upstream] = {}
        loss = output.new_zeros(())
        if self._loss_function is not None:
            loss, metrics = self._loss_function(
                model_output=model_output,
                data=batch.data.to(output.device),
                dp_group=self.get_data_parallel_group(),
            )
        self._outputs.append(
            {"model_output": detach_tree(model_output), "loss": loss.detach().item(), "metrics": metrics}
        )
        return loss, self._num_items(batch)

    @staticmethod
    def _num_items(batch: Upstream) -> Tensor:
        assert isinstance(batch, VerlMicroBatch)
        return torch.tensor(batch.share, dtype=torch.float64, device=batch.input_ids.device)

    def get_data_parallel_rank(self) -> int:
        """Return the index of this model replica."""
        return self.ranks.data_parallel_rank

    def get_data_parallel_size(self) -> int:
        """Return the number of model replicas."""
        return self.ranks.data_parallel_size

    def get_data_parallel_group(self) -> ProcessGroup:
        """Return the group of the ranks with this rank's shards and other samples."""
        from megatron.core import parallel_state

        group: ProcessGroup = parallel_state.get_data_parallel_group()
        return group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether this is the rank of its replica whose outputs verl reads."""
        from megatron.core import parallel_state

        return bool(
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and self.ranks.context_parallel_rank == 0
        )

    def get_per_tensor_param(
        self, base_sync_done: bool = False, **_: Upstream
    ) -> tuple[Iterator[tuple[str, Tensor]], JsonObject | None]:
        """Return weights for the rollout under Hugging Face's names, on every rank; collective.

        With an adapter they are those of the base model or, with ``base_sync_done``, of the adapter, and the adapter's
        configuration is returned too. With ``model.lora.merge`` they are the merged weights.

        Args:
            base_sync_done: The rollout has the base model already.
        """
        models = self._peft_models
        if models is None:
            return self._gathered(self.models.export_weights), None
        if self.model_config.lora.get("merge", False):
            return self._gathered(lambda: models.export_weights(merged=True)), None
        config = rollout_config(models)
        if base_sync_done:
            return self._gathered(lambda: models.export_weights(per_expert=True)), config
        return self._gathered(lambda: base_weights(self._base, config)), config

    @property
    def _peft_models(self) -> Upstream | None:
        """Return the model if it has an adapter."""
        return self.models if self.models is not self._base else None

    def disable_adapter(self) -> AbstractContextManager[object]:
        """Return a context in which the model computes without its adapter."""
        models = self._peft_models
        adapted: AbstractContextManager[object] = (
            nullcontext() if models is None else models.disable_adapter()
        )
        return adapted

    def get_per_tensor_param_shard(self, **_: Upstream) -> tuple[Iterator[Shard], None]:
        """Return the weights in bf16 with the placement of this rank's part of each; collective."""
        return self._gathered(lambda: self._new_delta().shards(full=True)), None

    def prime_delta_snapshots(self) -> None:
        """Keep the current weights as the base of the next delta; collective."""
        assert self._pipeline is not None
        self._reload(model=True)
        self._delta = self._new_delta()
        with self._pipeline.params_gathered():
            self._delta.prime(pin=self.ranks.device.type == "cuda" and self.delta_pin_snapshots)

    def get_per_tensor_param_delta_shard(self, **_: Upstream) -> tuple[Iterator[tuple[Upstream, ...]], None]:
        """Return verl's entries of the elements that changed since `prime_delta_snapshots` or the last call.

        Raises:
            McaError: `prime_delta_snapshots` was not called.
        """
        if self._delta is None:
            raise McaError("there are no weights to compare with yet; call prime_delta_snapshots() first")
        return self._gathered(self._delta.changes), None

    def _new_delta(self) -> WeightDelta:
        if self._peft_models is not None:
            raise McaError(
                "changed elements of a model with an adapter are not supported; use another checkpoint engine than "
                "delta_sharded"
            )
        return WeightDelta(self.models)

    def _gathered(self, export: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Yield from ``export`` while all parameters are gathered."""
        assert self._pipeline is not None
        self._reload(model=True)
        with self._pipeline.params_gathered():
            yield from export()

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Upstream,
    ) -> None:
        """Write model, optimizer, schedule and random states to ``local_path``; collective.

        Args:
            local_path: The directory.
            hdfs_path: Not used: verl's trainers copy directories themselves.
            global_step: Not used: verl names the directory.
            max_ckpt_to_keep: Number of this engine's checkpoints to keep; None: all.
        """
        self._require_trained("save_checkpoint")
        assert self._offload is not None
        with self._offload.reloaded():
            self._checkpoints.save(Path(local_path), max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Upstream
    ) -> None:
        """Restore the state of `save_checkpoint`, from any layout; collective.

        Args:
            local_path: The directory.
            hdfs_path: Not used.
            del_local_after_load: Not used: mca makes no local copy.
        """
        self._require_trained("load_checkpoint")
        assert self._offload is not None
        with self._offload.reloaded():
            self._checkpoints.load(Path(local_path))

    def _require_trained(self, method: str) -> None:
        if not isinstance(self._pipeline, Engine):
            raise McaError(f"{method} needs an engine that trains; set engine.forward_only to false")

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move model, optimizer states and gradients to host memory (``cpu``) or back to the device.

        What is in host memory is also moved back when it is used. On a machine without a GPU it is a second place in
        the same memory.

        Raises:
            McaError: The device is neither the host nor the one that the model was built on.
        """
        if device not in ("cpu", self.ranks.device.type):
            raise McaError(
                f"the model is on {self.ranks.device.type}; it moves to cpu and back, not to {device}"
            )
        if self._offload is None:
            raise McaError("the engine has no model yet; call initialize() first")
        if device == "cpu":
            self._offload.offload(model=model, optimizer=optimizer, grad=grad)
        else:
            self._reload(model=model, optimizer=optimizer, grad=grad)

    def _reload(self, *, model: bool = False, optimizer: bool = False, grad: bool = False) -> None:
        if self._offload is not None:
            self._offload.reload(model=model, optimizer=optimizer, grad=grad)


class _Mode(BaseEngineCtx):  # type: ignore[misc]
    """Context of training or evaluation; gradients are zero after training."""

    def __init__(self, engine: McaEngine, mode: str, **options: Upstream) -> None:
        super().__init__(engine=engine, mode=mode, **options)

    def __enter__(self) -> None:
        super().__enter__()
        for chunk in self.engine.models.chunks:
            chunk.train(self.mode == "train")

    def __exit__(self, *error: object) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or error[0] is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(*error)


@EngineRegistry.register(model_type="value_model", backend=["mca"], device=["cuda", "cpu"])
class McaValueEngine(McaEngine):
    """Critic of verl's PPO trainer.

    The model has a token-classification head with one label. It is new, drawn from the seed, if the checkpoint has a
    language-model head. A reward model keeps its head, which has no bias.
    """

    _wants_logits = True

    def _load(self) -> VirtualModels:
        from mca_models import AutoModel, open_checkpoint
        from mca_models.templates.classification_head import Head

        path = self.model_config.local_path
        stored = open_checkpoint(path).config.head
        if stored.num_labels not in (None, 1):
            raise McaError(
                f"critic.model.path is {path}, whose head has {stored.num_labels} labels; expected a language model, "
                "or a model with one label"
            )
        head = None if stored.num_labels else Head(kind="token_classification", labels=("LABEL_0",))
        return AutoModel.from_pretrained(
            path, self.args, dtype=self.engine_config.dtype, seed=self.args.seed, head=head
        )

    def _prepare_output(self, data: TensorDict) -> None:
        """Do nothing: the model returns the values of all tokens."""

    def _model_output(self, output: Tensor, batch: VerlMicroBatch) -> dict[str, Tensor]:
        values, offsets = flat_outputs(output.float().movedim(-1, 0), batch)
        return {"values": torch.nested.nested_tensor_from_jagged(values[:, 0], offsets)}
