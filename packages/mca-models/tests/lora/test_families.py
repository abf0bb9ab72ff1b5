"""Every family's linears carry adapters: peft's files there and back in layouts, and merged."""

import json
from pathlib import Path
from typing import Any

import adapters
import peft
import pytest
import tiny_hf
import torch
import transformers
from merged_files import merge_to_hf
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from mca_config.checks import check_layout
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.lora import AdapterConfig, open_adapter, write_mca_adapter, write_peft
from mca_models.lora.peft_names import FUSING_MODEL_TYPES, exclude_unadapted, name_targets, save_head
from mca_models.lora.rules import rules_for_training
from mca_models.lora.targets import linear_targets
from mca_models.templates import FAMILIES, config_from_hf

OF_EXPERTS = {"gate_proj", "up_proj", "down_proj"}
UNADAPTED = sorted(case for case, (kind, _) in tiny_hf.ALL.items() if FAMILIES[kind].unadaptable)
ROUTERS = ("llama4_text", "phimoe")
"""Whose routers are linears that return several tensors."""

OTHERWISE_CALLED = {
    "gpt2": "wte.weight",
    "bloom": "word_embeddings.weight",
    "qwen3_5_text": "model.language_model.norm.weight",
    "qwen3_5_moe_text": "model.language_model.norm.weight",
    "kimi_linear": "model.layers.0.block_sparse_moe.gate_proj.weight",
    "gpt_neox": "embed_out.weight",
}
"""A tensor that tells a checkpoint whose names are not those of transformers' modules."""


def targets(model: Any) -> dict[str, list[str]]:
    """All linears by their last names; with stacked experts peft cannot take the names that those share."""
    names = [name for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))]
    indexed = any(".indexer." in name for name in names)  # whose linears may be called like others
    words = -2 if indexed else -1
    linears = {".".join(name.split(".")[words:]) for name in names if ".indexer." not in name}
    stacked = {
        ".".join(name.split(".")[-3:])
        for name, _ in model.named_parameters()
        if name.endswith(("experts.gate_up_proj", "experts.up_proj", "experts.down_proj"))
        and "feed_forward" not in name  # Llama 4's lie turned, which peft is not reported
    }
    without = {"lm_head", *FAMILIES[model.config.model_type].unadaptable, *(OF_EXPERTS if stacked else ())}
    linears = {name for name in linears if name.rpartition(".")[2] not in without}
    return {"target_modules": sorted(linears), "target_parameters": sorted(stacked)}


@pytest.mark.cases(28, always=["sarvam_moe"])  # one tensor in files for q, k and v, of different sizes
@pytest.mark.parametrize("case", sorted(tiny_hf.ALL))
def test_every_linear_of_every_family(case: str, tmp_path: Path) -> None:
    base = tiny_hf.save(case, tmp_path / "base")
    model = adapters.base_model(base)
    lora = peft.get_peft_model(model, peft.LoraConfig(r=3, init_lora_weights=False, **targets(model)))
    lora.save_pretrained(tmp_path / "adapter")
    checkpoint = open_checkpoint(base)
    adapter = open_adapter(tmp_path / "adapter", checkpoint.config)
    before = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for size in (1, 2, 4):
        layout = ParallelLayout(
            tensor_model_parallel_size=size, expert_tensor_parallel_size=1 if case == "gpt_oss" else None
        )
        if check_layout(checkpoint.config, layout):
            with pytest.raises(McaError, match="cannot be laid out as"):
                write_mca_adapter(adapter, layout, tmp_path / f"mca{size}")
            continue
        write_mca_adapter(adapter, layout, tmp_path / f"mca{size}")
        write_peft(open_adapter(tmp_path / f"mca{size}"), tmp_path / f"peft{size}")
        after = load_file(tmp_path / f"peft{size}" / "adapter_model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    merge_to_hf(checkpoint, adapter, tmp_path / "merged")
    theirs = lora.merge_and_unload().state_dict()
    for name, tensor in adapters.base_model(tmp_path / "merged").state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=1e-6)


def test_adapters_without_effect_are_an_error(tmp_path: Path) -> None:
    base = tiny_hf.save("jamba", tmp_path / "base")
    model = adapters.base_model(base)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["dt_proj", "q_proj"])).save_pretrained(
        tmp_path
    )
    with pytest.raises(
        McaError, match=r"lora_A.*adapters on dt_proj of jamba .*exclude_modules=\['dt_proj'\]"
    ):
        open_adapter(tmp_path, open_checkpoint(base).config)


@pytest.mark.parametrize("case", OTHERWISE_CALLED)
def test_linears_have_the_names_of_modules_and_not_of_files(case: str) -> None:
    kind, different = tiny_hf.ALL[case]
    described = transformers.AutoConfig.for_model(kind, **{**tiny_hf.SIZE, **different})
    with torch.device("meta"):
        modules = dict(transformers.AutoModelForCausalLM.from_config(described).named_modules())
    config = config_from_hf(described.to_dict())
    found = FAMILIES[kind].with_checkpoint_names(config, [OTHERWISE_CALLED[case]])
    names = [target.module for target in linear_targets(found)]
    assert names == [target.module for target in linear_targets(config)]
    adapted = {target.module for target in linear_targets(found) if target.linear or target.base.vocab}
    assert len(adapted) > 8 and adapted <= modules.keys()


@pytest.mark.cases(0, always=[case for case in UNADAPTED if case in ROUTERS])
@pytest.mark.parametrize("case", UNADAPTED)
def test_all_linear_leaves_out_what_peft_cannot_adapt(case: str) -> None:
    kind, different = tiny_hf.ALL[case]
    described = transformers.AutoConfig.for_model(kind, **{**tiny_hf.SIZE, **different})
    config = config_from_hf(described.to_dict())
    document = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": "all-linear"}
    exclude_unadapted(document, config, ())
    adapter = AdapterConfig.from_dict(document)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_config(described), peft.LoraConfig(**document)
    )
    found = [name for name, each in model.named_modules() if isinstance(each, peft.tuners.lora.LoraLayer)]
    assert found and not {name.rpartition(".")[2] for name in found} & FAMILIES[kind].unadaptable
    assert rules_for_training(config, adapter).factors
    assert model(torch.arange(1, 9)[None], use_cache=False).logits.shape[1] == 8


PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]
SHARED = ["o_proj", "shared_experts.up_proj"]
SIZES = {"rank_pattern": {"shared_experts.up_proj": 3}, "alpha_pattern": {"mlp.gate_proj": 16}}


@pytest.mark.cases(0, always=["glm4_moe"])
@pytest.mark.parametrize(
    "case,settings",
    [
        pytest.param(case, {"target_modules": targets, **more}, id=name)
        for name, case, targets, more in (
            ("glm4_moe", "glm4_moe", PROJECTIONS, SIZES),
            ("pattern", "glm4_moe", rf".*\.({'|'.join(PROJECTIONS)})", {}),
            ("shared", "glm4_moe", SHARED, {}),
            ("layer", "glm4_moe", SHARED, {"layers_to_transform": [2]}),
            ("afmoe", "afmoe", PROJECTIONS, {}),
            ("longcat_flash", "longcat_flash", PROJECTIONS, {}),
            ("deepseek_v3", "deepseek_v3", PROJECTIONS, {}),
            ("deepseek_v32", "deepseek_v32", PROJECTIONS, {}),
            ("qwen3_moe", "qwen3_moe", ["q_proj", *PROJECTIONS], {}),
            ("down", "mixtral", ["q_proj", "w2"], {}),
        )
    ],
)
def test_peft_reads_all_factors_of_given_names_next_to_experts(
    case: str, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = adapters.loaded_by_peft(case, settings, tmp_path)
    assert found.difference < 1e-4 * found.moved  # factors that are not read are a tenth and more
    assert "PEFT on transformers 5" not in caplog.text


UNREAD: dict[str, tuple[str, dict[str, Any]]] = {
    "type": ("qwen2_moe", {"target_modules": PROJECTIONS}),
    "gate-alone": ("glm4_moe", {"target_modules": ["gate_proj"]}),
    "without-down": ("qwen3_moe", {"target_modules": PROJECTIONS[:2]}),
    "rslora": ("qwen3_moe", {"target_modules": PROJECTIONS, "use_rslora": True}),
    "alpha": ("qwen3_moe", {"target_modules": PROJECTIONS, "alpha_pattern": {"gate_proj": 32}}),
}
REFUSED_BY_PEFT = ("gate-alone",)


@pytest.mark.parametrize("name", UNREAD)
def test_factors_of_experts_that_peft_does_not_read_are_reported(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    case, settings = UNREAD[name]
    kind, different = tiny_hf.ALL[case]
    config = config_from_hf({**tiny_hf.SIZE, **different, "model_type": kind})
    rules_for_training(config, AdapterConfig.from_dict({"peft_type": "LORA", **settings}))
    (reported,) = [each.message for each in caplog.records if "PEFT on transformers 5" in each.message]
    assert "\n" not in reported
    assert "name mlp.experts.gate_up_proj, mlp.experts.down_proj in target_parameters" in reported
    named = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    caplog.clear()
    rules_for_training(config, AdapterConfig.from_dict({"peft_type": "LORA", **named}))
    assert not caplog.records


@pytest.mark.qualify
@pytest.mark.parametrize("name", UNREAD)
def test_peft_does_not_read_the_reported_factors(name: str, tmp_path: Path) -> None:
    case, settings = UNREAD[name]
    if name in REFUSED_BY_PEFT:
        with pytest.raises(ValueError, match="without also targeting"):
            adapters.loaded_by_peft(case, settings, tmp_path)
    else:
        found = adapters.loaded_by_peft(case, settings, tmp_path)
        assert found.difference > 0.05 * found.moved


def test_of_experts_that_are_modules_there_is_nothing_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    kind, different = tiny_hf.ALL["kimi_k2"]
    config = config_from_hf({**tiny_hf.SIZE, **different, "model_type": kind})
    rules_for_training(config, AdapterConfig.from_dict({"peft_type": "LORA", "target_modules": PROJECTIONS}))
    assert not caplog.records


def test_types_whose_experts_peft_turns() -> None:
    """Compare `FUSING_MODEL_TYPES` with PEFT and transformers; a failure means that the list needs an update."""
    from peft.utils import transformers_weight_conversion as conversion

    bases = conversion._MODEL_TO_CONVERSION_PATTERN
    turned = {kind for kind in FAMILIES if bases.get(kind) in conversion._MOE_TARGET_MODULE_MAPPING}
    assert turned == FUSING_MODEL_TYPES


LAYER = r"model\.layers\.1\..*"


@pytest.mark.parametrize(
    "settings",
    [
        {
            "rank_pattern": {"down_proj": 2},
            "alpha_pattern": {"up_proj": 64, "q_proj": 2, r".*1\..*\.q_proj": 4},
        },
        {"exclude_modules": LAYER},
        {"modules_to_save": ["layers.1.mlp.shared_expert"], "use_rslora": True},
        {
            "exclude_modules": ["layers.1.mlp.shared_expert.up_proj"],
            "rank_pattern": {r".*1\..*\.down_proj": 1},
        },
    ],
)
def test_ranks_scales_and_exclusions_outlast_the_names_of_all_linear(settings: dict[str, Any]) -> None:
    kind, different = tiny_hf.ALL["qwen2_moe"]
    config = config_from_hf({**tiny_hf.SIZE, **different, "model_type": kind})
    document = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear", **settings}

    def sizes() -> dict[str, tuple[int, float]]:
        rules = rules_for_training(config, AdapterConfig.from_dict(document))
        return {pair.target.module: (pair.rank, pair.scale) for pair in rules.factors}

    meant = sizes()
    name_targets(document, config)
    assert document["target_modules"] != "all-linear"
    assert sizes() == meant
    document = json.loads(AdapterConfig.from_dict(document).to_json())
    assert sizes() == meant
    if "exclude_modules" not in settings and "modules_to_save" not in settings:
        assert "shared_expert.gate_proj.weight" in document["target_parameters"]  # in short where it can be


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS", "CAUSAL_LM"])
def test_a_head_for_scores_is_saved_as_with_peft(task: str) -> None:
    model_class = {
        "SEQ_CLS": transformers.LlamaForSequenceClassification,
        "TOKEN_CLS": transformers.LlamaForTokenClassification,
        "CAUSAL_LM": transformers.LlamaForCausalLM,
    }[task]
    settings = {"task_type": task, "target_modules": ["q_proj"], "modules_to_save": ["norm"]}
    document: dict[str, Any] = {"peft_type": "LORA", **settings}
    save_head(document)
    described = transformers.LlamaConfig(**{**tiny_hf.SIZE, "num_hidden_layers": 1})
    theirs = peft.get_peft_model(model_class(described), peft.LoraConfig(**settings))
    assert document["modules_to_save"] == list(theirs.peft_config["default"].modules_to_save)
    hf = described.to_dict() | {"architectures": [model_class.__name__]}
    rules = rules_for_training(config_from_hf(hf), AdapterConfig.from_dict(document))
    trained = {
        name.partition(".modules_to_save")[0] for name, p in theirs.named_parameters() if p.requires_grad
    }
    ours = {name.rpartition(".")[0] for param in rules.saved for name in param.hf_names()}
    assert ours == {name for name in trained if "lora_" not in name}


def test_many_names_can_be_excluded() -> None:
    kind, different = tiny_hf.ALL["phimoe"]
    config = config_from_hf({**tiny_hf.SIZE, **different, "model_type": kind})
    names = [f"{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkvo"]
    document = {"peft_type": "LORA", "target_modules": "all-linear", "exclude_modules": names}
    exclude_unadapted(document, config, ())
    adapted = rules_for_training(config, AdapterConfig.from_dict(document)).factors
    assert adapted and not any(pair.target.module.endswith(tuple(names)) for pair in adapted)


def test_a_merged_model_has_the_head_of_its_adapter(tmp_path: Path) -> None:
    base = tiny_hf.save("llama", tmp_path / "base")
    scoring = transformers.AutoModelForSequenceClassification
    plain = scoring.from_pretrained(base, num_labels=3, pad_token_id=0)
    settings: Any = {"task_type": "SEQ_CLS", "target_modules": ["q_proj"], "init_lora_weights": False}
    adapted = peft.get_peft_model(plain, peft.LoraConfig(r=2, **settings)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    checkpoint = open_checkpoint(base)
    merge_to_hf(checkpoint, open_adapter(tmp_path / "adapter", checkpoint.config), tmp_path / "merged")
    merged = scoring.from_pretrained(tmp_path / "merged", pad_token_id=0)
    assert merged.config.architectures == ["LlamaForSequenceClassification"]
    tokens = torch.arange(1, 9)[None]
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=0, atol=1e-5)
