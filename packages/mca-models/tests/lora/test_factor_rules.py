"""Names, shards and modules of factors, by the linear that they adapt: literal tables."""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import tiny_hf
import tiny_vision
import torch

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_models.lora import AdapterConfig, AdapterRules, rules_for_training
from mca_models.lora.rules import factors_by_weight, rules_from_names
from mca_models.megatron.peft.attach import LinearGroups, _lora
from mca_models.megatron.peft.linear import Axis, Cut, LoraLinear, LoraPart, LoraWeight
from mca_models.templates import config_from_hf, get_family
from mca_models.weights import Stage

STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class Group:
    def __init__(self, size: int = 1) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def config_of(case: str, tp: int = 1) -> McaModelConfig:
    model_type, different = tiny_hf.ALL[case]
    config = config_from_hf({**tiny_hf.SIZE, **different, "model_type": model_type})
    layout = ParallelLayout(tensor_model_parallel_size=tp, expert_tensor_parallel_size=tp)
    return replace(config, layout=layout)


def adapter_of(**settings: Any) -> AdapterConfig:
    return AdapterConfig.from_dict({"peft_type": "LORA", "r": 2, "lora_alpha": 6, **settings})


def rules_of(config: McaModelConfig, **settings: Any) -> AdapterRules:
    return rules_for_training(config, adapter_of(**settings))


@pytest.mark.parametrize(
    ("case", "tp", "module", "axes"),
    [
        ("llama", 2, "q_proj", (None, 0)),
        ("llama", 2, "v_proj", (None, 0)),
        ("llama", 1, "v_proj", (None, 0)),
        ("llama", 4, "q_proj", (None, None)),  # two query groups
        ("llama", 4, "k_proj", (None, None)),
        ("llama", 4, "up_proj", (None, 0)),
        ("llama", 2, "o_proj", (1, None)),
        ("llama", 2, "down_proj", (1, None)),
        ("llama", 2, "lm_head", (None, 0)),
        ("deepseek_v3", 2, "q_b_proj", (None, 0)),
        ("deepseek_v3", 2, "q_a_proj", (None, None)),
        ("deepseek_v3", 2, "kv_a_proj_with_mqa", (None, None)),
        ("qwen2_moe", 2, "shared_expert_gate", (None, None)),
        ("qwen3_next", 2, "in_proj_qkvz", (None, None)),
        ("qwen3_next", 2, "in_proj_ba", (None, None)),
    ],
)
def test_factors_are_sharded_as_rows_and_columns_of_their_linear(
    case: str, tp: int, module: str, axes: tuple[int | None, int | None]
) -> None:
    pairs = rules_of(config_of(case, tp), target_modules=[module]).factors
    assert pairs and {(pair.a.shard.axis, pair.b.shard.axis) for pair in pairs} == {axes}
    for pair in pairs:
        assert (pair.rank, pair.scale) == (2, 3.0)
        assert not pair.a.vocab and pair.b.vocab is (module == "lm_head")


@pytest.mark.parametrize(
    ("case", "settings", "mca", "hf"),
    [
        (
            "llama",
            {"target_modules": ["k_proj"]},
            "decoder.layers.1.self_attention.linear_qkv.lora_B.k_proj.weight",
            "model.layers.1.self_attn.k_proj.lora_B.weight",
        ),
        (
            "qwen2_moe",
            {"target_modules": ["shared_expert_gate"]},
            "decoder.layers.1.mlp.shared_experts.gate_weight.lora_B.shared_expert_gate.weight",
            "model.layers.1.mlp.shared_expert_gate.lora_B.weight",
        ),
        (
            "glm4_moe",
            {"target_parameters": ["mlp.gate.weight"], "target_modules": ["q_proj"]},
            "decoder.layers.1.mlp.router.lora_B.gate.weight",
            "model.layers.1.mlp.gate.lora_B.weight",
        ),
        (
            "qwen3_moe",
            {"target_parameters": STACKED, "target_modules": ["q_proj"]},
            "decoder.layers.1.mlp.experts.linear_fc1.lora_B.gate_up_proj.weight3",
            "model.layers.1.mlp.experts.base_layer.lora_B.weight",
        ),
        (
            "qwen3_moe",
            {"target_parameters": STACKED, "target_modules": ["q_proj"]},
            "decoder.layers.1.mlp.experts.linear_fc2.lora_B.down_proj.weight3",
            "model.layers.1.mlp.experts.lora_B.weight",
        ),
        (
            "qwen3_moe",
            {"target_parameters": STACKED[:1], "target_modules": ["q_proj"]},
            "decoder.layers.1.mlp.experts.linear_fc1.lora_B.gate_up_proj.weight3",
            "model.layers.1.mlp.experts.lora_B.weight",
        ),
        (
            "qwen3_moe",
            {"target_modules": ["up_proj"]},
            "decoder.layers.1.mlp.experts.linear_fc1.lora_B.up_proj.weight3",
            "model.layers.1.mlp.experts.3.up_proj.lora_B.weight",
        ),
    ],
)
def test_each_factor_has_one_name_in_both_formats(
    case: str, settings: dict[str, Any], mca: str, hf: str
) -> None:
    config = config_of(case)
    names = {param.mca_name(): param.hf_names() for param in rules_of(config, **settings).params}
    for which in ("lora_A", "lora_B"):
        assert names[mca.replace("lora_B", which)] == (f"base_model.model.{hf}".replace("lora_B", which),)
    read = rules_from_names(config, adapter_of(**settings), list(names))
    assert {param.mca_name(): param.hf_names() for param in read.params} == names


@pytest.mark.parametrize("stored", [True, False])
def test_stored_names_decide_about_routed_experts_of_all_linear(stored: bool) -> None:
    config = config_of("qwen3_moe")
    both = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    every = rules_of(config, target_modules=both).params
    names = [name for param in every for name in param.hf_names() if stored or ".experts." not in name]
    found = rules_from_names(config, adapter_of(target_modules="all-linear"), names)
    assert {param.hf_names()[0] for param in found.params} == set(names)


def test_stored_names_decide_about_the_vision_model_of_all_linear() -> None:
    config = config_from_hf(tiny_vision.described("qwen3_vl_moe"))
    adapter = adapter_of(target_modules="all-linear")
    names = [
        name for param in rules_of(config, target_modules="all-linear").params for name in param.hf_names()
    ]
    seen = [name for name in names if ".visual." in name]
    text = [name for name in names if name not in seen]

    def vision_of(stored: list[str]) -> list[str]:
        params = rules_from_names(config, adapter, stored).params
        return [param.hf_names()[0] for param in params if ".visual." in param.hf_names()[0]]

    assert seen and vision_of(names) == seen and not vision_of(text)
    assert vision_of([*text, seen[0]]) == seen, "the others are missing, not the vision model"


@pytest.mark.parametrize("settings", [{"target_parameters": STACKED}, {"target_parameters": ["gate.weight"]}])
def test_adapters_on_parameters_have_no_dropout(settings: dict[str, Any]) -> None:
    config = config_of("qwen3_moe")
    assert rules_of(config, target_modules=["q_proj"], lora_dropout=0.5).factors
    assert rules_of(config, **settings).factors
    with pytest.raises(McaError, match="lora_dropout: must be 0 with target_parameters"):
        rules_of(config, lora_dropout=0.5, **settings)


def test_experts_have_separate_factors_or_stacked_ones() -> None:
    config = config_of("qwen3_moe")
    with pytest.raises(McaError, match="target_modules and target_parameters both name the routed experts"):
        rules_of(config, target_modules=["gate_proj"], target_parameters=STACKED)
    both = rules_of(config, target_modules=["q_proj"], target_parameters=[*STACKED, "o_proj.weight"])
    assert {pair.target.label for pair in both.factors} == {"q_proj", "o_proj", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("case", "ending", "axis", "expert", "full_sequence", "in_layer"),
    [
        ("qwen3_moe", "linear_qkv.weight", "rows", False, False, True),
        ("qwen3_moe", "linear_proj.weight", "columns", False, False, True),
        ("qwen3_moe", "router.weight", "none", False, False, True),
        ("qwen3_moe", "experts.linear_fc1.weight2", "rows", True, True, True),
        ("qwen3_moe", "experts.linear_fc2.weight2", "columns", True, True, True),
        ("qwen3_moe", "output_layer.weight", "rows", False, False, False),
        ("mamba", "x_proj.weight", "columns", False, True, True),
    ],
)
def test_the_linear_of_an_adapter_has_a_group_and_a_shard_of_the_sequence(
    case: str,
    ending: str,
    axis: str,
    expert: bool,
    full_sequence: bool,
    in_layer: bool,
    sequence_parallel: bool,
) -> None:
    config = config_of(case)
    params = get_family(config.model_type).params(config)
    param = next(each for each in params if each.mca_name().endswith(ending))
    tensor, experts = Group(2), Group(4)
    groups: Any = LinearGroups(tensor, experts, sequence_parallel=sequence_parallel)  # type: ignore[arg-type]
    cut = groups.cut(param)
    assert (cut.axis, cut.group) == (axis, experts if expert else tensor)
    assert (cut.sequence, cut.expert) == (sequence_parallel and not full_sequence, expert)
    assert cut.forked is (sequence_parallel and in_layer)
    if case == "qwen3_moe" and axis == "rows":
        assert groups.cut(replace(param, stage=Stage.VISION)).sequence is False


def module_on(case: str, module: str, tp: int = 1, **groups: Any) -> LoraLinear:
    """Return the module with the adapter on ``module`` of the last layer."""
    config = config_of(case, tp)
    pairs = list(factors_by_weight(rules_of(config, target_modules=[module]).factors).values())[-1]
    group: Any = Group(tp)
    ranks = LinearGroups(group, group, **{"sequence_parallel": False, **groups})
    base = pairs[0].target.base
    rows = {"q_proj": 128, "gate": 4, "shared_expert_gate": 1}.get(module, 48)
    assert base.layer == config.num_layers - 1
    return _lora(pairs, torch.zeros(rows, 32), ranks, 0.25)


@pytest.mark.parametrize(
    ("case", "module", "kind"),
    [
        ("qwen3_moe", "gate", LoraWeight),
        ("qwen2_moe", "shared_expert_gate", LoraWeight),
        ("qwen2_moe", "q_proj", LoraLinear),
    ],
)
def test_weights_without_a_linear_have_adapters_of_weights(
    case: str, module: str, kind: type[LoraLinear]
) -> None:
    made = module_on(case, module)
    assert type(made) is kind and made.p == 0.25


@pytest.mark.parametrize(
    ("case", "module", "groups", "message"),
    [
        ("qwen2_moe", "shared_expert.gate_proj", {"overlap": True}, "moe_shared_expert_overlap"),
        ("qwen2_moe", "shared_expert.gate_proj", {"fuser": True}, "use_transformer_engine_op_fuser"),
        ("qwen2_moe", "shared_expert.gate_proj", {}, None),
        ("qwen2_moe", "q_proj", {"overlap": True, "fuser": True}, None),
        ("qwen3_moe", "gate", {"overlap": True}, None),
        ("deepseek_v3", "kv_a_proj_with_mqa", {"tp": 2}, "needs sequence_parallel"),
        ("deepseek_v3", "kv_a_proj_with_mqa", {"tp": 2, "sequence_parallel": True}, None),
        ("deepseek_v3", "kv_a_proj_with_mqa", {"tp": 1}, None),
        ("deepseek_v3", "q_a_proj", {"tp": 2}, None),
    ],
)
def test_hooks_that_would_not_run_are_errors(
    case: str, module: str, groups: dict[str, Any], message: str | None
) -> None:
    if message is None:
        assert module_on(case, module, **groups).parts
        return
    with pytest.raises(McaError, match=f"an adapter on .*{module}.* {message}"):
        module_on(case, module, **groups)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("axis", ["rows", "columns", "none"])
def test_ranks_drop_other_numbers_of_inputs_that_are_their_own(
    axis: Axis, sequence: bool, forked: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs differ where they are sharded: along the sequence, or by features of a column-sharded linear."""
    forks: list[str] = []

    class Tracker:
        def fork(self) -> AbstractContextManager[None]:
            forks.append("fork")
            return nullcontext()

    monkeypatch.setattr("megatron.core.tensor_parallel.get_cuda_rng_tracker", Tracker)
    group: Any = Group(size)
    cut = Cut(axis, group, sequence=sequence, forked=forked)
    lora = LoraLinear([LoraPart("q", 2, 1.0, 4)], cut, torch.zeros(4, 8), p=0.5)
    x = torch.ones(64, 8)
    dropped = lora._dropped(x)
    assert set(dropped.flatten().tolist()) == {0.0, 2.0}
    own = axis == "columns" or sequence
    assert forks == (["fork"] if own and size > 1 and not forked else [])
    assert lora.eval()._dropped(x) is x


def test_a_written_configuration_is_sorted_text_with_its_patterns_in_order() -> None:
    patterns = {"v_proj": 3, "k_proj": 2}
    settings = {"target_modules": ["q_proj"], "rank_pattern": patterns, "base_model_name_or_path": "modèle"}
    text = adapter_of(**settings).to_json()
    assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"
    found = json.loads(text)
    assert [*found] == sorted({"peft_type", "r", "lora_alpha", *settings})
    assert [*found["rank_pattern"].items()] == [*patterns.items()] and "modèle" in text
