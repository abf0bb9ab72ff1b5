"""Random PEFT adapters on the tiny checkpoints, made and saved by peft itself."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import tiny_hf
import tiny_vision
import torch
import transformers
from merged_files import merge_to_hf
from safetensors.torch import load_file, save_file

from mca_config.model_config import McaModelConfig
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.lora import Adapter, AdapterConfig, open_adapter
from mca_models.lora.peft_directory import peft_shapes
from mca_models.lora.peft_names import complete_peft_config
from mca_models.lora.rules import rules_for_training

STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
PATTERNS: dict[str, Any] = {
    "rank_pattern": {"k_proj": 5, r"layers\.1\..*o_proj": 2},
    "alpha_pattern": {"v_proj": 7},
    "use_rslora": True,
}

# name -> (case of tiny_hf, settings of LoraConfig)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"target_modules": DENSE, **PATTERNS}),
    "qwen2-regex": ("qwen2", {"target_modules": r".*\.[02]\.self_attn\.[qv]_proj"}),
    "llama-linear": ("llama", {"target_modules": "all-linear", "exclude_modules": ["up_proj"]}),
    "llama-saved": (
        "llama",
        {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "llama-head": ("llama", {"target_modules": ["down_proj", "lm_head"]}),
    "phi-head": ("phi", {"target_modules": ["dense", "lm_head"]}),  # whose bias PEFT saves too
    "qwen3-layers": (
        "qwen3",
        {"target_modules": DENSE, "layers_to_transform": [1, 3], "layers_pattern": "layers"},
    ),
    "qwen3-norms": (
        "qwen3",
        {"target_modules": ["o_proj"], "modules_to_save": ["input_layernorm", "q_norm"]},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"target_modules": DENSE[:4], "target_parameters": STACKED, "rank_pattern": {"experts.down_proj": 2}},
    ),
    "qwen3_moe-layers": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": [STACKED[0], f"layers.0.{STACKED[1]}"]},
    ),
    "mixtral-down": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": STACKED[1:]}),
    "qwen2_moe-linear": ("qwen2_moe", {"target_modules": "all-linear"}),
    "glm4_moe-gate": (
        "glm4_moe",
        {
            "target_modules": ["o_proj"],
            "target_parameters": ["gate.weight", *STACKED],
            "alpha_pattern": {"gate": 64, r"mlp\.gate\.weight": 6},  # the second is the parameter's name
        },
    ),
    "deepseek_v3": ("deepseek_v3", {"target_modules": LATENT, "target_parameters": STACKED}),
    "deepseek_v3-no-q-lora": ("deepseek_v3-no-q-lora", {"target_modules": ["q_proj", *LATENT[2:]]}),
}


def base_model(directory: Path, dtype: str = "float32") -> Any:
    """The HF model in ``directory``."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))


def save(name: str, folder: Path, dtype: str = "float32") -> tuple[Path, Path]:
    """Writes base model and adapter of case ``name``; no tensor of the adapter is zero."""
    case, settings = CASES[name]
    sizes = {"head_dim": 4} if case.startswith("deepseek") else {}
    base = tiny_hf.save(case, folder / "base", dtype, **sizes)
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 8, "init_lora_weights": False, **settings})
    model = peft.get_peft_model(base_model(base, dtype), config)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / "adapter")
    return base, folder / "adapter"


def described(config: McaModelConfig, settings: dict[str, Any]) -> tuple[dict[str, Any], Adapter]:
    """The contents of ``adapter_config.json`` for ``settings``, and the new adapter, without values."""
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        **copy.deepcopy(settings),
    }
    complete_peft_config(document, config, ("language",))
    adapter = AdapterConfig.from_dict(document, "LoraConfig")
    return document, Adapter(config, adapter, rules_for_training(config, adapter), lambda param: None)


@dataclass(frozen=True)
class Loaded:
    """PEFT's model with a new adapter of random values.

    Args:
        model: The model.
        tensors: The adapter's.
        difference: How far its logits are from those of the merged model.
        moved: How far these are from those of the model without the adapter.
    """

    model: Any
    tensors: dict[str, torch.Tensor]
    difference: float
    moved: float


def loaded_by_peft(case: str, settings: dict[str, Any], folder: Path) -> Loaded:
    """Makes a new adapter with ``settings`` as mca saves it, and loads it with PEFT."""
    sees = case in tiny_vision.CASES
    sizes = {"head_dim": 4} if case == "deepseek_v3" else {}
    base = (tiny_vision if sees else tiny_hf).save(case, folder / "base", **sizes)
    checkpoint = open_checkpoint(base)
    document, adapter = described(checkpoint.config, settings)
    torch.manual_seed(5)
    tensors = {name: 0.1 * torch.randn(shape) for name, shape in peft_shapes(adapter).items()}
    (folder / "adapter").mkdir()
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(document))
    merge_to_hf(checkpoint, open_adapter(folder / "adapter", checkpoint.config), folder / "merged")
    kind: Any = transformers.AutoModelForMultimodalLM if sees else transformers.AutoModelForCausalLM
    merged, plain = (kind.from_pretrained(path, dtype=torch.float32) for path in (folder / "merged", base))
    right, before = logits(merged), logits(plain)
    model = peft.PeftModel.from_pretrained(plain, folder / "adapter")
    difference, moved = (float((each - right).abs().max()) for each in (logits(model), before))
    return Loaded(model, tensors, difference, moved)


def logits(model: Any) -> torch.Tensor:
    """Return the logits of a fixed batch."""
    torch.manual_seed(3)
    with torch.no_grad():
        return model(torch.randint(0, 70, (2, 12))).logits


def same_files(a: Path, b: Path) -> None:
    """Both PEFT directories hold the same tensors and the same configuration."""
    ours, theirs = load_file(a / "adapter_model.safetensors"), load_file(b / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (a, b)]
    assert configs[0] == configs[1]
