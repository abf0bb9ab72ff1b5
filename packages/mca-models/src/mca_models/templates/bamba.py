"""Bamba: HF ``BambaForCausalLM``: Mamba 2 in most layers, attention in listed layers, an MLP in all."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    SILU,
    ConfigTable,
    Fixed,
    HfConfig,
    dense_fields,
    read_rope,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens, is_mamba_layer
from mca_models.templates.parts.common import dense_mlp, embedding, head, renamed
from mca_models.templates.parts.mamba import (
    BAMBA,
    FEED_FORWARD,
    PLAIN_STEPS,
    bamba_fields,
    derive_bamba,
    mixed_layers,
    write_bamba,
)
from mca_models.weights import Param, expand_rules


def derive(hf: HfConfig) -> JsonObject:
    """Derive the layers with attention and the sizes of Mamba layers."""
    named = hf.get("attn_layer_indices") or ()
    kinds = tuple("full_attention" if i in named else "mamba" for i in range(hf["num_hidden_layers"]))
    rope = read_rope({**hf, "partial_rotary_factor": 0.5})  # transformers does not read it next to RoPE
    return {"layer_types": kinds, **rope, **derive_bamba(hf)}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    named = [layer for layer in range(values["num_layers"]) if not is_mamba_layer(values, layer)]
    return {"attn_layer_indices": named, **write_bamba(values)}


CONFIG = ConfigTable(
    fields=(*dense_fields(eps=1e-5), *bamba_fields()),
    defaults={**BAMBA, "num_key_value_heads": 8, "pad_token_id": 0},
    fixed=(
        SILU,
        NO_ATTENTION_BIAS,
        NO_MLP_BIAS,
        PLAIN_STEPS,
        Fixed("z_loss_coefficient", (0.0, None), "there is no z-loss on logits"),
    ),
    facts=(Lens(derive, write),),
    partial_rotary=True,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    mlps = expand_rules(dense_mlp(config), layers=range(config.num_layers))
    return renamed([embedding(), *mixed_layers(config), *mlps, *head(config)], FEED_FORWARD)


FAMILY = Family(model_type="bamba", architecture="BambaForCausalLM", config=CONFIG, params=params)
