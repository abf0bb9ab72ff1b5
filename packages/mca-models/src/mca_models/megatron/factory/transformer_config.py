"""Convert ``McaModelConfig`` and arguments to Megatron's ``TransformerConfig``.

Settings of execution are layout, precision, kernels and point-to-point communication. Limits are in `limits`.
"""

import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from mca_config.arguments import DistributingParallelArguments, MegatronArguments
from mca_config.arguments.megatron import TrainingOptions
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.megatron import features, platform
from mca_models.megatron.factory.limits import require_supported, waits_for_sends
from mca_models.megatron.features.feature import Setup
from mca_models.megatron.features.features import active_features
from mca_models.megatron.layers.rope import attention_factor
from mca_models.megatron.names import Implementation
from mca_models.megatron.types import MegatronConfig, Settings

_log = logging.getLogger(__name__)
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
HF_AUX_LOSS = "mca_hf_aux_loss"
"""Attribute: the load-balancing loss has HF's coefficient, and uses the softmax of the logits."""
_ENGINE_ONLY = ("fp8", "fp8_recipe", "apply_rope_fusion", "moe_permute_fusion")
"""Settings that Megatron rejects on a machine without Transformer Engine."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Device and implementation: this machine, or a GPU that a plan is for.

    Args:
        device: ``cpu`` or ``cuda``.
        implementation: Layer implementation.
        is_here: Whether it is this machine, whose kernels can be checked.
    """

    device: str
    implementation: Implementation
    is_here: bool

    @classmethod
    def here(cls, implementation: Implementation) -> "Target":
        """Return this machine."""
        return cls(device=platform.device_type(), implementation=implementation, is_here=True)

    @classmethod
    def planned(cls, implementation: Implementation) -> "Target":
        """Return a GPU that need not be in this machine."""
        return cls(device="cuda", implementation=implementation, is_here=False)


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
        Setup(
            config=config,
            features=active_features(config),
            layout=layout,
            settings=settings,
            implementation=target.implementation,
            device=target.device,
            packed=isinstance(args, TrainingOptions) and args.sequence_packing,
        )
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

    cls: type[MegatronConfig] = MLATransformerConfig if "kv_lora_rank" in settings else TransformerConfig
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
    """Return settings of all models; those of features are in `features`."""
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "init_method_std": config.init_method_std,
        "hidden_dropout": config.block.hidden_dropout,
        "moe_token_dispatcher_type": "alltoall",  # Megatron reads it without experts too
    }


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
    in_all_layers = config.rope.rotary_base_local is None and not megatron.multi_latent_attention
    if factor != 1.0 and in_all_layers:
        megatron.yarn_rotary_scaling_factor = math.exp(10)
        megatron.yarn_mscale = factor - 1
        megatron.yarn_mscale_all_dim = 0.0
    return megatron


def _needs_sequence_parallel(
    config: McaModelConfig, args: DistributingParallelArguments
) -> tuple[str | None, bool]:
    """Return the part of the model that needs sequence parallelism at tp > 1, and whether Megatron insists on it."""
    for feature in active_features(config):
        if feature.sequence_parallel == "trained" and isinstance(args, MegatronArguments):
            return f"training a model with {feature.name}", True
        if feature.sequence_parallel == "always":
            return feature.name, False
    return None, False


def layout_settings(
    config: McaModelConfig, args: DistributingParallelArguments, layout: ParallelLayout
) -> Settings:
    """Return the parallel sizes; turn sequence parallelism on if the model needs it.

    Raises:
        McaError: ``sequence_parallel`` is off although the model needs it.
    """
    sequence_parallel = args.sequence_parallel_for(layout)
    why, required = _needs_sequence_parallel(config, args)
    if layout.tp == 1 or sequence_parallel:
        why = None
    if why and args.sequence_parallel is None:
        _log_once(f"sequence_parallel is on: {why} on several tensor ranks needs it")
        sequence_parallel = True
    elif why and required:
        raise McaError(
            f"sequence_parallel cannot be off: {why} on several tensor ranks needs it (Megatron rejects it "
            "otherwise); remove sequence_parallel"
        )
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline_model_parallel_size,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": sequence_parallel,
        "num_layers_in_first_pipeline_stage": layout.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": layout.num_layers_in_last_pipeline_stage,
        "account_for_embedding_in_pipeline_split": layout.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": layout.account_for_loss_in_pipeline_split,
        "pipeline_model_parallel_layout": layout.pipeline_model_parallel_layout,
    }


def precision_settings(dtype: str) -> Settings:
    """Return the dtypes of parameters and of point-to-point communication."""
    return {
        "params_dtype": DTYPES[dtype],
        "pipeline_dtype": DTYPES[dtype],
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
    }


def kernel_settings(implementation: Implementation) -> Settings:
    """Return the fusions, which need CUDA kernels; weights are always filled by mca, from a file or a seed."""
    fused = implementation == "transformer_engine"
    return {
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "apply_rope_fusion": False,
        "persist_layer_norm": fused,
        "attention_softmax_in_fp32": True,
    }


def pipeline_settings(layout: ParallelLayout, version: tuple[int, ...], device: str) -> Settings:
    """Return the settings of point-to-point communication between pipeline stages.

    With virtual pipelining sends overlap, because batched ones give wrong numbers. Outputs are freed after sending only
    on CUDA, as gloo reads them later, and only where Megatron waits for its sends.
    """
    interleaved = layout.vpp > 1
    frees = device == "cuda" and waits_for_sends(layout, version)
    return {
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": layout.pp > 1 and frees,
    }


def grouped_experts(settings: Settings, implementation: Implementation) -> bool:
    """Return whether experts use grouped GEMM: with Transformer Engine unless turned off, never locally."""
    requested = settings.get("moe_grouped_gemm")
    if implementation == "local":
        if requested and settings.get("num_moe_experts"):
            _log_once("moe_grouped_gemm is off: the local layers run experts one after the other")
        return False
    return requested is not False


@functools.cache
def _log_once(line: str) -> None:
    """Log ``line`` once: a configuration is made for checks, and again for the model."""
    _log.info(line)
