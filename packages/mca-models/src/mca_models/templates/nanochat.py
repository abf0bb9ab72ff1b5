"""nanochat: HF ``NanoChatForCausalLM``: norms without weights, of embeddings too; squared ReLU, capped logits."""

from mca_config.model_config import McaModelConfig
from mca_models.templates.config_table import NO_ATTENTION_BIAS, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.activations import RELU2, RELU2_MLP
from mca_models.templates.parts.common import dense_layers, renamed
from mca_models.weights import Param

CONFIG = ConfigTable(
    fields=(*dense_fields(), Field("final_logit_softcapping", "final_logit_softcapping", None)),
    defaults={"pad_token_id": 1, "final_logit_softcapping": 15.0},
    constants={
        **RELU2_MLP,
        "norm_weight": False,
        "embedding_norm": True,
        "qk_layernorm": True,
        "qk_layernorm_after_rope": True,
        "qk_layernorm_weight": False,
        "rotary_backwards": True,
    },
    fixed=(RELU2, NO_ATTENTION_BIAS),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    return renamed(dense_layers(config), {"up_proj": "fc1", "down_proj": "fc2"})


FAMILY = Family(model_type="nanochat", architecture="NanoChatForCausalLM", config=CONFIG, params=params)
