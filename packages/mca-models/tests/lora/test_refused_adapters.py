"""Adapters that are damaged, of another model, or cannot be represented: refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from merged_files import merge_to_hf
from safetensors.torch import load_file, save_file

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.lora import (
    AdapterConfig,
    open_adapter,
    rules_for_training,
    write_mca_adapter,
    write_peft,
)
from mca_models.templates import config_from_hf


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora is not supported: DoRA"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"peft_type": "VERA"}, "peft_type is 'VERA'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"a_switch_of_tomorrow": True}, "a_switch_of_tomorrow is not known"),
        ({"use_dora": True, "layer_replication": [[0, 1]]}, "2 problems"),
        ({"target_modules": []}, "name nothing"),
        ({"target_modules": ["c_attn"]}, "matches no linear of this llama model"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens cannot carry an adapter"),
        (
            {"target_modules": ["all-linear", "lm_head"]},
            "target_modules: 'all-linear' .*; it must be the only value",
        ),
        (
            {"target_modules": ["q_proj", "v_prj"]},
            "target_modules: 'v_prj' names nothing of this llama model",
        ),
        (
            {"target_modules": ["q_proj", "input_layernorm"]},
            "'input_layernorm' is a module of this llama model that cannot carry an adapter here; remove it",
        ),
        ({"target_parameters": ["mlp.gate_up"]}, "target_parameters: 'mlp.gate_up' names nothing"),
        ({"modules_to_save": ["embed_token", "model.norm"]}, "modules_to_save: 'embed_token' names nothing"),
        (
            {"target_parameters": ["self_attn.o_proj"]},
            "is a module of .*, not a parameter; move it to target_mod",
        ),
        (
            {"rank_pattern": {"qproj": 3, "q_proj": 2}},
            "rank_pattern: 'qproj' matches nothing that is adapted",
        ),
        ({"rank_pattern": {"qproj": 3}, "alpha_pattern": {"k_proj": 2}}, "LoraConfig: 2 problems"),
        ({"modules_to_save": ["q_proj"], "target_modules": ["o_proj"]}, "name all of them or none"),
        *(
            ({"r": wrong}, "r must be a whole number from 1 to 65536, not")
            for wrong in (0, "8x", None, [8], 10**30)
        ),
        *(
            ({"lora_alpha": wrong}, "lora_alpha must be a finite number, not")
            for wrong in (None, 10**400, float("nan"), float("inf"))
        ),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern must be an object of whole numbers"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"alpha_pattern": {"([": 4}}, r"alpha_pattern: '\(\[' is no regular expression"),
        ({"target_modules": 5}, "target_modules must be a pattern or a list of names, not 5"),
        ({"target_modules": ["q_proj", 5]}, "target_modules must be a pattern or a list of names"),
        ({"target_modules": "(["}, "is no regular expression"),
        ({"exclude_modules": 7}, "exclude_modules must be"),
        ({"layers_to_transform": "x"}, "layers_to_transform must be a layer's number"),
        (
            {"target_parameters": ["o_proj.weight"], "lora_dropout": 0.1},
            "lora_dropout: must be 0 with target_par",
        ),
        (
            {"target_modules": "all-linear", "layers_to_transform": [1]},
            "needs target_modules to be a list of names",
        ),
        ({"lora_dropout": "x"}, "lora_dropout must be a number from 0 to 1"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    import tiny_hf

    model = config_from_hf({**tiny_hf.SIZE, "model_type": "llama"})
    with pytest.raises(McaError, match=message):
        rules_for_training(
            model, AdapterConfig.from_dict({"peft_type": "LORA", "target_modules": ["q_proj"], **settings})
        )


@pytest.mark.parametrize("saved", [["gate_proj"], ["gate_proj", "up_proj"]])
def test_routed_experts_are_not_saved_whole(saved: list[str]) -> None:
    import tiny_hf

    kind, different = tiny_hf.ALL["deepseek_v3"]
    model = config_from_hf({**tiny_hf.SIZE, **different, "model_type": kind, "num_experts_per_tok": 2})
    modules = [f"experts.0.{name}" for name in saved]
    settings = {"peft_type": "LORA", "target_modules": ["o_proj"], "modules_to_save": modules}
    with pytest.raises(McaError, match=r"routed experts \(.*experts\.0\.gate_proj.*\) cannot be saved whole"):
        rules_for_training(model, AdapterConfig.from_dict(settings))


def test_the_name_of_a_stacked_parameter_is_no_module() -> None:
    import tiny_hf

    kind, different = tiny_hf.ALL["mixtral"]
    model = config_from_hf({**tiny_hf.SIZE, **different, "model_type": kind, "num_experts_per_tok": 2})
    settings = {"peft_type": "LORA", "target_modules": ["q_proj", "down_proj"]}
    with pytest.raises(
        McaError, match=r"'down_proj' is a parameter of .*, not a module; move it to target_parameters"
    ):
        rules_for_training(model, AdapterConfig.from_dict(settings))
    settings |= {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    assert rules_for_training(model, AdapterConfig.from_dict(settings)).factors


def test_an_exclusion_that_excludes_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    import tiny_hf

    model = config_from_hf({**tiny_hf.SIZE, "model_type": "llama", "tie_word_embeddings": True})
    settings = {"peft_type": "LORA", "target_modules": "all-linear", "exclude_modules": ["k_proj", "lm_head"]}
    assert rules_for_training(model, AdapterConfig.from_dict(settings)).factors
    (message,) = caplog.messages
    assert message.endswith("'lm_head' excludes nothing of this llama model; correct or remove it")


def test_what_names_nothing_in_a_finished_adapter_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, source = adapters.save("qwen2", tmp_path)
    model = open_checkpoint(base).config
    open_adapter(source, model)
    assert not caplog.messages
    file = source / "adapter_config.json"
    config = json.loads(file.read_text())
    config["target_modules"].append("v_prj")
    file.write_text(json.dumps(config))
    assert len(open_adapter(source, model).rules.factors) == 4 * 7
    (message,) = caplog.messages
    assert message.endswith("target_modules: 'v_prj' names nothing of this qwen2 model; correct or remove it")


def test_experts_that_lie_turned_get_no_adapter() -> None:
    import tiny_hf

    kind, different = tiny_hf.ALL["llama4_text"]
    model = config_from_hf({**tiny_hf.SIZE, **different, "model_type": kind})
    stacked = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]
    settings = {"peft_type": "LORA", "target_modules": ["q_proj"], "target_parameters": stacked}
    with pytest.raises(McaError, match="target_parameters: PEFT's factors on down_proj of llama4_text"):
        rules_for_training(model, AdapterConfig.from_dict(settings))


def test_embeddings_of_each_layers_own_carry_no_adapter() -> None:
    import tiny_hf

    kind, different = tiny_hf.ALL["gemma4_text-e2b"]
    model = config_from_hf({**tiny_hf.SIZE, **different, "model_type": kind})
    settings = {"peft_type": "LORA", "target_modules": ["embed_tokens_per_layer", "q_proj"]}
    with pytest.raises(McaError, match="embed_tokens_per_layer cannot carry an adapter"):
        rules_for_training(model, AdapterConfig.from_dict(settings))


@pytest.mark.parametrize("fault", ["missing", "unexpected", "rank", "truncated", "pickle", "embedding"])
def test_damaged_adapters_are_refused(fault: str, tmp_path: Path) -> None:
    base, source = adapters.save("qwen2", tmp_path)
    file = source / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    messages = {
        "missing": "1 missing tensor .*; adapter_model.safetensors and adapter_config.json do not agree",
        "unexpected": "1 unexpected tensor",
        "rank": r"has shape \[4, 32\], expected \[3, 32\]",
        "truncated": "truncated",
        "pickle": "not a file of torch.save",
        "embedding": "adapters on embeddings",
    }
    if fault == "missing":
        del tensors[name]
    elif fault == "unexpected":
        tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = tensors[name]
    elif fault == "rank":
        tensors[name] = torch.zeros(4, 32)
    elif fault == "embedding":
        tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(3, 70)
    save_file({key: value.clone() for key, value in tensors.items()}, file)
    if fault == "truncated":
        file.write_bytes(file.read_bytes()[:-4])
    elif fault == "pickle":
        file.rename(source / "adapter_model.bin")
    with pytest.raises(McaError, match=messages[fault]):
        open_adapter(source, open_checkpoint(base).config)


def test_a_tied_model_is_not_merged_with_a_saved_embedding(tmp_path: Path) -> None:
    adapters.CASES["tied"] = (
        "qwen2-tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    )
    base, source = adapters.save("tied", tmp_path)
    checkpoint = open_checkpoint(base)
    adapter = open_adapter(source, checkpoint.config)
    write_mca_adapter(adapter, ParallelLayout(tensor_model_parallel_size=2), tmp_path / "mca")
    write_peft(open_adapter(tmp_path / "mca"), tmp_path / "peft")
    adapters.same_files(source, tmp_path / "peft")
    with pytest.raises(McaError, match="embed_tokens is tied to the output layer"):
        merge_to_hf(checkpoint, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_merging_refuses_what_is_not_finite(dtype: str, tmp_path: Path) -> None:
    base, source = adapters.save("llama-linear", tmp_path, dtype)
    tensors = load_file(source / "adapter_model.safetensors")
    name = "base_model.model.model.layers.2.mlp.gate_proj.lora_B.weight"
    tensors[name] *= 1e8 if dtype == "float16" else float("inf")
    save_file(tensors, source / "adapter_model.safetensors")
    checkpoint = open_checkpoint(base)
    with pytest.raises(
        McaError, match=f"layers.2.mlp.gate_proj.weight: merging gives .* not finite in {dtype}"
    ):
        merge_to_hf(checkpoint, open_adapter(source, checkpoint.config), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_flipped_bit_in_a_piece_is_noticed(tmp_path: Path) -> None:
    base, source = adapters.save("qwen2", tmp_path)
    adapter = open_adapter(source, open_checkpoint(base).config)
    write_mca_adapter(adapter, ParallelLayout(tensor_model_parallel_size=2), tmp_path / "mca")
    file = tmp_path / "mca" / "iter_0000001" / "pp_000" / "tp_01.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    with pytest.raises(McaError, match=r"tp_01.safetensors: its checksum is not the manifest's"):
        open_adapter(tmp_path / "mca")
    file.unlink()
    with pytest.raises(McaError, match=r"tp_01.safetensors: no such file"):
        open_adapter(tmp_path / "mca")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    base, source = adapters.save("qwen2", tmp_path)
    model = open_checkpoint(base).config
    write_mca_adapter(open_adapter(source, model), ParallelLayout(), tmp_path / "mca")
    with pytest.raises(McaError, match="num_layers of its base model is 4, here 5"):
        open_adapter(tmp_path / "mca", replace(model, num_layers=5))
    with pytest.raises(McaError, match="does not describe its base model"):
        open_adapter(source)


@pytest.mark.parametrize("rows", [-3, 3])
def test_an_adapter_with_other_rows_of_the_vocabulary_is_refused(rows: int, tmp_path: Path) -> None:
    base, source = adapters.save("llama-saved", tmp_path)
    model = open_checkpoint(base).config
    write_mca_adapter(open_adapter(source, model), ParallelLayout(), tmp_path / "mca")
    other = replace(model, vocab_size=model.vocab_size + rows)
    for path in (source, tmp_path / "mca"):
        with pytest.raises(
            McaError, match=r"lm_head\.weight .*has shape .* resize the base model's vocabulary first"
        ):
            open_adapter(path, other)
    with pytest.raises(McaError, match=r"q_proj\.weight of its base model has shape"):
        open_adapter(tmp_path / "mca", model.replace_fields(num_query_groups=1))
    tensors = load_file(base / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], tensors[name]])[: other.vocab_size]
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    settings = json.loads((base / "config.json").read_text()) | {"vocab_size": other.vocab_size}
    (base / "config.json").write_text(json.dumps(settings))
    with pytest.raises(McaError, match="merge into the model that it was trained on"):
        merge_to_hf(open_checkpoint(base), open_adapter(tmp_path / "mca"), tmp_path / "merged")


@pytest.mark.parametrize(
    ("key", "accepted", "refused"),
    [
        ("r", (1, 1 << 16), (0, (1 << 16) + 1, 1.0, True)),
        ("lora_alpha", (0, 1, -0.5, 9e29), (1e30, -1e30, True)),
        ("lora_dropout", (0, 0.99), (1, -0.01, True)),
        ("layers_to_transform", (0, [1, 2]), (True, 1.0, [1, False])),
        ("use_rslora", (True, False), (0, "true")),
    ],
)
def test_limits_of_values(key: str, accepted: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    document = {"peft_type": "LORA", "target_modules": ["q_proj"]}
    for value in accepted:
        AdapterConfig.from_dict(document | {key: value})
    for value in refused:
        with pytest.raises(McaError, match=f"{key} must be"):
            AdapterConfig.from_dict(document | {key: value})
