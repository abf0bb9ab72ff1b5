"""Classes of model types that transformers has as remote code alone, and what its own lack to be made from sizes."""

import transformers
from transformers import conversion_mapping
from transformers.models.auto import modeling_auto


class KimiK2Config(transformers.DeepseekV3Config):  # type: ignore[misc]
    """transformers has the architecture, not the type."""

    model_type = "kimi_k2"


class KimiK2ForCausalLM(transformers.DeepseekV3ForCausalLM):  # type: ignore[misc]
    """DeepSeek's model of that type."""

    config_class = KimiK2Config


class MiMoConfig(transformers.Qwen2Config):  # type: ignore[misc]
    """transformers has the architecture, but for MTP layers."""

    model_type = "mimo"


class MiMoForCausalLM(transformers.Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen 2 of that type."""

    config_class = MiMoConfig


def register() -> None:
    """Makes ``for_model`` and the Auto classes of transformers know them."""
    # it has a property of that name, which no size can be given for
    transformers.FalconConfig.head_dim = property(
        lambda self: self.hidden_size // self.num_attention_heads, lambda self, size: None
    )
    # it has this one among those with images only
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["mistral4"] = "Mistral4ForCausalLM"
    transformers.AutoConfig.register("kimi_k2", KimiK2Config)
    transformers.AutoModelForCausalLM.register(KimiK2Config, KimiK2ForCausalLM)
    transformers.AutoConfig.register("mimo", MiMoConfig)
    transformers.AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
    conversion_mapping.register_checkpoint_conversion_mapping(
        "kimi_k2", conversion_mapping.get_checkpoint_conversion_mapping("deepseek_v3")
    )
