"""HF -> MCA -> HF gives every tensor back bit for bit, and any layout equals any other."""

import json
import shutil
from pathlib import Path

import pytest
from files import LAYOUT, assert_same_tensors, layout_flags, tree
from tiny_hf import ALIKE, ALL

from mca_config.checks import check_layout
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_convert.cli import main

DENSE = [
    {},
    {"tp": 2},
    {"tp": 4},
    {"pp": 2},
    {"pp": 4},
    {"tp": 2, "pp": 2, "vpp": 2},
    {"pp": 3, "first": 2},
    {"pp": 3, "last": 2},
    {"tp": 2, "pp": 2, "string": "Ettt|tL"},
]
EXPERTS = [
    {"ep": 2},
    {"ep": 4, "pp": 2},
    {"tp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "etp": 1},
    {"etp": 2},
    {"tp": 2, "pp": 2, "vpp": 2, "ep": 4, "etp": 2},
]
DTYPES = ("float32", "bfloat16", "float16")


def trainable(case: str, layout: dict) -> dict:
    """``layout``, but for experts with biases, which cannot be cut."""
    return {**layout, "etp": 1} if case == "gpt_oss" else layout


@pytest.mark.cases(
    60,
    always=[
        # an architecture each: dense, experts, MLA, states, windows
        *("qwen2-0", "qwen3_5_text-1", "gemma3_text-2", "phi3-0", "nemotron_h-dense-1"),
        *("qwen2_moe-2", "qwen3_next-0", "deepseek_v3-1"),
    ],
)
@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize("case", sorted(ALL))
def test_round_trip_is_bit_exact_on_every_layout(
    case: str, third: int, tiny, convert, tmp_path: Path
) -> None:
    """Each case takes every third layout, and the next third begins one layout later."""
    config = McaModelConfig.load(convert(tiny(case), "any"))
    for number, layout in enumerate(DENSE + (EXPERTS if config.num_experts else [])):
        if number % 3 != third:
            continue
        source = tiny(case, DTYPES[(number + number // 3) % len(DTYPES)])
        layout = trainable(case, layout)
        if check_layout(config, ParallelLayout(**{LAYOUT[key]: size for key, size in layout.items()})):
            target = tmp_path / f"refused{number}"
            assert (
                main([f"--checkpoint_path={source}", f"--output_path={target}", *layout_flags(layout)]) == 1
            )
            continue
        mca = convert(source, f"mca{number}", **layout)
        back = convert(mca, f"hf{number}")
        assert_same_tensors_and_config(source, back)
        shutil.rmtree(mca)
        shutil.rmtree(back)


def assert_same_tensors_and_config(source: Path, back: Path) -> None:
    assert_same_tensors(source, back)
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


CUT = [{"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2, "vpp": 2}, {"pp": 3, "last": 2}, {"tp": 2}]
CUT_EXPERTS = [
    {"tp": 2, "ep": 2, "etp": 1, "pp": 2},
    {"ep": 2, "pp": 2},
    {"tp": 2, "pp": 2, "vpp": 2, "ep": 4, "etp": 1},
    {"ep": 4},
]


@pytest.mark.qualify
@pytest.mark.parametrize("case", sorted(ALIKE))
def test_families_of_shared_parts_come_back_from_one_layout(case: str, tiny, convert) -> None:
    """From the first that the model can be trained in; each begins with another."""
    source, number = tiny(case, "bfloat16"), sorted(ALIKE).index(case)
    config = McaModelConfig.load(convert(source, "any"))
    layouts = CUT_EXPERTS if config.num_experts else CUT
    turned = layouts[number % len(layouts) :] + layouts[: number % len(layouts)]
    fitting = [
        layout
        for layout in turned
        if not check_layout(config, ParallelLayout(**{LAYOUT[key]: size for key, size in layout.items()}))
    ]
    back = convert(convert(source, "mca", **fitting[0]), "hf")
    assert_same_tensors_and_config(source, back)


@pytest.mark.cases(20, always=["gpt_oss", "deepseek_v3", "qwen3_moe", "nemotron_h", "phi3", "llama"])
@pytest.mark.parametrize("case", sorted(ALL))
def test_verify_finds_them_the_same(case: str, tiny, convert) -> None:
    source = tiny(case, "bfloat16")
    whole = case == "gemma4_text-e2b"  # its layers' own embeddings are made on one stage
    mca = convert(source, "mca", **trainable(case, {"tp": 2, "pp": 1 if whole else 2}))
    assert main(["verify", str(source), str(mca)]) == 0


@pytest.mark.parametrize("case", ["llama", "qwen3-tied", "deepseek_v3", "qwen3_moe"])
def test_resharding_equals_converting_directly(case: str, tiny, convert) -> None:
    source = tiny(case, "bfloat16")
    for start, end in (
        ({}, {"tp": 2, "pp": 2}),
        ({"tp": 4, "pp": 2}, {"tp": 1, "pp": 1}),
        ({"pp": 4}, {"tp": 2}),
    ):
        name = "-".join(f"{key}{value}" for key, value in {**start, **end}.items())
        direct = convert(source, f"direct{name}", **{"pp": 1, "tp": 1} | end)
        first = convert(source, f"first{name}", **start)
        again = convert(first, f"again{name}", "--to", "mca", **{"pp": 1, "tp": 1} | end)
        assert tree(direct) == tree(again)
        assert main(["verify", str(first), str(again)]) == 0


def test_transformers_loads_the_export_and_computes_the_same(tiny, convert) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    source = tiny("qwen3")
    back = convert(convert(source, "mca", tp=2, pp=2), "hf")
    tokens = torch.arange(10)[None]
    logits = [AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (source, back)]
    assert torch.equal(*logits)


def test_side_files_go_along_both_ways(tiny, convert, tmp_path: Path, caplog) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny("llama"), source)
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "chat_template.jinja").write_text("{{ x }}")
    of_a_run = (
        "trainer_state.json",
        "training_args.json",
        "train_log.jsonl",
        "run.json",
        "loss.png",
        "report.html",
    )
    data = ("train.jsonl", "eval.jsonl.zst", "part-0.parquet")
    for name in of_a_run + data:
        (source / name).write_text("{}")
    for name in ("checkpoint-13", "hf", "figures"):
        (source / name).mkdir()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "unknown_field": [1, {"a": None}]}))
    mca = convert(source, "mca", tp=2)
    assert not [name for name in of_a_run + data if (mca / name).exists()]
    assert f"not part of the model: {', '.join(sorted((*data, 'figures')))}" in caplog.text
    back = convert(mca, "hf")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((back / "config.json").read_text())["unknown_field"] == [1, {"a": None}]


def test_export_is_sharded_with_an_index(tiny, convert) -> None:
    source = tiny("llama")
    mca = convert(source, "mca", tp=2)
    back = convert(mca, "hf", "--max_shard_size", "20K")
    files = sorted(file.name for file in back.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert_same_tensors(source, back)
    assert main(["verify", str(back), str(mca)]) == 0
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(back)


def test_vocabulary_is_padded_with_zeros_and_cut_again(tiny, convert) -> None:
    from mca_models.checkpoint.mca_directory import McaSource

    mca = convert(tiny("llama"), "mca", tp=4)  # 70 rows: 18 on each rank, 2 of them padding
    source = McaSource(mca)
    pieces = [part.info.array() for part in source.parts(source.params[0])]
    assert [piece.shape[0] for piece in pieces] == [18] * 4
    assert not pieces[-1][16:].any() and pieces[-1][15].any()
    assert source.config.vocab_size == 70
    again = convert(mca, "again", "--to", "mca", tp=2)
    assert McaSource(again).full_shape(source.params[0]) == (70, 32)


def test_a_repeated_tied_head_must_repeat_the_embedding(tiny, convert, tmp_path: Path, capsys) -> None:
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((tiny("llama-tied") / "config.json").read_bytes())
    tensors = load_file(tiny("llama-tied") / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    back = convert(convert(source, "mca", pp=2), "hf")
    assert_same_tensors(source, back)  # the export writes what the source had
    tensors["lm_head.weight"][3, 2] += 1
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert main(["--checkpoint_path", str(source), "--output_path", str(tmp_path / "no")]) == 1
    assert "lm_head.weight must repeat model.embed_tokens.weight" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_x_k1_is_converted_as_published(tiny, convert, tmp_path: Path) -> None:
    """Published files have no expert biases, and norms of dense layers that nothing reads."""
    from safetensors.numpy import load_file, save_file

    source = tmp_path / "published"
    shutil.copytree(tiny("axk1"), source)
    tensors = load_file(source / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not name.endswith("e_score_correction_bias")}
    norm = kept["model.layers.1.post_mlp_layernorm.weight"]
    unread = {f"model.layers.{layer}.post_mlp_layernorm.weight": norm for layer in (0, 2)}
    save_file(kept | unread, source / "model.safetensors", {"format": "pt"})
    back = convert(convert(source, "mca", tp=2, pp=2), "back")
    found = load_file(back / "model.safetensors")
    assert found.keys() == kept.keys()
    assert all(found[name].tobytes() == each.tobytes() for name, each in kept.items())
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
