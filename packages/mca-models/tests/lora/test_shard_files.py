"""Adapters in MCA directories: shards that are joined, those that are damaged, and models that they do not fit."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_hf
from safetensors.numpy import load_file, save_file

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_models.checkpoint_kinds import load_model_config
from mca_models.lora import Adapter, AdapterConfig, open_adapter, rules_for_training, write_mca_adapter
from mca_models.lora.convert import (
    _SAME_MODEL,
    adapter_for,
    convert_adapter,
    load_adapter_rules,
)
from mca_models.lora.mca_directory import is_mca_adapter, open_mca_adapter
from mca_models.lora.peft_directory import PeftReader, peft_shapes, write_peft
from mca_models.storage.writer import file_crc32
from mca_models.templates import config_from_hf
from mca_models.templates.shapes import full_shape

SAVED = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}
EXPERTS = {
    "target_modules": ["o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
TP2 = ParallelLayout(tensor_model_parallel_size=2)
SHARD = Path("iter_0000001") / "pp_000" / "tp_01.safetensors"


def config_of(case: str) -> McaModelConfig:
    model_type, different = tiny_hf.CASES[case]
    return config_from_hf({**tiny_hf.SIZE, **different, "model_type": model_type})


def adapter_of(case: str = "llama", settings: dict[str, Any] = SAVED) -> Adapter:
    """Return an adapter of counted values."""
    config = config_of(case)
    adapter = AdapterConfig.from_dict({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings})
    rules = rules_for_training(config, adapter)
    shapes = peft_shapes(Adapter(config, adapter, rules, lambda param: np.empty(full_shape(param, config))))
    draw = np.random.default_rng(1)
    tensors = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return Adapter(config, adapter, rules, PeftReader(tensors.__getitem__, config.num_experts or 1).read)


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return adapter_of()


@pytest.fixture
def directory(adapter: Adapter, tmp_path: Path) -> Path:
    write_mca_adapter(adapter, TP2, tmp_path / "mca")
    return tmp_path / "mca"


def same(one: Adapter, other: Adapter) -> bool:
    others = {param.mca_name(): other.read(param) for param in other.params}
    ours = {param.mca_name(): one.read(param) for param in one.params}
    return ours.keys() == others.keys() and all(np.array_equal(ours[name], others[name]) for name in ours)


@pytest.mark.parametrize(
    ("case", "settings", "layout"),
    [
        ("llama", SAVED, ParallelLayout(tensor_model_parallel_size=4)),  # 70 rows are padded to 72
        ("llama", SAVED, ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
        ("qwen3_moe", EXPERTS, ParallelLayout(expert_model_parallel_size=2)),
        ("qwen3_moe", EXPERTS, ParallelLayout(tensor_model_parallel_size=2, expert_tensor_parallel_size=2)),
    ],
)
def test_joined_shards_are_the_adapter(
    case: str, settings: dict[str, Any], layout: ParallelLayout, tmp_path: Path
) -> None:
    written = adapter_of(case, settings)
    write_mca_adapter(written, layout, tmp_path / "mca")
    found = open_mca_adapter(tmp_path / "mca")
    assert same(found, written) and found.model.layout == layout
    for param in found.rules.full_params:
        assert found.saved_parts is not None
        side, parts = found.saved_parts(param)
        assert side == layout.tp and len(parts) == layout.tp
        rows = np.concatenate([part.flat().reshape(part.shape) for part in parts])
        assert np.array_equal(rows[: found.read(param).shape[0]], found.read(param))


def without_a_tensor(directory: Path, document: Any) -> None:
    tensors = load_file(directory / SHARD)
    del tensors["output_layer.weight"]
    save_file(tensors, directory / SHARD)
    record = {"bytes": (directory / SHARD).stat().st_size, "crc32": f"{file_crc32(directory / SHARD):08x}"}
    document["files"]["pp_000/tp_01.safetensors"] = record


def with_another_size(directory: Path, document: Any) -> None:
    document["files"]["pp_000/tp_01.safetensors"]["bytes"] += 1


def placed_elsewhere(directory: Path, document: Any) -> None:
    document["tensors"]["output_layer.weight"]["files"].reverse()


def without_a_file(directory: Path, document: Any) -> None:
    del document["files"]["pp_000/tp_01.safetensors"]


def with_another_shape(directory: Path, document: Any) -> None:
    document["tensors"]["output_layer.weight"]["shape"][0] -= 1


def without_a_record(directory: Path, document: Any) -> None:
    del document["tensors"]["output_layer.weight"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_a_tensor, r"pp_000/tp_01.safetensors: holds no output_layer.weight$"),
        (with_another_size, r"pp_000/tp_01.safetensors: has (\d+) bytes, the manifest says \d+$"),
        (placed_elsewhere, r"iter_0000001: the manifest does not place output_layer.weight as its layout"),
        (without_a_file, r"pp_000/tp_01.safetensors: holds no "),
        (with_another_shape, r"output_layer.weight has shape \[69, 32\]|lm_head.weight has shape"),
        (without_a_record, r"1 missing tensor \(output_layer.weight\)"),
    ],
)
def test_each_damage_is_named(damage: Callable[[Path, Any], None], message: str, directory: Path) -> None:
    file = directory / "iter_0000001" / "manifest.json"
    document = json.loads(file.read_text())
    damage(directory, document)
    file.write_text(json.dumps(document))
    with pytest.raises(McaError, match=message):
        open_mca_adapter(directory)


def test_a_directory_has_both_configurations(directory: Path) -> None:
    assert is_mca_adapter(directory)
    (directory / "adapter_config.json").rename(directory / "kept.json")
    assert not is_mca_adapter(directory)
    (directory / "kept.json").rename(directory / "adapter_config.json")
    (directory / "mca_config.json").unlink()
    assert not is_mca_adapter(directory)


@pytest.mark.parametrize("field", _SAME_MODEL)
def test_each_size_of_the_base_model_is_compared(field: str, directory: Path) -> None:
    own = load_model_config(directory)
    if field == "num_moe_experts":
        other = config_of("qwen3_moe").replace_fields(model_type="llama")
    else:
        other = own.replace_fields(**{field: "qwen2" if field == "model_type" else 16})
    shown, here = (model.to_fields()[field] for model in (own, other))
    assert shown != here
    with pytest.raises(McaError, match=f"{field} of its base model is {shown}, here {here}; name the base"):
        open_adapter(directory, other)


def test_weights_of_other_shapes_are_listed_once_each(directory: Path) -> None:
    model = load_model_config(directory)
    assert same(open_adapter(directory, model), open_adapter(directory))
    other = model.replace_fields(ffn_hidden_size=40, vocab_size=80)
    with pytest.raises(McaError) as caught:
        open_adapter(directory, other)
    lines = str(caught.value)
    size = model.to_fields()["ffn_hidden_size"]
    assert (
        lines.count(f"layers.0.mlp.down_proj.weight of its base model has shape [32, {size}], here [32, 40]")
        == 1
    )
    assert lines.count("down_proj") == model.num_layers and "q_proj" not in lines
    assert (
        "lm_head.weight of its base model has shape [70, 32], here [80, 32]; resize the base model's" in lines
    )
    assert lines.count("resize") == 1


def test_an_adapter_for_ranks_has_their_layout(directory: Path, adapter: Adapter) -> None:
    model = replace(adapter.model, layout=ParallelLayout(tensor_model_parallel_size=4))
    found = adapter_for(directory, model)
    assert found.model.layout.tp == 4 and same(found, adapter)


def test_an_adapter_of_a_head_requires_a_head(tmp_path: Path) -> None:
    headed = config_of("llama").replace_fields(head_kind="sequence_classification", num_labels=3)
    settings = {"task_type": "SEQ_CLS", "target_modules": ["q_proj"], "modules_to_save": ["score"]}
    config = AdapterConfig.from_dict({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings})
    rules = rules_for_training(headed, config)
    shapes = peft_shapes(Adapter(headed, config, rules, lambda param: np.empty(full_shape(param, headed))))
    reader = PeftReader({name: np.ones(shape, np.float32) for name, shape in shapes.items()}.__getitem__, 1)
    write_mca_adapter(Adapter(headed, config, rules, reader.read), TP2, tmp_path / "mca")
    assert adapter_for(tmp_path / "mca", headed).model.head.num_labels == 3
    with pytest.raises(
        McaError, match=r"head for sequence_classification; open the base model with head=Head"
    ):
        adapter_for(tmp_path / "mca", config_of("llama"))


def test_the_layout_and_the_kind_of_a_conversion_have_defaults(
    directory: Path, adapter: Adapter, tmp_path: Path
) -> None:
    convert_adapter(directory, tmp_path / "peft")
    assert not is_mca_adapter(tmp_path / "peft")
    convert_adapter(directory, tmp_path / "again", to="mca")
    assert load_model_config(tmp_path / "again").layout == TP2
    convert_adapter(tmp_path / "peft", tmp_path / "one", model=load_model_config(directory))
    assert load_model_config(tmp_path / "one").layout == ParallelLayout()
    assert same(open_adapter(tmp_path / "one"), adapter)
    for path in (directory, tmp_path / "peft"):
        config, rules = load_adapter_rules(path, adapter.model)
        assert config.document["r"] == 2
        assert [param.mca_name() for param in rules.params] == [param.mca_name() for param in adapter.params]


def test_values_that_are_not_finite_are_copied_with_a_warning_and_not_cast(
    adapter: Adapter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def read(param: Any) -> Any:
        values = adapter.read(param).copy()
        if param.mca_name() == "output_layer.weight":
            values[3, 4] = np.nan
        return values

    write_peft(replace(adapter, read=read), tmp_path / "peft")
    with caplog.at_level(logging.WARNING):
        convert_adapter(tmp_path / "peft", tmp_path / "mca", model=adapter.model)
    assert "lm_head.weight" in caplog.text and "they are copied as they are" in caplog.text
    convert_adapter(tmp_path / "peft", tmp_path / "same", model=adapter.model, cast="F32")
    with pytest.raises(McaError, match=r"lm_head.weight.*; it cannot be cast, so remove the flag"):
        convert_adapter(tmp_path / "peft", tmp_path / "bf16", model=adapter.model, cast="BF16")
