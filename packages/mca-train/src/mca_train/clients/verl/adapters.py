"""LoRA adapters of verl's models: made or loaded, and sent to the rollout in verl's form."""

from collections.abc import Iterator

from torch import Tensor
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import replace_lora_wrapper

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_train.config.model import peft_task
from mca_train.types import Upstream, VirtualModels


def with_adapter(models: VirtualModels, config: Upstream, seed: int) -> VirtualModels:
    """Return ``models`` with the adapter that verl's configuration of the model asks for, if any; collective.

    Args:
        models: The base model.
        config: ``verl.workers.config.HFModelConfig``.
        seed: Seed of a new adapter.
    """
    from mca_models.megatron.peft import get_peft_model, load_adapter

    if config.lora_adapter_path is not None:
        return load_adapter(models, copy_to_local(config.lora_adapter_path, use_shm=config.use_shm))
    if not config.lora_rank:
        return models
    modules = config.target_modules
    return get_peft_model(
        models,
        {
            "peft_type": "LORA",
            "task_type": peft_task(models.config),
            "r": config.lora_rank,
            "lora_alpha": config.lora_alpha,
            "target_modules": modules if isinstance(modules, str) else list(modules),
            "exclude_modules": config.exclude_modules,
            "bias": "none",
        },
        seed=seed,
    )


def require_supported_adapter(config: Upstream) -> None:
    """Raise if verl's configuration of the model has an option of LoRA that is not supported.

    Raises:
        McaError: It has.
    """
    if config.target_parameters:
        raise McaError("model.target_parameters is not supported by the engine mca; use model.target_modules")
    for name in ("rank", "adapter_path"):
        if config.lora.get(name):
            raise McaError(
                f"model.lora.{name} is an option of verl's Megatron engine; the engine mca takes model.lora_rank, "
                "lora_alpha, target_modules, exclude_modules, lora_adapter_path, and model.lora.merge"
            )
    if config.lora_adapter_path is not None and not config.lora_rank:
        raise McaError("model.lora_adapter_path needs model.lora_rank; set it to the adapter's rank")


def rollout_config(models: Upstream) -> JsonObject:
    """Return the adapter's configuration for verl's rollouts, which read enumerations and one scale, alpha / rank.

    Args:
        models: ``PeftModels``.

    Raises:
        McaError: The adapter has several ranks or alphas.
    """
    from peft import PeftType, TaskType

    scales = sorted({(pair.rank, pair.scale) for pair in models.rules.factors})
    if len(scales) > 1:
        raise McaError(
            f"rank_pattern, alpha_pattern: the adapter has the ranks and scales {scales}, and verl's rollouts have one "
            "of each for all modules; set model.lora.merge to true"
        )
    ((rank, scale),) = scales
    document = models.peft_config(per_expert=True)
    kept = ("target_modules", "exclude_modules", "lora_dropout", "bias")
    found = {name: document[name] for name in kept if name in document}
    one_scale = {
        "r": rank,
        "lora_alpha": scale * rank,
    }  # also of rsLoRA, whose use_rslora SGLang does not read
    return {"task_type": TaskType.CAUSAL_LM, "peft_type": PeftType.LORA, "bias": "none"} | one_scale | found


def base_weights(base: VirtualModels, config: JsonObject) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the base model, adapted linears under the names that they have in a rollout with LoRA.

    Args:
        base: The base model.
        config: From `rollout_config`.
    """
    from peft import LoraConfig

    adapted = LoraConfig(**{name: value for name, value in config.items() if name != "peft_type"})
    for name, tensor in base.export_weights():
        yield replace_lora_wrapper(name, adapted), tensor
