"""What a configuration says about the shapes of whole parameters."""

from collections.abc import Mapping
from functools import lru_cache

from mca_config.model_config import McaModelConfig, MlaMcaModelConfig
from mca_models.weights import Param

Shape = tuple[int, ...]


def expected_shape(param: Param, config: McaModelConfig) -> Shape | None:
    """The whole parameter's shape without vocabulary padding; None where the configuration does not say."""
    name = param.mca
    if "layers.{layer}." in name:
        name = name.partition("layers.{layer}.")[2].removeprefix("transformer_layer.")
    return _shapes(_Key(config)).get(name)


class _Key:
    """A config as a cache key: by identity, since its dicts cannot be hashed."""

    def __init__(self, config: McaModelConfig) -> None:
        self.config = config

    def __hash__(self) -> int:
        return id(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.config is self.config


@lru_cache(maxsize=8)
def _shapes(key: _Key) -> Mapping[str, Shape]:
    config = key.config
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {
        "embedding.word_embeddings.weight": (vocab, hidden),
        "output_layer.weight": (vocab, hidden),
        "decoder.final_layernorm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "pre_mlp_layernorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        **{f"{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "final_layernorm")},
        **_mlp("mlp.", "", config.ffn_hidden_size, config),
        "mlp.linear_fc1.layer_norm_weight": (hidden,),
    }
    shapes |= _latent_attention(config) if isinstance(config, MlaMcaModelConfig) else _attention(config)
    return shapes | _experts(config)


def _mlp(prefix: str, suffix: str, width: int, config: McaModelConfig) -> dict[str, Shape]:
    rows = 2 * width if config.gated_linear_unit else width
    return {
        f"{prefix}linear_fc1.weight{suffix}": (rows, config.hidden_size),
        f"{prefix}linear_fc2.weight{suffix}": (config.hidden_size, width),
    }


def _attention(config: McaModelConfig) -> dict[str, Shape]:
    if config.layer_types is not None and "linear_attention" in config.layer_types:
        return {}  # gated attention has rows of its own
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    rows = (heads + 2 * groups) * width
    return {
        "self_attention.linear_qkv.weight": (rows, config.hidden_size),
        "self_attention.linear_qkv.bias": (rows,),
        "self_attention.linear_qkv.layer_norm_weight": (config.hidden_size,),
        "self_attention.linear_proj.weight": (config.hidden_size, heads * width),
    }


def _latent_attention(config: MlaMcaModelConfig) -> dict[str, Shape]:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    query = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    shapes: dict[str, Shape] = {
        "linear_q_proj.weight": (query, hidden),
        "linear_kv_down_proj.weight": (latent + config.qk_pos_emb_head_dim, hidden),
        "linear_kv_up_proj.layer_norm_weight": (latent,),
        "linear_kv_up_proj.weight": (heads * (config.qk_head_dim + config.v_head_dim), latent),
        "linear_proj.weight": (hidden, heads * config.v_head_dim),
    }
    if config.q_lora_rank:
        shapes |= {
            "linear_q_down_proj.weight": (config.q_lora_rank, hidden),
            "linear_q_up_proj.layer_norm_weight": (config.q_lora_rank,),
            "linear_q_up_proj.weight": (query, config.q_lora_rank),
        }
    return {f"self_attention.{name}": shape for name, shape in shapes.items()}


def _experts(config: McaModelConfig) -> dict[str, Shape]:
    if config.num_moe_experts is None:
        return {}
    shapes: dict[str, Shape] = {
        "mlp.router.weight": (config.num_moe_experts, config.hidden_size),
        "mlp.router.expert_bias": (config.num_moe_experts,),
        "mlp.shared_experts.gate_weight": (1, config.hidden_size),
    }
    if config.moe_ffn_hidden_size:
        shapes |= _mlp("mlp.experts.", "{expert}", config.moe_ffn_hidden_size, config)
    if config.moe_shared_expert_intermediate_size:
        shapes |= _mlp("mlp.shared_experts.", "", config.moe_shared_expert_intermediate_size, config)
    return shapes
