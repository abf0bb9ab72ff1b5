"""Configuration of the engine ``mca``: verl's ``engine=mca``, or ``actor.engine`` and ``ref.engine``."""

from dataclasses import dataclass, field, fields

from verl.workers.config import ActorConfig, CriticConfig, EngineConfig

from mca_config.arguments.distributing import LAYOUT_FIELDS
from mca_config.errors import McaError
from mca_config.types import JsonObject

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class McaEngineConfig(EngineConfig):  # type: ignore[misc]
    """Layout, dtype and further arguments of a model that verl trains with mca.

    Args:
        strategy: ``mca``.
        dtype: Dtype of the weights; the optimizer's main parameters are fp32.
        tensor_model_parallel_size: Ranks that share each weight matrix.
        pipeline_model_parallel_size: Ranks that share the layers.
        virtual_pipeline_model_parallel_size: Model chunks on each pipeline rank.
        context_parallel_size: Ranks that share each sequence.
        expert_model_parallel_size: Ranks that share the experts of each layer.
        expert_tensor_parallel_size: Ranks that share each expert's matrices; None: the tensor size.
        sequence_parallel: None: on if tensor and expert sizes are both above 1.
        use_distributed_optimizer: Shard the optimizer state over data-parallel ranks.
        loss_chunk_size: Number of tokens whose logits exist at a time.
        arguments: Further arguments of ``mca_config.TrainingArguments`` by name.
    """

    strategy: str = "mca"
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool | None = None
    use_distributed_optimizer: bool = True
    loss_chunk_size: int = 1024
    arguments: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy != "mca":
            raise McaError(f"engine.strategy is {self.strategy!r}; McaEngineConfig is for 'mca'")
        if self.dtype not in DTYPES:
            raise McaError(f"engine.dtype is {self.dtype!r}; expected one of {', '.join(DTYPES)}")
        if self.param_offload and self.arguments.get("fp8_param"):
            raise McaError(
                "engine.param_offload is not supported with arguments.fp8_param; set one of them to false"
            )
        if self.full_determinism:
            raise McaError(
                "engine.full_determinism is not supported by mca; set it to false, and "
                "arguments.deterministic_mode to true"
            )
        if self.router_replay.mode == "R2" and self.forward_only:
            raise McaError(
                "engine.router_replay.mode is 'R2' for a model that is not trained, such as the reference, whose "
                "log-probabilities need no recorded experts; set it to disabled"
            )
        for name in ("record_file", "replay_file"):
            if getattr(self.router_replay, name) is not None:
                raise McaError(
                    f"engine.router_replay.{name} is not supported by mca; remove it (the experts come with the batch)"
                )
        own = {each.name for each in fields(self)}
        if twice := sorted(own & set(self.arguments)):
            raise McaError(f"engine.arguments has {', '.join(twice)}; set engine.{twice[0]} instead")

    def layout_arguments(self) -> JsonObject:
        """Return the sizes of the layout under the names of ``mca_config``'s arguments."""
        return {name: getattr(self, name) for name in LAYOUT_FIELDS if hasattr(self, name)}


@dataclass
class McaActorConfig(ActorConfig):  # type: ignore[misc]
    """Actor, or reference model, of verl's PPO trainer on the engine mca.

    Args:
        strategy: ``mca``.
        engine: The engine's configuration.
        use_rollout_log_probs: Take the rollout's log-probabilities as those of the old policy.
    """

    strategy: str = "mca"
    engine: McaEngineConfig = field(default_factory=McaEngineConfig)
    use_rollout_log_probs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        ignored = {
            "freeze_vision_tower": (
                self.freeze_vision_tower,
                "set actor.engine.arguments.freeze to [vision]",
            ),
            "use_prefix_grouper": (self.use_prefix_grouper, "set it to false"),
            "qat.enable": (self.qat.get("enable"), "set it to false"),
        }
        for name, (value, remedy) in ignored.items():
            if value:
                raise McaError(f"actor.{name} is {value!r}, which the engine mca does not support; {remedy}")


@dataclass
class McaCriticConfig(CriticConfig):  # type: ignore[misc]
    """Critic of verl's PPO trainer on the engine mca.

    Args:
        strategy: ``mca``.
        engine: The engine's configuration.
    """

    strategy: str = "mca"
    engine: McaEngineConfig = field(default_factory=McaEngineConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (mode := self.engine.router_replay.mode) != "disabled":
            raise McaError(
                f"critic.engine.router_replay.mode is {mode!r}, but the experts of verl's batches are the actor's; set "
                "it to disabled"
            )
