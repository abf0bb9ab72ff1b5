"""Cases of adapters: on which model, and the settings of ``peft``."""

from typing import Any

import tiny_hf

from parity import is_sparse

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SHARED = [f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
PATTERNS: dict[str, Any] = {
    "rank_pattern": {"k_proj": 2},
    "alpha_pattern": {"up_proj": 5},
    "use_rslora": True,
}

# name -> (case of reference.py, settings of LoraConfig)
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"target_modules": LINEAR, **PATTERNS}),
    "qwen2-tied-qv": ("qwen2-tied", {"target_modules": ["q_proj", "v_proj"]}),
    "llama-saved": (
        "llama",
        {"target_modules": ["up_proj", "o_proj"], "modules_to_save": ["lm_head", "model.norm"]},
    ),
    "llama-one-group": ("llama-one-group", {"target_modules": LINEAR[:4]}),
    "qwen3_moe": ("qwen3_moe", {"target_modules": LINEAR[:4], "target_parameters": STACKED}),
    # for these families peft takes the projections of shared experts by target_parameters only
    "qwen2_moe": ("qwen2_moe", {"target_modules": ["q_proj"], "target_parameters": [*SHARED, *STACKED[:1]]}),
    "qwen2_moe-bare": (
        "qwen2_moe",
        {"target_modules": ["shared_expert_gate"], "target_parameters": ["gate.weight", STACKED[1]]},
    ),
    "mixtral": ("mixtral", {"target_modules": ["o_proj"], "target_parameters": STACKED}),
    "phi3": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
    "deepseek_v3": ("deepseek_v3", {"target_modules": LATENT, "target_parameters": STACKED}),
    "glm4_moe_lite": ("glm4_moe_lite", {"target_modules": LATENT, "target_parameters": STACKED}),
    "minimax_m2": ("minimax_m2", {"target_modules": LINEAR[:4], "target_parameters": STACKED}),
    "gemma2": ("gemma2", {"target_modules": LINEAR, **PATTERNS}),
    "olmo3": ("olmo3", {"target_modules": LINEAR}),
}

DELTA = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "v_proj", "shared_expert_gate"]
PER_LAYER = ["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]
KIMI_GATES = ["f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"]
DELTA_3_5 = ["in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj", "up_proj"]
ALL: dict[str, Any] = {"target_modules": LINEAR}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    **TRAINED,
    "cwm": ("cwm", ALL),
    "deepseek_v2": ("deepseek_v2", {"target_modules": LATENT, "target_parameters": STACKED}),
    "exaone4": ("exaone4", ALL),
    "gemma3_text": ("gemma3_text", ALL),
    "glm4": ("glm4", {"target_modules": [*LINEAR[:4], "gate_up_proj", "down_proj"]}),
    "glm4_moe": ("glm4_moe", {"target_modules": LINEAR[:4], "target_parameters": STACKED}),
    "gpt_oss": ("gpt_oss", {"target_modules": LINEAR[:4], "target_parameters": STACKED}),
    "granite": ("granite", {"target_modules": [*LINEAR, "lm_head"]}),  # the model divides its logits
    "mistral": ("mistral", ALL),
    "nemotron_h": (
        "nemotron_h",
        {
            "target_modules": ["in_proj", *LINEAR[:4], "shared_experts.up_proj", "3.mixer.down_proj"],
            "target_parameters": ["mixer.experts.up_proj", "mixer.experts.down_proj"],
        },
    ),
    "olmo2": ("olmo2", ALL),
    "olmoe": ("olmoe", {"target_modules": LINEAR[:4], "target_parameters": STACKED}),
    "qwen3": ("qwen3", ALL),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {"target_modules": [*DELTA_3_5[:5], "shared_expert_gate"], "target_parameters": STACKED},
    ),
    "qwen3_5_text": ("qwen3_5_text", {"target_modules": DELTA_3_5}),
    "qwen3_next": ("qwen3_next", {"target_modules": DELTA, "target_parameters": STACKED}),
    "seed_oss": ("seed_oss", ALL),
    "smollm3": ("smollm3", ALL),
}
EXPERTS: dict[str, Any] = {"target_modules": LINEAR[:4], "target_parameters": STACKED}
FUSED_MLP: dict[str, Any] = {"target_modules": [*LINEAR[:4], "gate_up_proj", "down_proj"]}
NO_GATE: dict[str, Any] = {"target_modules": [*LINEAR[:4], "up_proj", "down_proj"]}
FUSED_QKV: dict[str, Any] = {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]}
HALVES = ["mlps.0.up_proj.weight", "mlps.1.down_proj.weight"]
BLOCK = [name.replace("mlp.", "block_sparse_moe.") for name in STACKED]
ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    **{case: (case, EXPERTS if is_sparse(case) else ALL) for case in tiny_hf.ALIKE},
    "glm": ("glm", FUSED_MLP),
    "granitemoe": ("granitemoe", {"target_modules": LINEAR[:4], "target_parameters": BLOCK}),
    "granitemoeshared": ("granitemoeshared", {"target_modules": ["o_proj", "input_linear", "output_linear"]}),
    "hy_v3": (
        "hy_v3",
        {"target_modules": ["o_proj", "shared_experts.up_proj"], "target_parameters": STACKED},
    ),
    **{case: (case, NO_GATE) for case in ("arcee", "nemotron", "jais2")},
    "starcoder2": ("starcoder2", {"target_modules": [*LINEAR[:4], "c_fc", "c_proj"]}),
    "kimi_k2": ("kimi_k2", {"target_modules": LATENT, "target_parameters": STACKED}),
    "youtu": ("youtu", {"target_modules": [*LATENT, *LINEAR[4:]]}),
    "apertus": ("apertus", NO_GATE),
    "nanochat": ("nanochat", {"target_modules": [*LINEAR[:4], "fc1", "fc2", "lm_head"]}),  # capped logits
    **{case: (case, FUSED_QKV) for case in ("persimmon", "gpt_neox", "gpt_neox-sequential")},
    **{case: (case, FUSED_QKV) for case in ("bloom", "falcon", "falcon-one-norm")},
    "phi": ("phi", {"target_modules": [*LINEAR[:3], "dense", "fc1", "fc2"]}),
    "gptj": ("gptj", {"target_modules": [*LINEAR[:3], "out_proj", "fc_in", "fc_out"]}),
    "granitemoe_swa": ("granitemoe_swa", {"target_modules": LINEAR[:4], "target_parameters": BLOCK}),
    "bamba": ("bamba", {"target_modules": ["in_proj", "out_proj", *LINEAR]}),
    "falcon_h1": ("falcon_h1", {"target_modules": ["in_proj", *LINEAR, "lm_head"]}),
    "falcon_h1-norm": ("falcon_h1-norm", {"target_modules": ["in_proj", *LINEAR]}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {"target_modules": ["in_proj", "out_proj", "q_proj", "output_linear"], "target_parameters": BLOCK},
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid-dense",
        {"target_modules": ["in_proj", "out_proj", "q_proj", "input_linear", "output_linear"]},
    ),
    **{case: (case, {"target_modules": ["c_attn", "c_fc", "c_proj"]}) for case in ("gpt2", "gpt_bigcode")},
    "gemma4_text-e2b": ("gemma4_text-e2b", {"target_modules": [*LINEAR, *PER_LAYER]}),
    "gemma4_text-experts": (
        "gemma4_text-experts",
        {
            "target_modules": [*LINEAR[:4], "mlp.up_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    ),
    "opt": ("opt", {"target_modules": [*LINEAR[:3], "out_proj", "fc1", "fc2"]}),
    "minicpm3": ("minicpm3", {"target_modules": [*LATENT, *LINEAR[4:]]}),
    # as those of shared experts: peft takes the projections of MLPs by target_parameters only
    "longcat_flash": ("longcat_flash", {"target_modules": LATENT, "target_parameters": [*STACKED, *HALVES]}),
    "olmo_hybrid": ("olmo_hybrid", {"target_modules": [*LINEAR, "a_proj", "b_proj", "g_proj"]}),
    "kimi_linear": (
        "kimi_linear",
        {
            "target_modules": [*LATENT[:1], "b_proj", *KIMI_GATES, "q_proj", "kv_b_proj", "o_proj"],
            "target_parameters": STACKED,
        },
    ),
    **{
        case: (
            case,
            {
                "target_modules": [
                    "kv_a_proj_with_mqa",
                    "b_proj",
                    "f_proj",
                    "g_proj",
                    "q_proj",
                    "kv_b_proj",
                    "o_proj",
                ],
                "target_parameters": STACKED,
            },
        )
        for case in ("bailing_hybrid", "bailing_hybrid-unbounded")
    },
    "minimax": (
        "minimax",
        {
            "target_modules": ["qkv_proj", "output_gate", "out_proj", *LINEAR[:4]],
            "target_parameters": STACKED,
        },
    ),
    "jamba": (
        "jamba",
        {
            "target_modules": ["in_proj", "x_proj", "out_proj", "q_proj", "o_proj"],
            "target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
        },
    ),
    "jamba-dense": ("jamba-dense", {"target_modules": ["in_proj", "x_proj", "out_proj", *LINEAR]}),
    "mamba": ("mamba", {"target_modules": ["in_proj", "x_proj"]}),
    "mamba2": ("mamba2", {"target_modules": ["in_proj"]}),
    "falcon_mamba": ("falcon_mamba", {"target_modules": ["in_proj", "x_proj"]}),
    "lfm2": ("lfm2", {"target_modules": ["in_proj", "out_proj", "q_proj", "w1", "w2"]}),
    "lfm3": ("lfm3", {"target_modules": ["in_proj", "out_proj", "q_proj", "g_proj", "o_proj", "w1", "w2"]}),
    "lfm3-plain": ("lfm3-plain", {"target_modules": ["in_proj", "out_proj", "q_proj", "o_proj", "w1", "w2"]}),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "target_modules": ["in_proj", "out_proj", "v_proj"],
            "target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
        },
    ),
    "llama4_text": ("llama4_text", {"target_modules": [*LINEAR[:4], "shared_expert.up_proj"]}),
    "minimax_m3_vl_text": (  # the indexer has linears of the same last names
        "minimax_m3_vl_text",
        {
            "target_modules": [
                *(f"self_attn.{name}" for name in LINEAR[:4]),
                *("shared_experts.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj"),
            ],
            "target_parameters": STACKED,
        },
    ),
}
CASES = OWN | ALIKE
