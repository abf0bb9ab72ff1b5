"""Convert ``McaModelConfig`` and arguments to Megatron's ``TransformerConfig``.

Settings of execution are in `execution`, limits in `limits`.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from torch import Tensor
from torch.nn import functional

from mca_config.arguments import DistributingParallelArguments
from mca_config.arguments.options import TrainingOptions
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.megatron import features, platform
from mca_models.megatron.factory.execution import (
    grouped_experts,
    kernel_settings,
    layout_settings,
    pipeline_settings,
    precision_settings,
)
from mca_models.megatron.factory.limits import require_supported
from mca_models.megatron.factory.target import Target
from mca_models.megatron.layers.rope import attention_factor, yarn_factor, yarn_scale
from mca_models.megatron.names import Implementation
from mca_models.megatron.types import MegatronConfig, Settings

_TANH_GELU = functools.partial(functional.gelu, approximate="tanh")
_ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "xielu": functional.silu,  # replaced once the layers are built
}

_SAME_NAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "init_method_std",
    "attention_dropout",
    "hidden_dropout",
    "rotary_interleaved",
)

_SAME_NAME_MOE = (
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_apply_probs_on_input",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
)

HF_AUX_LOSS = "mca_hf_aux_loss"
"""Attribute: the load-balancing loss has HF's coefficient, and uses the softmax of the logits."""

_ENGINE_ONLY = ("fp8", "fp8_recipe", "apply_rope_fusion", "moe_permute_fusion")
"""Settings that Megatron rejects on a machine without Transformer Engine."""

_SAME_NAME_MLA = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def choose_implementation(args: DistributingParallelArguments) -> Implementation:
    """Return the layer spec to build: as set, else Transformer Engine if it is installed and there is a GPU.

    Raises:
        McaError: ``transformer_impl`` is ``transformer_engine``, which is not available.
    """
    missing = platform.engine_problem()
    if args.transformer_impl == "transformer_engine" and missing is not None:
        raise McaError(
            "transformer_impl transformer_engine needs a GPU and the package transformer-engine (mca-models[te]), but "
            f"{missing}; fix that or set transformer_impl to local"
        )
    return args.transformer_impl or ("local" if missing else "transformer_engine")


def transformer_config(
    config: McaModelConfig,
    args: DistributingParallelArguments,
    layout: ParallelLayout,
    dtype: str,
    target: Target | None = None,
) -> MegatronConfig:
    """Return Megatron's configuration of the model.

    Args:
        config: The architecture.
        args: The user's arguments.
        layout: The resolved parallel sizes.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        target: Device and implementation; None: this machine.

    Raises:
        McaError: Megatron would compute something wrongly or not at all.
    """
    target = target or Target.here(choose_implementation(args))
    overrides = _converted(args.transformer_config_overrides())
    settings = {
        **_architecture(config),
        **layout_settings(config, args, layout),
        **precision_settings(dtype),
        **kernel_settings(target.implementation),
        **features.settings(config),
        **pipeline_settings(layout, platform.megatron_version(), target.device),
        **overrides,
    }
    settings["transformer_impl"] = target.implementation
    settings["moe_grouped_gemm"] = grouped_experts(settings, target.implementation)
    require_supported(
        config,
        layout,
        settings,
        device=target.device,
        version=platform.megatron_version(),
        implementation=target.implementation,
        engine=platform.engine_version(),
        packed=isinstance(args, TrainingOptions) and args.sequence_packing,
    )
    if settings.get("fp8") and target.is_here:
        _require_fp8(settings.get("fp8_recipe") or "delayed")
    if settings.get("gradient_accumulation_fusion") and target.is_here:
        _require_accumulation()
    megatron = _with_attention_factor(_construct_for(target, config, settings), config)
    setattr(megatron, HF_AUX_LOSS, "moe_aux_loss_coeff" not in overrides)
    return megatron


def _require_accumulation() -> None:
    """Raise unless Apex is installed: Megatron's output layer has no other kernel for it."""
    if find_spec("fused_weight_gradient_mlp_cuda") is None:
        raise McaError(
            "gradient_accumulation_fusion needs NVIDIA Apex with its CUDA extensions (fused_weight_gradient_mlp_cuda) "
            "for the output layer; install it, or remove gradient_accumulation_fusion"
        )


def _require_fp8(recipe: str) -> None:
    reason = platform.fp8_problem(recipe)
    if reason is not None:
        raise McaError(
            f"fp8 with fp8_recipe {recipe} cannot run on this GPU ({reason}); use another fp8_recipe, or remove fp8"
        )


def _construct_for(target: Target, config: McaModelConfig, settings: Settings) -> MegatronConfig:
    """Construct the configuration; for a planned GPU set afterwards what Megatron checks on this machine."""
    if target.is_here:
        return _construct(config, settings)
    postponed = {name: settings[name] for name in _ENGINE_ONLY if settings.get(name)}
    megatron = _construct(config, {**settings, **dict.fromkeys(postponed)})
    for name, value in postponed.items():
        setattr(megatron, name, value)
    return megatron


def _construct(config: McaModelConfig, settings: Settings) -> MegatronConfig:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    cls: type[MegatronConfig] = MLATransformerConfig if config.mla is not None else TransformerConfig
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(name for name, value in settings.items() if name not in known and value is not None)
    if unknown:
        raise McaError(
            f"this megatron-core has no setting {', '.join(unknown)}; remove it from the arguments or install "
            "another version"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns of the default of a setting that is not set
            return cls(**{name: value for name, value in settings.items() if name in known})
    except (AssertionError, ValueError) as error:
        raise McaError(f"Megatron rejects the configuration of {config.model_type}: {error}") from error


def _architecture(config: McaModelConfig) -> Settings:
    flat = config.to_fields()
    settings: Settings = {name: flat[name] for name in _SAME_NAME}
    activation = _activation(config.mlp.hidden_act)
    settings["activation_func"] = features.scaled_activation(activation, config.mlp.mlp_multipliers)
    settings["mtp_num_layers"] = config.mtp_num_layers or None
    settings["moe_token_dispatcher_type"] = "alltoall"  # Megatron reads it without experts too
    settings |= _window(config)
    if config.moe is not None:
        settings |= {name: flat[name] for name in _SAME_NAME_MOE}
        settings["moe_layer_freq"] = [int(config.is_moe_layer(i)) for i in range(config.num_layers)]
        settings["moe_aux_loss_coeff"] = aux_loss_coefficient(config)
        settings["moe_router_dtype"] = "fp32"
    if config.mla is not None:
        settings |= {name: flat[name] for name in _SAME_NAME_MLA}
        settings |= _mla_rope(config)
    return settings


def aux_loss_coefficient(config: McaModelConfig) -> float:
    """Convert HF's coefficient of the load-balancing loss to Megatron's.

    With balanced experts HF's loss over all layers is ``topk``, Megatron's is 1 per layer.
    """
    if config.moe is None:
        return 0.0
    layers = sum(config.is_moe_layer(layer) for layer in range(config.num_layers))
    return config.moe.moe_aux_loss_coeff * config.moe.moe_router_topk / max(layers, 1)


def _activation(name: str) -> Callable[..., Tensor]:
    if name == "relu2":
        from megatron.core.activations import squared_relu

        squared: Callable[..., Tensor] = squared_relu
        return squared
    if name == "quick_gelu":  # Megatron compares with its own function
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        function: Callable[..., Tensor] = quick_gelu
        return function
    if name not in _ACTIVATIONS:
        raise McaError(
            f"hidden_act {name!r} is not supported; supported: {', '.join((*_ACTIVATIONS, 'quick_gelu', 'relu2'))}"
        )
    return _ACTIVATIONS[name]


def _window(config: McaModelConfig) -> Settings:
    """Return the sliding window: mca counts the query itself, Megatron the keys to its left."""
    if config.attention.window_size is None:
        return {}
    kinds = config.layer_types or ("sliding_attention",) * config.num_layers
    return {
        "window_size": (config.attention.window_size - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in kinds],
    }


def _mla_rope(config: McaModelConfig) -> Settings:
    rope = config.rope.rope_scaling
    settings: Settings = {
        "rotary_base": config.rope.rotary_base,
        "rotary_percent": config.rope.rotary_percent,
    }
    if rope is not None and rope["rope_type"] != "yarn" and rope.get("mscale_all_dim"):
        raise McaError(
            f"mscale_all_dim with rope_type {rope['rope_type']!r} with MLA is not supported; use yarn"
        )
    if rope is None or rope["rope_type"] != "yarn":  # `features.mla` sets RoPE of other types
        return settings | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    factor, score_scale = yarn_factor(config, rope), rope.get("mscale_all_dim") or 0.0
    return settings | {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings")
        or config.max_position_embeddings,
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": _mla_mscale(attention_factor(config), factor, score_scale),
        "mscale_all_dim": score_scale,
    }


def _mla_mscale(on_rope: float, factor: float, score_scale: float) -> float:
    """Return the ``mscale`` with which Megatron computes the factor ``on_rope`` on cosine and sine.

    It computes ``(0.1 mscale ln factor + 1) / (0.1 mscale_all_dim ln factor + 1)``; ``mscale_all_dim`` also scales the
    attention scores.
    """
    if factor > 1:
        return (on_rope * yarn_scale(factor, score_scale) - 1) / (0.1 * math.log(factor))
    if on_rope != 1.0:
        raise McaError(
            f"yarn with MLA, attention_factor {on_rope} and factor {factor} is not supported; "
            "supported: a factor above 1"
        )
    return 1.0


def _converted(overrides: Values) -> Settings:
    """Convert strings to Megatron's objects, and zero MTP layers to None."""
    from megatron.core.transformer.enums import AttnBackend

    settings = dict(overrides)
    if isinstance(settings.get("attention_backend"), str):
        settings["attention_backend"] = AttnBackend[settings["attention_backend"]]
    if settings.get("mtp_num_layers") == 0:
        settings["mtp_num_layers"] = None
    return settings


def _with_attention_factor(megatron: MegatronConfig, config: McaModelConfig) -> MegatronConfig:
    """Set yarn's factor on cosine and sine, for any value, if all layers have it.

    Megatron computes it as ``(0.1 m ln s + 1) / (0.1 a ln s + 1)`` from three attributes that its
    ``TransformerConfig`` does not declare; with s = e^10, m = factor - 1 and a = 0 that is the factor itself.
    """
    factor = attention_factor(config)
    in_all_layers = config.rope.rotary_base_local is None and config.mla is None
    if factor != 1.0 and in_all_layers:
        megatron.yarn_rotary_scaling_factor = math.exp(10)
        megatron.yarn_mscale = factor - 1
        megatron.yarn_mscale_all_dim = 0.0
    return megatron
