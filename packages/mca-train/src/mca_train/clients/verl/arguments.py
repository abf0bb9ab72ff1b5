"""Training arguments of mca from verl's configurations of model, engine and optimizer."""

from dataclasses import MISSING, fields

from mca_config.arguments.megatron import MegatronArguments
from mca_config.errors import McaError
from mca_config.printable import suggestion
from mca_config.training import TrainingArguments
from mca_config.types import JsonObject
from mca_train.clients.verl.adapters import require_supported_adapter
from mca_train.clients.verl.engine_config import McaEngineConfig
from mca_train.types import Upstream

_OPTIMIZER = {
    "optimizer": "optimizer",
    "lr": "learning_rate",
    "min_lr": "min_lr",
    "weight_decay": "weight_decay",
    "clip_grad": "max_grad_norm",
    "use_precision_aware_optimizer": "use_precision_aware_optimizer",
}
"""Fields of verl's ``McoreOptimizerConfig`` and the arguments that they set."""
_SCHEDULE = (
    "total_training_steps",
    "lr_warmup_steps",
    "lr_warmup_steps_ratio",
    "lr_warmup_init",
    "lr_decay_steps",
    "lr_decay_style",
    "weight_decay_incr_style",
    "lr_wsd_decay_style",
    "lr_wsd_decay_steps",
    "use_checkpoint_opt_param_scheduler",
)
"""Fields that verl's function for Megatron's scheduler reads."""
_READ = (*_OPTIMIZER, *_SCHEDULE, "betas", "grad_clip", "override_optimizer_config", "_target_")
_OVERRIDES = {"adam_eps": "adam_epsilon", "adam_beta1": "adam_beta1", "adam_beta2": "adam_beta2"}
_PROFILER = "set actor.profiler, or profiler of the SFT trainer"
_WITHOUT_EFFECT = {
    **dict.fromkeys(("profile", "profile_ranks", "profile_step_start", "profile_step_end"), _PROFILER),
    "optimizer": "set optim.optimizer",
    "min_lr": "set optim.min_lr",
    "use_precision_aware_optimizer": "set optim.use_precision_aware_optimizer",
    "sequence_packing": "set model.use_remove_padding",
    "save_hf_model": "add hf_model to checkpoint.save_contents",
    **dict.fromkeys(("async_save", "ckpt_format", "overwrite_output_dir", "peak_tflops"), "remove it"),
}
"""Arguments of ``MegatronArguments`` that verl's options decide, or that only mca's own trainer reads."""
_WEIGHTLESS = ("attn_implementation", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of ``model.override_config`` that do not concern the computation of mca's model."""


def training_arguments(
    model: Upstream, engine: McaEngineConfig, optimizer: Upstream | None
) -> TrainingArguments:
    """Return the arguments of ``mca_config`` for verl's configurations.

    Args:
        model: ``verl.workers.config.HFModelConfig``.
        engine: The engine.
        optimizer: ``verl.workers.config.McoreOptimizerConfig``; None: the model is not trained.

    Raises:
        McaError: An option is not supported.
    """
    _require_supported_model(model)
    values: JsonObject = {
        "output_dir": "verl",  # nothing is written there
        "report_to": "none",
        "seed": engine.seed,
        "bf16": engine.dtype == "bfloat16",
        "fp16": engine.dtype == "float16",
        "sequence_parallel": engine.sequence_parallel,
        "use_distributed_optimizer": engine.use_distributed_optimizer,
        "gradient_checkpointing": bool(model.enable_gradient_checkpointing) and not engine.forward_only,
        "loss_chunk_size": engine.loss_chunk_size,
        # verl makes a multiple of this number of micro-batches
        "gradient_accumulation_steps": engine.arguments.get("microbatch_group_size_per_vp_stage")
        or engine.pipeline_model_parallel_size,
        "mtp_num_layers": 0,  # verl's losses are of the next token
        "moe_aux_loss_coeff": 0.0,  # verl's engines add no router losses unless asked to
        **engine.layout_arguments(),
    }
    if hasattr(model.hf_config, "vision_config") and not model.lora_rank:
        values["freeze"] = []  # verl trains vision towers
    if optimizer is not None:
        values |= _optimizer_arguments(optimizer)
    _require_effective(engine.arguments)
    return TrainingArguments(**(values | engine.arguments))


def _require_effective(arguments: JsonObject) -> None:
    """Raise if one of ``engine.arguments`` is misspelled, or has no effect in verl."""
    every = {each.name for each in fields(TrainingArguments) if each.init}
    effective = {each.name for each in fields(MegatronArguments) if each.init} - set(_WITHOUT_EFFECT)
    for name in arguments:
        if name in effective:
            continue
        if name in every:
            remedy = _WITHOUT_EFFECT.get(name, "remove it: verl's options decide this")
            raise McaError(f"engine.arguments.{name} has no effect in verl; {remedy}")
        known_names = "see mca-train's documentation for the names"
        raise McaError(
            f"engine.arguments: unknown argument {name}{suggestion(name, sorted(effective), known_names)}"
        )


def _optimizer_arguments(optimizer: Upstream) -> JsonObject:
    if not hasattr(optimizer, "lr_decay_style"):
        raise McaError(
            f"the optimizer's configuration is {type(optimizer).__name__}; mca takes that of verl's Megatron engine: "
            "add optim=megatron"
        )
    for each in fields(optimizer):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if each.name not in _READ and getattr(optimizer, each.name) != default:
            raise McaError(
                f"optim.{each.name} is {getattr(optimizer, each.name)!r}, which mca does not support; remove it"
            )
    values = {ours: getattr(optimizer, name) for name, ours in _OPTIMIZER.items()}
    values["adam_beta1"], values["adam_beta2"] = optimizer.betas
    for name, value in (optimizer.override_optimizer_config or {}).items():
        if name not in _OVERRIDES:
            raise McaError(
                f"optim.override_optimizer_config.{name} is not supported by mca; expected "
                f"{', '.join(_OVERRIDES)}; set others under engine.arguments"
            )
        values[_OVERRIDES[name]] = value
    return values


def _require_supported_model(model: Upstream) -> None:
    """Raise if the configuration of the model has an option that mca would ignore."""
    require_supported_adapter(model)
    unsupported = {
        "model.mtp.enable": model.mtp.enable,
        "model.use_fused_kernels": model.use_fused_kernels,
        "model.use_liger": model.use_liger,
        "model.enable_activation_offload": model.enable_activation_offload,
        "model.tiled_mlp.enabled": model.tiled_mlp.get("enabled"),
    }
    for name, value in unsupported.items():
        if value:
            raise McaError(f"{name} is {value!r}, which the engine mca does not support; remove it")
    if model.hf_config_path not in (None, model.path):
        raise McaError(
            f"model.hf_config_path is {model.hf_config_path!r}, but the engine mca reads config.json of model.path; "
            "remove it"
        )
    overrides = model.override_config.get("model_config", model.override_config)
    for name in overrides:
        if name not in _WEIGHTLESS:
            raise McaError(
                f"model.override_config.{name} is not supported by the engine mca; change config.json of the model"
            )
