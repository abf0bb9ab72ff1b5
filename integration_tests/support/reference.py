"""Tiny Hugging Face models with weights that matter, and what transformers computes with them."""

import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "mca-models" / "tests"))
import tiny_versions
from tiny_hf import ALL as FAMILY_CASES
from tiny_hf import SIZE

from cases import Case
from mca_models.megatron.features import sparse_mixer
from routing import Experts, recorded_experts

Model = tuple[str, dict[str, Any]]
"""Its type in ``config.json``, and the settings that differ from `SIZE`."""

# transformers' models are in evaluation: where ours draw experts in training, the likeliest come
patch.object(sparse_mixer, "exponential", torch.ones_like).start()

_ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 16}
ROPE_CASES: dict[str, Model] = {
    "llama-linear": ("llama", {"rope_parameters": {**_ROPE, "rope_type": "linear", "factor": 3.0}}),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {**_ROPE, "rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 16},
    ),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                **_ROPE,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
    ),
    "qwen2-yarn": (
        "qwen2",
        {"rope_parameters": {**_ROPE, "rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0}},
    ),
    "qwen3-mixed-windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "llama-one-group": ("llama", {"num_key_value_heads": 1}),
}
_LATENT_YARN = {**_ROPE, "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}


def _families() -> dict[str, Model]:
    """The families' cases; transformers takes DeepSeek's rotary size from ``head_dim``, which no file says."""
    fixed = {"deepseek_v3": {"head_dim": 4}}
    return {
        case: (kind, {**fixed.get(kind, {}), **different}) for case, (kind, different) in FAMILY_CASES.items()
    }


_COMMON: dict[str, Model] = {**_families(), **ROPE_CASES}
_COMMON["deepseek_v3-yarn"] = ("deepseek_v3", {**_COMMON["deepseek_v3"][1], "rope_parameters": _LATENT_YARN})
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
# a dict for each model: transformers writes into it
_LINEAR_FULL = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_YARN_FULL = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "attention_factor": 1.5,
        "beta_fast": 2.0,
        "original_max_position_embeddings": 16,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_VARIANTS: dict[str, Model] = {
    "phi3-short": ("phi3", {"rope_parameters": dict(_LONGROPE), "original_max_position_embeddings": 32}),
    "phi3-long": ("phi3", {"rope_parameters": dict(_LONGROPE), "original_max_position_embeddings": 16}),
    "phi3-partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "gemma3-two-ropes": (
        "gemma3_text",
        {"rope_parameters": _LINEAR_FULL, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "olmo3-yarn": ("olmo3", {"rope_parameters": _YARN_FULL}),
    "smollm3-windows": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 6},
    ),
    "deepseek_v3-choice": (
        "deepseek_v3",
        {
            "n_routed_experts": 8,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "attention_factor": 1.3,
                "mscale_all_dim": 0.7,
                "beta_fast": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "phimoe-noisy": ("phimoe", {"input_jitter_noise": 0.2}),
    # on both sides of the length of 16 from which LongRoPE takes its long factors
    "phi3-of-15": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 15}),
    "phi3-of-16": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16}),
    "minicpm3-of-16": (
        "minicpm3",
        {
            "rope_parameters": {**_LONGROPE, "short_factor": [1.0, 1.0], "long_factor": [4.0, 16.0]},
            "original_max_position_embeddings": 16,
        },
    ),
}
"""Models with other settings than one in `_COMMON`, by name: its name, and what differs."""


def _variants() -> dict[str, Model]:
    """Return the variants with the settings that they share with the other model."""
    return {
        name: (_COMMON[base][0], {**_COMMON[base][1], **different})
        for name, (base, different) in _VARIANTS.items()
    }


CASES: dict[str, Model] = {**_COMMON, **_variants()}
TWO_LAYERS = (
    *("llama-dynamic", "qwen2", "qwen3-tied", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v32"),
    *("falcon_h1-norm", "gemma3-two-ropes", "granitemoehybrid", "jamba", "lfm2", "minimax_m3_vl_text"),
    "olmo_hybrid",
)
"""Models of whose layers the first two suffice on layouts without pipeline stages.

Not those with other layers later, such as linear attention before experts, or with several routers to compare.
"""


def _first_two_layers(model: str) -> Model:
    kind, different = CASES[model]
    lists = {name: value[:2] for name, value in different.items() if name.endswith("layer_types")}
    return kind, {**different, **lists, "num_hidden_layers": 2}


CASES |= {f"{model}-two-layers": _first_two_layers(model) for model in TWO_LAYERS}


def model_for(case: Case) -> str:
    """Return the name in `CASES` of the model that ``case`` computes; with options it has all layers."""
    short = case.model in TWO_LAYERS and "pp" not in case.layout and not case.options
    return f"{case.model}-two-layers" if short else case.model


NEWEST = (
    *(
        "nemotron_h",
        "nemotron_h-latent",
        "nemotron_h-dense",
        "bamba",
        "granitemoehybrid",
        "granitemoehybrid-dense",
    ),
    *(
        "olmo_hybrid",
        "kimi_linear",
        "minicpm3",
        "longcat_flash",
        "gpt2",
        "gpt_bigcode",
        "opt",
        "bloom",
        "gemma4_text",
    ),
    *(
        "gemma4_text-e2b",
        "gemma4_text-experts",
        "deepseek_v32",
        "glm_moe_dsa",
        "mimo_v2_flash",
        "llama4_text",
        "minimax_m3_vl_text",
        "qwen3_5_moe_text",
    ),
)
"""Models with parts that few others have: states, learned positions or ALiBi, experts next to an MLP, an indexer."""
DENSE = ("llama", "mistral", "qwen2", "qwen3", "seed_oss")
MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3")
DENSE_CASES = tuple(case for case, (kind, _) in _COMMON.items() if kind in DENSE)
MOE_CASES = tuple(case for case, (kind, _) in _COMMON.items() if kind in MOE)


@dataclass(frozen=True)
class Reference:
    """A checkpoint directory and the logits that belong to it.

    Args:
        model: Its name in ``CASES``.
        path: The directory that transformers saved.
        input_ids: ``[batch, seq]``.
        logits: fp32 ``[batch, seq, vocab]``.
        experts: Where each token is sent.
    """

    model: str
    path: Path
    input_ids: torch.Tensor
    logits: torch.Tensor
    experts: Experts = field(default_factory=dict)


SCALES = ("norm", ".ln_", "layer_scalar")
"""In names of tensors that multiply: near 1 they change what they should, and not all else."""


@cache
def hf_model(case: str, **sizes: int) -> Any:
    """The model of ``case`` with ``sizes`` in fp32, its weights random and far from their initial ones."""
    model_type, different = CASES[case]
    tiny_versions.require(model_type, different)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZE, **different, **sizes})
    generator = torch.Generator().manual_seed(len(case))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    saved = model.state_dict()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in saved:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise * 0.15 + (tensor.dim() < 2 and any(part in name for part in SCALES)))
    return model


def make_reference(
    case: str,
    folder: Path,
    dtype: str = "float32",
    batch: int = 3,
    *,
    with_graph: bool = False,
    **sizes: int,
) -> Reference:
    """Saves the model of ``case`` with ``sizes`` in ``folder`` (cast to ``dtype``); the logits are those in fp32.

    With ``with_graph`` they have a gradient.
    """
    path = folder / f"{case}-{dtype}"
    model = hf_model(case, **sizes)
    generator = torch.Generator().manual_seed(7)
    input_ids = torch.randint(0, SIZE["vocab_size"], (batch, 24), generator=generator)
    with torch.set_grad_enabled(with_graph), recorded_experts(model, batch) as experts:
        logits = model(input_ids, use_cache=False).logits
    if not path.exists():
        if dtype == "float32":
            model.save_pretrained(path)
        else:
            import copy

            copy.deepcopy(model).to(getattr(torch, dtype)).save_pretrained(path)
    return Reference(case, path, input_ids, logits, experts)
