"""Norm of the output of MoE layers, before it is added to the residual."""

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.norms import add_post_norm
from mca_models.megatron.types import GptModel


def _has_norm(config: McaModelConfig) -> bool:
    return config.moe is not None and config.moe.moe_post_norm


def _add_norms(model: GptModel, config: McaModelConfig) -> None:
    for layer in model.decoder.layers:
        if config.is_moe_layer(layer.layer_number - 1):
            add_post_norm(layer.mlp, model.config)


MOE_POST_NORM = Feature(name="norm after MoE layers", enabled=_has_norm, finish=_add_norms)
