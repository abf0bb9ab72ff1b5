"""``mca_config.json``: what is written reads back, what is wrong is named, ROLL's file reads too."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mca_config import McaError, McaModelConfig, ParallelLayout
from mca_config.errors import list_problems
from mca_config.model import SECTIONS, group_fields

DATA = Path(__file__).parent / "data"
SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": 101,
    "max_position_embeddings": 512,
}
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [1.0],
    "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 64,
}
MAMBA = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 4,
    "mamba_num_groups": 1,
    "mamba_state_dim": 4,
    "mamba_conv_kernel_dim": 4,
}
MLA: dict[str, Any] = {"kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}


def config(**more: Any) -> McaModelConfig:
    return McaModelConfig.from_fields(**(SIZES | more))


def document() -> dict[str, Any]:
    """Return a file of which each section says only what differs from the defaults."""
    own, sections = group_fields(SIZES)
    model = own | {name: section for name, section in sections.items() if section}
    return {"mca_version": 1, "model": model, "layout": {}, "hf_config": {"x_unknown": [1, None]}}


def test_a_saved_config_loads_equal(tmp_path: Path) -> None:
    saved = config(
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        layer_types=("full_attention",) * 4,
        hf_config={"torch_dtype": "bfloat16", "nested": {"list": [1, 2.5, None, "ä"]}},
        layout=ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
        extra={"some_fact": 3},
    )
    assert saved.save(tmp_path).name == "mca_config.json"
    assert McaModelConfig.load(tmp_path) == saved


def test_optional_sections_are_made_of_their_key_fields_and_saved(tmp_path: Path) -> None:
    saved = McaModelConfig.from_fields(**SIZES, **MLA, q_lora_rank=None)
    saved.save(tmp_path)
    loaded = McaModelConfig.load(tmp_path)
    assert loaded == saved
    assert loaded.mla is not None and loaded.mla.kv_lora_rank == 16
    assert loaded.moe is None and loaded.replace_fields(kv_lora_rank=None).mla is None
    assert McaModelConfig.from_fields(**loaded.to_fields()) == loaded


def test_every_field_belongs_to_one_place() -> None:
    names = [name for entry in SECTIONS.values() for name in entry.names]
    names += [field.name for field in fields(McaModelConfig) if field.name not in SECTIONS]
    assert len(names) == len(set(names))
    assert not {*names} & SECTIONS.keys()
    own = [field.name for field in fields(McaModelConfig)]
    assert {name for name in own if name in SECTIONS} == SECTIONS.keys()


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "layernorm_epsilon": st.floats(1e-12, 1, allow_nan=False),
            "rotary_base": st.floats(1, 1e9, allow_nan=False),
            "tie_word_embeddings": st.booleans(),
            "window_size": st.one_of(st.none(), st.integers(1, 10**6)),
            "moe_layer_freq": st.lists(st.integers(0, 1), min_size=4, max_size=4).map(tuple),
            "hf_config": st.dictionaries(
                st.text(), st.one_of(st.none(), st.booleans(), st.integers(), st.text())
            ),
            "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
        },
    )
)
def test_json_round_trip(more: dict[str, Any]) -> None:
    saved = config(**more)
    assert McaModelConfig.from_json(saved.to_json()) == saved


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_layers", "4"), ("layernorm_epsilon", "1e-6"), ("hidden_size", (64,)), ("window_size", {})],
)
def test_what_is_no_number_is_named(name: str, value: Any) -> None:
    with pytest.raises(McaError, match=f"{name} must be a number, not .*; correct the model's config.json"):
        config(**{name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["model"].update(num_layer=4), ["model", "unknown key num_layer"]),
        (lambda d: d["model"].pop("hidden_size"), ["model", "missing hidden_size"]),
        (lambda d: d["model"].update(num_layers="4"), ["num_layers must be an integer", "'4'"]),
        (lambda d: d["model"].update(num_layers=True), ["num_layers must be an integer"]),
        (lambda d: d["model"].update(num_layers=0), ["num_layers must be at least 1"]),
        (lambda d: d["model"].update(dtype="int8"), ["dtype must be 'float32' or"]),
        (
            lambda d: d["model"].setdefault("head", {}).update(tie_word_embeddings=1),
            ["tie_word_embeddings must be true or false"],
        ),
        (
            lambda d: d["model"].update(moe={"num_moe_experts": 4, "moe_layer_freq": [1]}),
            ["moe_layer_freq has 1 entries", "num_layers 4"],
        ),
        (
            lambda d: d["model"].setdefault("attention", {}).update(num_query_groups=3),
            ["not a multiple of num_query_groups 3"],
        ),
        (
            lambda d: d["model"].setdefault("mlp", {}).update(mlp_multipliers=[1.0]),
            ["mlp_multipliers must be 2 finite numbers"],
        ),
        (
            lambda d: d["model"].update(mamba={**MAMBA, "mamba_multipliers": [1.0] * 5 + [float("nan")]}),
            ["mamba_multipliers must be 6 finite numbers"],
        ),
        (
            lambda d: d["model"].setdefault("rope", {}).update(rope_scaling=LONGROPE),
            ["rope parameters: long_factor has 1 numbers, expected 8"],
        ),
        (
            lambda d: d["model"]["attention"].update(kv_chanels=4),
            ["model.attention", "unknown key kv_chanels", "did you mean 'kv_channels'"],
        ),
        (lambda d: d["model"]["mlp"].update(kv_channels=4), ["model.mlp", "field of section attention"]),
        (lambda d: d["model"].update(mplp={}), ["model", "unknown key mplp", "did you mean 'mlp'"]),
        (lambda d: d["model"].update(moe=4), ["moe must be an object, not 4"]),
        (lambda d: d["model"].update(attention=None), ["attention must be an object, not None"]),
        (
            lambda d: d["model"].update(kv_channels=4),
            ["field of section attention", "move it there"],
        ),
        (lambda d: d["layout"].update(tp=2), ["layout", "unknown key tp"]),
        (lambda d: d.update(mca_version=2), ["mca_version must be 1", "2"]),
        (lambda d: d.pop("mca_version"), ["mca_version must be 1", "None"]),
        (lambda d: d.pop("layout"), ["missing key layout"]),
        (lambda d: d.update(more=1), ["unknown key more"]),
        (lambda d: d.update(hf_model_type="llama"), ["hf_model_type is 'llama'", "restore the file"]),
        (lambda d: d.update(layout=[]), ["layout must be an object"]),
    ],
)
def test_a_wrong_document_is_named(change: Any, words: list[str]) -> None:
    wrong = json.loads(json.dumps(document()))
    change(wrong)
    with pytest.raises(McaError) as error:
        McaModelConfig.from_dict(wrong, "some/mca_config.json")
    assert all(word in str(error.value) for word in words), error.value


def test_the_file_repeats_the_model_type_for_llama_factory() -> None:
    assert config().to_dict()["hf_model_type"] == config().hf_model_type == config().model_type
    assert McaModelConfig.from_dict(document()) == McaModelConfig.from_dict(
        document() | {"hf_model_type": SIZES["model_type"]}
    )


def test_files_that_are_not_there_or_not_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(McaError, match=r"mca_config\.json: no such file"):
        McaModelConfig.load(tmp_path)
    (tmp_path / "mca_config.json").write_text("{")
    with pytest.raises(McaError, match=r"mca_config\.json: cannot be read \(not valid JSON"):
        McaModelConfig.load(tmp_path)
    (tmp_path / "mca_config.json").write_text("[]")
    with pytest.raises(McaError, match="expected a JSON object, not list"):
        McaModelConfig.load(tmp_path)


def test_a_checkpoint_of_roll_reads() -> None:
    text = (DATA / "roll_mca_config.json").read_text()
    loaded = McaModelConfig.from_json(text)
    assert loaded.layout == ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert loaded.hf_config == json.loads((DATA / "roll_hf_config.json").read_text())
    expected = {
        "model_type": "llama",
        "num_layers": 4,
        "hidden_size": 128,
        "ffn_hidden_size": 352,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 16,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
        "dtype": "bfloat16",
        "layernorm_epsilon": 1e-6,
        "tie_word_embeddings": False,
        "rope_scaling": None,
        "num_moe_experts": None,
    }
    flat = loaded.to_fields()
    assert {name: flat[name] for name in expected} == expected
    assert McaModelConfig.from_json(loaded.to_json()) == loaded


def roll(**more: Any) -> dict[str, Any]:
    return json.loads((DATA / "roll_mca_config.json").read_text()) | more


def test_rolls_experts_and_mla_read() -> None:
    loaded = McaModelConfig.from_dict(
        roll(
            num_moe_experts=8,
            moe_layer_freq=2,
            moe_use_shared_expert_gate=True,
            multi_latent_attention=True,
            q_lora_rank=None,
            mtp_num_layers=None,
            window_size=[127, 0],
            **MLA,
        )
    )
    assert loaded.mla is not None
    assert loaded.moe is not None
    assert loaded.moe.moe_layer_freq == (1, 0, 1, 0)
    assert [loaded.is_moe_layer(layer) for layer in range(4)] == [True, False, True, False]
    assert loaded.moe.moe_shared_expert_gate
    assert loaded.mtp_num_layers == 0
    assert loaded.attention.window_size == 128


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"hf_config_json": "{"}, "hf_config_json: cannot be read"),
        ({"hf_config_json": "[]"}, "hf_config_json: expected a JSON object"),
        ({"num_moe_experts": 8, "moe_layer_freq": "[1]*2"}, "moe_layer_freq must be a number or a list"),
        ({"num_layers": None}, "num_layers must be an integer"),
    ],
)
def test_a_broken_checkpoint_of_roll_is_named(more: dict[str, Any], words: str) -> None:
    with pytest.raises(McaError, match=words):
        McaModelConfig.from_dict(roll(**more))


@pytest.mark.parametrize(
    ("rows", "tp", "padded"), [(101, 1, 101), (101, 2, 102), (4099, 4, 4100), (8, 8, 8), (1, 8, 8)]
)
def test_the_vocabulary_is_padded_to_a_multiple_of_tp(rows: int, tp: int, padded: int) -> None:
    model = config(vocab_size=rows, layout=ParallelLayout(tensor_model_parallel_size=tp))
    assert model.padded_vocab_size == padded


def test_late_layers_take_the_keys_of_the_last_of_their_kind() -> None:
    kinds = ("sliding_attention", "full_attention", "sliding_attention") * 2
    model = config(num_layers=6, layer_types=kinds, num_kv_shared_layers=3, double_wide_mlp=True)
    assert [model.kv_source_layer(layer) for layer in range(6)] == [None, None, None, 2, 1, 2]
    widths = [model.layer_config(layer).mlp.ffn_hidden_size for layer in range(6)]
    assert widths == [128, 128, 128, 256, 256, 256]
    late = model.layer_config(4)
    assert late.accepts_keys and late.layer_config(4) == late
    assert model.layer_config(5) is model.layer_config(3)  # which is asked for every parameter
    with pytest.raises(McaError, match="num_kv_shared_layers 5 of 6 leaves no layer of type full_attention"):
        model.replace_fields(num_kv_shared_layers=5)


def test_experts_without_weights_count_among_those_whose_names_fill_memory() -> None:
    large = {"num_layers": 2048, "num_moe_experts": 1}
    config(**large, moe_identity_experts=31)
    with pytest.raises(McaError, match="num_moe_experts 1 plus moe_identity_experts 65536 must be at most"):
        config(**large, moe_identity_experts=65536)


def test_each_problem_of_a_section_is_one_line() -> None:
    wrong = json.loads(json.dumps(document()))
    wrong["model"]["attention"] |= {"kv_chanels": 4, "num_query_grups": 2}
    with pytest.raises(McaError) as error:
        McaModelConfig.from_dict(wrong, "some/mca_config.json")
    assert ["kv_chanels" in line for line in list_problems(error.value)] == [True, False], error.value


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("num_layer", "a model has no field 'num_layer'; did you mean 'num_layers'?"),
        ("add_qkv_bia", "a model has no field 'add_qkv_bia'; did you mean 'add_qkv_bias'?"),
        ("xyz", "a model has no field 'xyz'; mca_config/model has all fields"),
    ],
)
def test_an_unknown_field_is_named(field: str, message: str) -> None:
    with pytest.raises(McaError) as error:
        McaModelConfig.from_fields(**SIZES, **{field: 1})
    assert str(error.value) == message
