"""Reader of the flat ``mca_config.json`` of ROLL's mcore_adapter, as version 1 of mca's format.

The file is a dump of Megatron's configuration, so keys that are unrelated to the model or its layout are
ignored. Missing values come from the HF config that the file contains as a string.
"""

from mca_config.errors import McaError
from mca_config.files import parse_object
from mca_config.layout import ParallelLayout
from mca_config.types import JsonObject, Typed, Values

_SAME_NAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "init_method_std",
    "attention_dropout",
    "hidden_dropout",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_intermediate_size",
    "moe_aux_loss_coeff",
)
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def is_roll(document: Values) -> bool:
    """Return whether ``document`` is a configuration that mcore_adapter wrote."""
    return {"hf_model_type", "hf_config_json", "num_layers"} <= document.keys()


def document_from_roll(roll: Values, where: str) -> JsonObject:
    """Convert ``roll`` to the contents of a version 1 ``mca_config.json``."""
    try:
        return _document(roll, where)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise McaError(f"{where}: cannot be read as a configuration of mcore_adapter ({error})") from None


def _document(roll: Values, where: str) -> JsonObject:
    hf_config = _hf_config(roll, where)
    text = hf_config.get("text_config", hf_config)
    model = {name: roll[name] for name in _SAME_NAME if name in roll}
    if roll.get("multi_latent_attention"):
        model |= {name: roll[name] for name in _MLA if name in roll}
    model |= {
        "model_type": roll["hf_model_type"],
        "num_query_groups": roll.get("num_query_groups") or roll["num_attention_heads"],
        "vocab_size": text.get("vocab_size", roll.get("padded_vocab_size")),
        "max_position_embeddings": text.get("max_position_embeddings", roll.get("max_sequence_length")),
        "dtype": _dtype(roll),
        "gated_linear_unit": roll.get("gated_linear_unit") or roll.get("swiglu", False),
        "hidden_act": text.get("hidden_act", "silu"),
        "tie_word_embeddings": bool(roll.get("tie_embeddings_and_output_weights")),
        "rope_scaling": _rope_scaling(text),
        "window_size": _window(roll.get("window_size")),
        "layer_types": text.get("layer_types"),
        "moe_layer_freq": _moe_layer_freq(roll, where),
        "moe_shared_expert_gate": bool(
            roll.get("moe_use_shared_expert_gate") or roll.get("moe_shared_expert_gate")
        ),
        "mtp_num_layers": roll.get("mtp_num_layers") or 0,
    }
    layout = {name: roll[name] for name in ParallelLayout.__dataclass_fields__ if name in roll}
    if layout.get("expert_tensor_parallel_size") == layout.get("tensor_model_parallel_size"):
        layout["expert_tensor_parallel_size"] = None  # mcore_adapter writes the default as a number
    return {"mca_version": 1, "model": model, "layout": layout, "hf_config": hf_config}


def _hf_config(roll: Values, where: str) -> JsonObject:
    text = roll["hf_config_json"]
    if not isinstance(text, str):
        raise McaError(f"{where}: hf_config_json must hold a JSON text, not {text!r:.80}")
    return parse_object(text, f"{where}: hf_config_json")


def _dtype(roll: Values) -> str:
    if roll.get("bf16"):
        return "bfloat16"
    return "float16" if roll.get("fp16") else "float32"


def _rope_scaling(text: Values) -> JsonObject | None:
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    scaling = {key: value for key, value in scaling.items() if key != "rope_theta"}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return None if kind == "default" else scaling


def _window(window: Typed) -> int | None:
    """Convert Megatron's window, which excludes the query token, to one that includes it."""
    return None if window is None else int(window[0]) + 1


def _moe_layer_freq(roll: Values, where: str) -> list[int] | None:
    """Convert Megatron's frequency: n means experts in every n-th layer from the first, a list has 0 or 1 per layer."""
    freq = roll.get("moe_layer_freq")
    if roll.get("num_moe_experts") is None or freq in (None, 1):
        return None
    if isinstance(freq, int):
        return [int(layer % freq == 0) for layer in range(roll["num_layers"])]
    if isinstance(freq, list):
        return [int(on) for on in freq]
    raise McaError(f"{where}: moe_layer_freq must be a number or a list of 0 and 1, not {freq!r}")
