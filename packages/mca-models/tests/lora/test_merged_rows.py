"""Rows of weights that an adapter is merged into, in blocks of any size, against ``W + scale B A`` by NumPy."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_hf
from merged_files import merge_to_hf
from safetensors.numpy import load_file, save_file

from mca_config.errors import McaError
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.lora import Adapter, AdapterConfig, MergedSource, merge, rules_for_training
from mca_models.lora.merge import MergedTensor, add_product
from mca_models.lora.peft_directory import PeftReader, peft_shapes
from mca_models.storage.copy_plan import HF
from mca_models.storage.source import param_part_shapes
from mca_models.templates import config_from_hf, get_family
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param

SEPARATE: dict[str, Any] = {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
STACKED: dict[str, Any] = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "llama": (
        "llama",
        False,
        {"target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"], "modules_to_save": ["lm_head"]},
    ),
    "gpt2": ("gpt2", False, {"target_modules": ["c_attn", "c_fc"]}),
    "separate": ("qwen3_moe", False, SEPARATE),
    "separate on stacked": ("qwen3_moe", True, SEPARATE),
    "stacked on separate": ("qwen3_moe", False, STACKED),
    "stacked": ("qwen3_moe", True, STACKED),
}
"""The model, whether its files have stacked experts, and the adapter."""


class Merging:
    """A base model in a file, and an adapter of random values."""

    def __init__(self, case: str, folder: Path, dtype: str = "float32") -> None:
        kind, stacked, settings = CASES[case]
        model_type, different = tiny_hf.ALL[kind]
        sizes = {**tiny_hf.SIZE, "num_hidden_layers": 2, **different}
        document = {**sizes, "model_type": model_type, "dtype": dtype}
        config = config_from_hf(document)
        draw = np.random.default_rng(7)
        entries: dict[str, list[Any]] = {}
        named = replace(config, extra={**config.extra, "fused_experts": True}) if stacked else config
        for param in get_family(model_type).params(named):
            shapes = param_part_shapes(param, full_shape(param, named), HF)
            for name, shape in zip(param.hf_names(), shapes, strict=True):
                entries.setdefault(name, []).append(draw.standard_normal(shape).astype(dtype))
        self.tensors = {
            name: np.stack(each) if ".experts.gate_up" in name or ".experts.down" in name else each[0]
            for name, each in entries.items()
        }
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(document))
        self.write()
        adapter = AdapterConfig.from_dict({"peft_type": "LORA", "r": 2, "lora_alpha": 6, **settings})
        rules = rules_for_training(config, adapter)
        shapes_by_name = peft_shapes(Adapter(config, adapter, rules, lambda param: np.empty(0)))
        self.factors = {
            name: draw.standard_normal(s).astype(np.float32) for name, s in shapes_by_name.items()
        }
        reader = PeftReader(self.factors.__getitem__, config.num_experts or 1)
        self.adapter = Adapter(config, adapter, rules, reader.read)

    def write(self) -> None:
        save_file(self.tensors, self.folder / "model.safetensors", {"format": "pt"})

    def source(self, cast: str | None = None) -> MergedSource:
        return MergedSource(open_checkpoint(self.folder), self.adapter, cast)

    def truth(self, param: Param, number: int) -> Any:
        """Return one merged tensor of ``param``, in float64."""
        stored = self.tensors[param.hf_names()[number]]
        weight = (stored[param.expert] if param.stacked else stored).astype(np.float64)
        if param.mca_name() in self.adapter.saved_by_name:
            return self.adapter.read(self.adapter.saved_by_name[param.mca_name()])
        pairs = self.adapter.factors_by_name.get(param.mca_name(), ())
        changes = {}
        for pair in pairs:
            a, b = (
                rule.from_full(self.adapter.read(rule))[0].astype(np.float64) for rule in (pair.a, pair.b)
            )
            changes[pair.target.part] = pair.scale * b @ a
        if not pairs or (len(pairs[0].target.base.hf) == len(param.hf) and number not in changes):
            return weight
        if len(pairs[0].target.base.hf) == len(param.hf):
            change = changes[number]
        else:
            rows = np.concatenate([changes[part] for part in sorted(changes)])
            change = np.split(rows, len(param.hf))[number]
        return weight + (change.T if pairs[0].target.transposed else change)


@pytest.mark.parametrize("case", CASES)
def test_rows_of_any_range_are_merged_in_blocks_of_any_size(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merging = Merging(case, tmp_path / "base")
    source = merging.source()
    seen = 0
    for param in source.params:
        if param.layer not in (None, 1) or param.expert not in (None, 0, 3):
            continue
        for number, part in enumerate(source.parts(param)):
            right, tensor = merging.truth(param, number), part.info
            if not isinstance(tensor, MergedTensor):
                np.testing.assert_array_equal(part.flat(), right.astype(np.float32).reshape(-1))
                continue
            seen += 1
            assert (tensor.name, tensor.file) == (
                param.hf_names()[number],
                merging.folder / "model.safetensors",
            )
            rows = tensor.shape[0]
            for block in (1, 5, rows):
                monkeypatch.setattr(merge, "_BLOCK", block * right.shape[1])
                for start, stop in ((0, rows), (0, 1), (1, 7), (rows - 2, rows), (3, 3), (rows // 2, rows)):
                    found = tensor.read(start, stop)
                    assert found.dtype == np.float32
                    np.testing.assert_allclose(found, right[start:stop], rtol=1e-5, atol=1e-5)
    assert seen == {"llama": 5, "gpt2": 2, "separate": 6, "stacked on separate": 7, "stacked": 5}.get(case, 4)


@pytest.mark.parametrize("cast", [None, "F16"])
@pytest.mark.parametrize("case", CASES)
def test_files_have_each_merged_tensor_in_the_dtype_asked_for(
    case: str, cast: str | None, tmp_path: Path
) -> None:
    merging = Merging(case, tmp_path / "base")
    base = open_checkpoint(merging.folder)
    merge_to_hf(base, merging.adapter, tmp_path / "merged", cast=cast, max_shard_bytes=40_000)
    files = sorted((tmp_path / "merged").glob("*.safetensors"))
    assert len(files) > 1
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == merging.tensors.keys()
    assert {tensor.dtype.name for tensor in found.values()} == {"float16" if cast else "float32"}
    near = 2e-3 if cast else 1e-5
    for param in merging.source().params:
        for number, name in enumerate(param.hf_names()):
            own = found[name][param.expert] if param.stacked else found[name]
            np.testing.assert_allclose(own, merging.truth(param, number), rtol=near, atol=near, err_msg=name)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == (
        "float16" if cast else "float32"
    )


@pytest.mark.parametrize(
    ("rows", "block", "start", "stop", "blocks"),
    [
        (10, 12, 0, 10, [(0, 3), (3, 6), (6, 9), (9, 10)]),
        (10, 12, 4, 7, [(3, 6), (6, 9)]),
        (10, 12, 9, 10, [(9, 10)]),
        (10, 12, 3, 6, [(3, 6)]),
        (10, 4, 2, 4, [(2, 3), (3, 4)]),
        (10, 1, 2, 4, [(2, 3), (3, 4)]),
        (10, 1000, 2, 4, [(0, 10)]),
    ],
)
def test_blocks_do_not_depend_on_the_range_that_is_read(
    rows: int, block: int, start: int, stop: int, blocks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "_BLOCK", block)
    tensor = MergedTensor(None, None, 0, (rows, 4), "F32")  # type: ignore[arg-type]
    assert list(tensor._blocks(start, stop)) == blocks


@pytest.mark.parametrize("row", [0, 127])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("base", "1 tensor has values .*model.safetensors: {name} \\(1 value\\); repair the checkpoint"),
        ("adapter", "the adapter's 1 tensor has values .*lora_B.weight \\(1 value\\); repair the adapter"),
        ("overflow", "values that are not finite in float16; the adapter's scale is too large"),
    ],
)
def test_the_operand_that_is_not_finite_is_named(
    fault: str, words: str, row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "_BLOCK", 1)
    merging = Merging("llama", tmp_path / "base", "float16")
    name = "model.layers.1.self_attn.q_proj.weight"
    row %= len(merging.tensors[name])
    if fault == "base":
        merging.tensors[name][row, 3] = np.nan
        merging.write()
    else:
        factor = merging.factors[f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"]
        factor[row, 1] = np.inf if fault == "adapter" else 1e8
    source = merging.source()
    (param,) = [each for each in source.params if name in each.hf_names()]
    tensor: Any = source.parts(param)[0].info
    with pytest.raises(McaError, match=f"^{name}: merging gives .*{words.format(name=name)}$"):
        tensor.read()


@pytest.mark.parametrize(("dtype", "exact"), [("float32", 0.1 + 0.2), ("float64", 0.1 + 0.2)])
def test_a_product_is_computed_wide_and_rounded_once(dtype: str, exact: float) -> None:
    kind = np.dtype(dtype)
    weight = np.full((1, 1), 0.1, kind)
    assert add_product(weight, np.full((2, 1), 0.5, kind), np.full((1, 2), 0.1, kind), 2.0)
    assert weight[0, 0] == pytest.approx(exact, rel=1e-15 if dtype == "float64" else 1e-7)
    half = np.full((1, 1), 60000, np.float16)
    assert not add_product(half, np.ones((1, 1), np.float32), np.full((1, 1), 8000, np.float32), 1.0)
    wide = np.full((1, 1), 3e38, np.float32)
    assert not add_product(wide, np.ones((1, 1), np.float32), np.full((1, 1), 3e38, np.float32), 1.0)
