"""Adapters that peft saved: to MCA and back, cut, and merged."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapters
import numpy as np
import peft
import pytest
import torch
from merged_files import merge_to_hf
from safetensors.torch import load_file, save_file

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_models.checkpoint_kinds import load_model_config, open_checkpoint
from mca_models.lora import (
    AdapterConfig,
    convert_adapter,
    merge,
    open_adapter,
    rules_for_training,
    write_mca_adapter,
    write_peft,
)
from mca_models.lora.merge import MergedSource
from mca_models.lora.rules import rules_from_names
from mca_models.lora.targets import linear_targets
from mca_models.storage.byte_ranges import Move
from mca_models.templates import config_from_hf

DENSE_LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    ParallelLayout(tensor_model_parallel_size=4),  # more ranks than query groups
    ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
]
EXPERT_LAYOUTS = [
    ParallelLayout(expert_model_parallel_size=2),
    ParallelLayout(tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
    ParallelLayout(tensor_model_parallel_size=2, expert_model_parallel_size=4, expert_tensor_parallel_size=2),
]


DEFAULT = pytest.mark.cases(0, always=["deepseek_v3", "llama-saved", "qwen3_moe"])
"""Together these have every kind of module."""


@pytest.fixture(scope="module", params=list(adapters.CASES))
def saved(request: Any, tmp_path_factory: Any) -> tuple[Path, Path]:
    return adapters.save(request.param, tmp_path_factory.mktemp("adapter"))


def layouts(base: Path) -> list[ParallelLayout]:
    return DENSE_LAYOUTS + (EXPERT_LAYOUTS if open_checkpoint(base).config.num_experts else [])


@DEFAULT
def test_round_trip_is_bit_exact_in_every_layout(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, source = saved
    adapter = open_adapter(source, open_checkpoint(base).config)
    for i, layout in enumerate(layouts(base)):
        write_mca_adapter(adapter, layout, tmp_path / f"mca{i}")
        again = open_adapter(tmp_path / f"mca{i}")
        assert again.model.layout == layout
        write_peft(again, tmp_path / f"peft{i}")
        adapters.same_files(source, tmp_path / f"peft{i}")


@DEFAULT
def test_merging_equals_peft(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, source = saved
    checkpoint = open_checkpoint(base)
    merge_to_hf(checkpoint, open_adapter(source, checkpoint.config), tmp_path / "merged")
    theirs = peft.PeftModel.from_pretrained(adapters.base_model(base), source)
    ours = adapters.base_model(tmp_path / "merged")
    torch.testing.assert_close(adapters.logits(ours), adapters.logits(theirs), atol=2e-5, rtol=1e-4)
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["qwen2", "llama-saved", "qwen3_moe"])
def test_merging_in_bf16_rounds_once(name: str, tmp_path: Path) -> None:
    base, source = adapters.save(name, tmp_path, "bfloat16")
    checkpoint = open_checkpoint(base)
    merge_to_hf(checkpoint, open_adapter(source, checkpoint.config), tmp_path / "merged")
    ours = adapters.base_model(tmp_path / "merged", "bfloat16").state_dict()
    theirs = peft.PeftModel.from_pretrained(adapters.base_model(base, "bfloat16"), source).merge_and_unload()
    for key, tensor in theirs.state_dict().items():
        assert ours[key].dtype == torch.bfloat16
        if "experts" in key:  # peft rounds the product of stacked experts before it adds
            torch.testing.assert_close(ours[key], tensor, atol=2**-9, rtol=2**-7)
        else:
            assert torch.equal(ours[key], tensor), key


@DEFAULT
def test_merging_from_a_cut_checkpoint_and_a_cut_adapter_is_the_same(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    base, source = saved
    checkpoint = open_checkpoint(base)
    adapter = open_adapter(source, checkpoint.config)
    write_mca_adapter(adapter, ParallelLayout(tensor_model_parallel_size=2), tmp_path / "mca")
    merge_to_hf(checkpoint, adapter, tmp_path / "a")
    merge_to_hf(checkpoint, open_adapter(tmp_path / "mca"), tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_merging_reads_rows_of_saved_tables_not_the_full_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, source = adapters.save("llama-saved", tmp_path)
    checkpoint = open_checkpoint(base)
    layout = ParallelLayout(tensor_model_parallel_size=2)
    write_mca_adapter(open_adapter(source, checkpoint.config), layout, tmp_path / "mca")
    right = load_file(source / "adapter_model.safetensors")["base_model.model.model.embed_tokens.weight"]
    monkeypatch.setattr(merge, "_BLOCK", 3 * right.shape[1])
    for path in (source, tmp_path / "mca"):
        adapter = open_adapter(path, checkpoint.config)
        merged = MergedSource(checkpoint, replace(adapter, read=lambda param: pytest.fail(param.mca_name())))
        param = next(param for param in merged.params if param.mca_name() in adapter.saved_by_name)
        (table,) = merged.parts(param)
        middle = right.shape[0] // 2  # where the second rank's rows begin
        rows = table.info.array()[middle - 2 : middle + 2]
        assert param.hf_names() == ("model.embed_tokens.weight",)
        np.testing.assert_array_equal(rows, right[middle - 2 : middle + 2].numpy())


@pytest.mark.parametrize(
    "layout", [ParallelLayout(tensor_model_parallel_size=2, expert_model_parallel_size=2)]
)
@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_adapters_on_single_experts(case: str, layout: ParallelLayout, tmp_path: Path) -> None:
    base, source = single_experts(case, tmp_path)
    checkpoint = open_checkpoint(base)
    adapter = open_adapter(source, checkpoint.config)
    write_mca_adapter(adapter, layout, tmp_path / "mca")
    write_peft(open_adapter(tmp_path / "mca"), tmp_path / "peft")
    adapters.same_files(source, tmp_path / "peft")
    merge_to_hf(checkpoint, adapter, tmp_path / "merged")
    if case == "deepseek_v3":
        return  # on loading, peft drops the projections of dense layers and shared experts for the experts'
    theirs = peft.PeftModel.from_pretrained(adapters.base_model(base), source)
    ours = adapters.base_model(tmp_path / "merged")
    torch.testing.assert_close(adapters.logits(ours), adapters.logits(theirs), atol=2e-5, rtol=1e-4)


def single_experts(case: str, folder: Path) -> tuple[Path, Path]:
    """An adapter as transformers 4 gave it to peft: every expert's projections are modules."""
    import tiny_hf

    base = tiny_hf.save(case, folder / "base")
    model = open_checkpoint(base).config
    names = {"mixtral": ["w1", "w2", "w3"]}.get(case, ["gate_proj", "up_proj", "down_proj"])
    experts = [t.module for t in linear_targets(model) if t.base.expert is not None]
    assert {name.rpartition(".")[2] for name in experts} == set(names)
    document = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": [*names, "o_proj"]}
    config = AdapterConfig.from_dict(document)
    rules = rules_for_training(model, config)
    rng = np.random.default_rng(0)
    tensors = {}
    for pair in rules.factors:
        rows, columns = shape_of(base, pair.target.module)
        for param, shape in ((pair.a, (3, columns)), (pair.b, (rows, 3))):
            tensors[param.hf_names()[0]] = torch.from_numpy(rng.normal(0, 0.1, shape).astype(np.float32))
    (folder / "adapter").mkdir()
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(config.to_json())
    return base, folder / "adapter"


def shape_of(base: Path, module: str) -> tuple[int, int]:
    rows, columns = load_file(base / "model.safetensors")[f"{module}.weight"].shape
    return rows, columns


def test_single_experts_merge_into_stacked_files_and_the_other_way_round(tmp_path: Path) -> None:
    """Base and adapter may each see the experts as modules or as stacks."""
    _, stacked_adapter = adapters.save("qwen3_moe", tmp_path / "s")
    base, single_adapter = single_experts("qwen3_moe", tmp_path / "e")
    shutil.copytree(base, tmp_path / "fused")
    tensors = load_file(base / "model.safetensors")
    save_file(fused(tensors), tmp_path / "fused" / "model.safetensors", {"format": "pt"})
    for i, source in enumerate((stacked_adapter, single_adapter)):
        for kind, directory in (("each", base), ("fused", tmp_path / "fused")):
            checkpoint = open_checkpoint(directory)
            merge_to_hf(checkpoint, open_adapter(source, checkpoint.config), tmp_path / f"{kind}{i}")
        each = load_file(tmp_path / f"each{i}" / "model.safetensors")
        stacked = load_file(tmp_path / f"fused{i}" / "model.safetensors")
        assert all(torch.equal(x, stacked[name]) for name, x in fused(each).items())
        assert any(not torch.equal(x, each[name]) for name, x in tensors.items() if "experts" in name)


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {name: x for name, x in tensors.items() if ".experts." not in name}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        halves = [
            torch.cat([tensors[f"{prefix}{e}.{x}_proj.weight"] for x in ("gate", "up")]) for e in range(4)
        ]
        out[f"{prefix}gate_up_proj"] = torch.stack(halves)
        out[f"{prefix}down_proj"] = torch.stack([tensors[f"{prefix}{e}.down_proj.weight"] for e in range(4)])
    return out


def test_pieces_are_cut_as_the_base_is(tmp_path: Path) -> None:
    base, source = adapters.save("qwen2", tmp_path)
    adapter = open_adapter(source, open_checkpoint(base).config)
    tp2 = replace(adapter.model, layout=ParallelLayout(tensor_model_parallel_size=2))
    tp4 = replace(adapter.model, layout=ParallelLayout(tensor_model_parallel_size=4))
    axes = {}
    for name, model in (("tp2", tp2), ("tp4", tp4)):
        rules = rules_for_training(model, adapter.config)
        axes[name] = {p.mca_name().removeprefix("decoder.layers.0."): p.shard.axis for p in rules.params}
    assert axes["tp2"]["self_attention.linear_qkv.lora_A.q_proj.weight"] is None
    assert axes["tp2"]["self_attention.linear_qkv.lora_B.k_proj.weight"] == 0
    assert axes["tp2"]["self_attention.linear_proj.lora_A.o_proj.weight"] == 1
    assert axes["tp2"]["mlp.linear_fc1.lora_B.up_proj.weight"] == 0
    assert axes["tp2"]["mlp.linear_fc2.lora_B.down_proj.weight"] is None
    # two query groups on four ranks: the packed rows are cut inside a group
    assert axes["tp4"]["self_attention.linear_qkv.lora_B.k_proj.weight"] is None
    assert axes["tp4"]["mlp.linear_fc1.lora_B.up_proj.weight"] == 0


def test_which_modules_match_is_as_in_peft(tmp_path: Path) -> None:
    import transformers
    from peft.tuners.tuners_utils import check_target_module_exists

    base, _ = adapters.save("qwen2", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    modules = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert modules == [target.module for target in linear_targets(open_checkpoint(base).config)]
    for settings in (
        {"target_modules": ["q_proj", "1.mlp.up_proj"]},
        {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": 2},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 3], "layers_pattern": "layers"},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 3], "layers_pattern": "h"},
        {"target_modules": r".*[13].*_proj", "exclude_modules": r".*mlp.*"},
        {
            "target_modules": ["up_proj", "lm_head"],
            "exclude_modules": ["3.mlp.up_proj"],
            "modules_to_save": ["lm_head"],
        },
        {"target_modules": ["model.layers.1.self_attn.q_proj"], "layers_to_transform": [0]},
    ):
        theirs = peft.LoraConfig(**settings)
        ours = AdapterConfig.from_dict({"peft_type": "LORA", **settings})
        for module in modules:
            assert ours.targets(module) == bool(check_target_module_exists(theirs, module)), (
                settings,
                module,
            )


def test_converting_directories(tmp_path: Path) -> None:
    base, source = adapters.save("qwen3_moe", tmp_path, "bfloat16")
    (source / "README.md").write_text("a model card")
    (base / "model.safetensors").unlink()  # the configuration is enough
    model = load_model_config(base)
    tp2 = ParallelLayout(tensor_model_parallel_size=2)
    convert_adapter(source, tmp_path / "mca", model=model, layout=tp2)
    convert_adapter(
        tmp_path / "mca", tmp_path / "ep2", to="mca", layout=ParallelLayout(expert_model_parallel_size=2)
    )
    convert_adapter(tmp_path / "ep2", tmp_path / "peft")
    adapters.same_files(source, tmp_path / "peft")
    assert (tmp_path / "peft" / "README.md").read_text() == "a model card"
    assert load_model_config(tmp_path / "mca").layout == tp2
    convert_adapter(source, tmp_path / "half", model=model, to="hf", cast="BF16")
    half = load_file(tmp_path / "half" / "adapter_model.safetensors")
    before = load_file(source / "adapter_model.safetensors")
    assert all(torch.equal(tensor.bfloat16(), half[name]) for name, tensor in before.items())
    with pytest.raises(McaError, match="not empty"):
        convert_adapter(source, tmp_path / "half", model=model)


def test_no_torch_is_needed(tmp_path: Path) -> None:
    base, source = adapters.save("qwen3_moe", tmp_path)
    program = f"""
import sys
from pathlib import Path
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.checkpoint_kinds import load_model_config
from mca_models.lora import MergedSource, open_adapter, write_mca_adapter, write_peft
from mca_models.storage.source import read_shard
base, source, out = Path({str(base)!r}), Path({str(source)!r}), Path({str(tmp_path)!r})
adapter = open_adapter(source, load_model_config(base))
write_mca_adapter(adapter, adapter.model.layout, out / "mca")
write_peft(open_adapter(out / "mca"), out / "peft")
merged = MergedSource(open_checkpoint(base), adapter)
assert all(read_shard(merged, param).size for param in merged.params)
assert not {{"torch", "transformers", "peft", "safetensors"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_merging_may_cast_and_rounds_once_then_too(tmp_path: Path) -> None:
    base, source = adapters.save("qwen3_moe", tmp_path)
    checkpoint = open_checkpoint(base)
    adapter = open_adapter(source, checkpoint.config)
    merge_to_hf(checkpoint, adapter, tmp_path / "fp32")
    merge_to_hf(checkpoint, adapter, tmp_path / "bf16", cast="BF16", max_shard_bytes=20_000)
    files = list((tmp_path / "bf16").glob("*.safetensors"))
    assert len(files) > 1
    cast = {name: tensor for file in files for name, tensor in load_file(file).items()}
    whole = load_file(tmp_path / "fp32" / "model.safetensors")
    assert cast.keys() == whole.keys()
    assert all(torch.equal(tensor.bfloat16(), cast[name]) for name, tensor in whole.items())
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(McaError, match=r"down_proj\.weight: 69999\.7 overflows fp16"):
        big = load_file(base / "model.safetensors")
        big["model.layers.1.mlp.experts.0.down_proj.weight"][0, 0] = 7e4
        save_file(big, base / "model.safetensors", {"format": "pt"})
        merge_to_hf(open_checkpoint(base), adapter, tmp_path / "fp16", cast="F16")


def test_everything_is_widened_router_biases_too(tmp_path: Path) -> None:
    base, source = adapters.save("glm4_moe-gate", tmp_path, "bfloat16")
    checkpoint = open_checkpoint(base)
    merge_to_hf(checkpoint, open_adapter(source, checkpoint.config), tmp_path / "merged", cast="F32")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32}


def test_modules_saved_whole_are_rounded_once_and_never_overflow(tmp_path: Path) -> None:
    base, source = adapters.save("llama-saved", tmp_path)
    name, file = "lm_head.weight", source / "adapter_model.safetensors"
    stored, saved = load_file(base / "model.safetensors"), load_file(file)
    fine = saved[f"base_model.model.{name}"]
    assert not torch.equal(fine, fine.bfloat16().float())
    for dtype, cast in ((torch.bfloat16, "F32"), (torch.float16, None)):
        rounded = {key: x.to(dtype) for key, x in stored.items()}
        save_file(rounded, base / "model.safetensors", {"format": "pt"})
        checkpoint = open_checkpoint(base)
        adapter = open_adapter(source, checkpoint.config)
        merge_to_hf(checkpoint, adapter, tmp_path / str(cast), cast=cast)
        merged = load_file(tmp_path / str(cast) / "model.safetensors")
        assert torch.equal(merged[name], fine.to(merged[name].dtype))
    saved[f"base_model.model.{name}"][3, 4] = 7e4
    save_file(saved, file)
    with pytest.raises(McaError, match=r"lm_head\.weight: 70000 overflows fp16"):
        merge_to_hf(checkpoint, open_adapter(source, checkpoint.config), tmp_path / "large")


def test_all_linear_leaves_routers_and_routed_experts_out() -> None:
    """Follow transformers 5; an adapter from transformers 4, where they are linears, can be read too."""
    import tiny_hf

    model_type, different = tiny_hf.CASES["qwen2_moe"]
    model = config_from_hf({**tiny_hf.SIZE, **different, "model_type": model_type})
    every = AdapterConfig.from_dict({"peft_type": "LORA", "r": 2, "target_modules": "all-linear"})
    labels = {pair.target.label for pair in rules_for_training(model, every).factors}
    assert labels == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "shared_expert_gate"
    }  # fmt: skip
    assert not [
        pair for pair in rules_for_training(model, every).factors if pair.target.base.expert is not None
    ]
    old = [f"base_model.model.{target.module}.lora_A.weight" for target in linear_targets(model)]
    found = rules_from_names(model, every, old)
    assert [pair for pair in found.factors if pair.target.base.expert is not None]
    both = {"target_modules": ["gate_proj"], "target_parameters": ["experts.gate_up_proj"]}
    with pytest.raises(McaError, match="both name the routed experts"):
        rules_for_training(model, AdapterConfig.from_dict({"peft_type": "LORA", **both}))


@pytest.mark.parametrize("name", ["llama-head", "phi-head"])
def test_what_peft_saved_unasked_is_kept_and_not_trained(name: str, tmp_path: Path) -> None:
    base, source = adapters.save(name, tmp_path)
    rules = open_adapter(source, open_checkpoint(base).config).rules
    assert not rules.saved
    kept = {param.mca_name() for param in rules.kept}
    assert kept == {"output_layer.weight", *(["output_layer.bias"] if name == "phi-head" else [])}
    assert all(".lm_head.base_layer." in name for param in rules.kept for name in param.hf_names())


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_rows_of_a_merged_tensor_are_those_of_the_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, source = adapters.save(name, tmp_path)
    checkpoint = open_checkpoint(base)
    merged = MergedSource(checkpoint, open_adapter(source, checkpoint.config))
    params = [param for param in merged.params if param.layer in (None, 0) and merged.touches(param)]
    tensors = [part.info for param in params for part in merged.parts(param)]
    assert len(tensors) > 5
    if name == "qwen2":
        theirs = [key for key in load_file(source / "adapter_model.safetensors") if ".layers.0." in key]
        changed = {
            f"{key.removeprefix('base_model.model.').rpartition('.lora_')[0]}.weight" for key in theirs
        }
        assert changed == {tensor.name for tensor in tensors if isinstance(tensor, merge.MergedTensor)}
    for tensor in tensors:
        assert tensor.file == base / "model.safetensors"
        whole, rows, width = tensor.read(), tensor.shape[0], prod(tensor.shape[1:])
        for block in (1, 3, rows - 1):
            monkeypatch.setattr(merge, "_BLOCK", block * width)
            blocks: list[int] = []
            monkeypatch.setattr(merge.MergedTensor, "_block", counted_rows(blocks))
            for start, stop in ((0, rows), (1, rows), (2, rows - 1), (rows // 2, rows // 2 + 1)):
                np.testing.assert_allclose(  # a product of other rows may round differently
                    tensor.read(start, stop), whole[start:stop], rtol=1e-6, atol=1e-6, err_msg=tensor.name
                )
            assert max(blocks, default=block) == block, "no more rows at a time than the memory allows"
            monkeypatch.undo()


def counted_rows(blocks: list[int]) -> Any:
    """Return ``MergedTensor._block`` that adds the rows of each block to ``blocks``."""
    plain = merge.MergedTensor._block

    def block(tensor: Any, start: int, stop: int) -> Any:
        blocks.append(stop - start)
        return plain(tensor, start, stop)

    return block


def test_any_range_is_filled_as_in_the_whole() -> None:
    """A tensor of 14 elements: zeros, then elements of two parts, and zeros between."""
    parts: Any = [
        SimpleNamespace(start=0, elements=lambda first=first: np.arange(first, first + 8))
        for first in (1, 101)
    ]
    moves = (Move(0, 2, 1, 4, 1, 4, 4), Move(1, 0, 8, 3, 1, 3, 3))
    gather: Any = SimpleNamespace(zeros=[(0, 1), (5, 8), (11, 14)], moves=moves)
    whole = np.full(14, -1)
    merge.fill(whole, gather, parts)
    assert whole.tolist() == [0, 3, 4, 5, 6, 0, 0, 0, 101, 102, 103, 0, 0, 0]
    for start in range(14):
        for stop in range(start + 1, 15):
            part = np.full(stop - start, -1)
            merge.fill(part, gather, parts, start)
            assert np.array_equal(part, whole[start:stop]), (start, stop)
