"""Families with a vision model: every tensor and every key of ``config.json``, as transformers saves them."""

import copy
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tiny_hf
import tiny_vision
import torch
import transformers
from safetensors.torch import load_file, save_file

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.templates import FAMILIES, config_from_hf, config_to_hf, get_family
from mca_models.templates.parts.passthrough import without_passthrough
from mca_models.templates.shapes import full_shape
from mca_models.weights import Stage

CONFIGS = Path(__file__).parents[1] / "data/vision_configs"
# parameters, of all tensors but those of MTP layers
PUBLISHED = {
    "qwen2.5-vl-72b": pytest.approx(73.4e9, abs=0.1e9),
    "qwen3-vl-235b-a22b": 235_670_022_896,
    "qwen3.5-397b-a17b": 396_802_360_816,
    "glm-4.5v": 107_710_933_120,
    "glm-4.6v": pytest.approx(107.7e9, abs=0.1e9),
    "llava-1.5-7b": 7_063_427_072,
    # written from memory, as the numbers that their pages give
    "llava-1.6-mistral-7b": 7_566_747_648,
    "idefics3-8b-llama3": pytest.approx(8.46e9, abs=0.01e9),
    "llava-onevision-qwen2-7b": pytest.approx(8.03e9, abs=0.01e9),
    "vip-llava-7b": pytest.approx(7.08e9, abs=0.01e9),
    "ovis2-1b": pytest.approx(1.131e9, abs=0.001e9),  # 1.27e9 with a copy of the embedding as head
    "lighton-ocr-1b": 1_005_647_872,
    "glmga": pytest.approx(10.29e9, abs=0.01e9),  # defaults, those of GLM 4.1V
    "glm-ocr": pytest.approx(1.11e9, abs=0.01e9),  # without its MTP layer
    "got-ocr2": pytest.approx(0.56e9, abs=0.01e9),  # defaults of transformers' configuration
    "qianfan-ocr-4b": pytest.approx(
        4.74e9, abs=0.01e9
    ),  # of Qwen 3 4B and defaults of transformers' configuration
    "minicpm-v-4.6": 1_300_659_440,  # written from memory: SigLIP 2 400M, Qwen 3.5 0.8B
    "lfm2-vl-450m": pytest.approx(0.451e9, abs=0.001e9),
    "lfm3-vl-2b": pytest.approx(1.92e9, abs=0.01e9),  # defaults of transformers' configurations
    "smolvlm2-2.2b": pytest.approx(2.25e9, abs=0.01e9),
    "llama-4-scout": pytest.approx(108.64e9, abs=0.01e9),
    "deepseek-vl-7b": pytest.approx(7.2e9, abs=0.2e9),
    "exaone-4.5-33b": pytest.approx(33e9, abs=2e9),
    "kimi-k2.5": pytest.approx(1.0265e12, abs=0.001e12),
    "qwen3-asr-1.7b": pytest.approx(2.04e9, abs=0.01e9),
    "qwen2-audio-7b": pytest.approx(8.40e9, abs=0.01e9),
    "voxtral-mini-3b": pytest.approx(4.68e9, abs=0.01e9),
    "audio-flamingo-3": pytest.approx(8.27e9, abs=0.01e9),
    "glm-asr-nano": pytest.approx(2.14e9, abs=0.01e9),  # defaults of transformers' configuration, a tied head
    "internvl3-78b": 78_408_318_336,
    "gemma-3-27b": 27_432_406_640,
    "aya-vision-8b": 8_631_842_032,
    "command-a-vision": 111_867_525_360,
    "gemma-4-31b": 31_273_088_876,
    "gemma-4-26b-a4b": 25_805_936_206,
    "gemma-4-e2b": 5_104_298_467,
    "gemma-4-e4b": 7_941_101_802,
    "gemma-4-12b": 11_959_730_224,
    "mistral-small-3.2-24b": 24_011_361_280,
    # the thinkers: defaults of transformers' configurations, and the sizes in Qwen's reports of text part and towers
    "qwen2.5-omni-7b": pytest.approx(8.93e9, abs=0.01e9),
    "qwen3-omni-30b-a3b": pytest.approx(31.72e9, abs=0.01e9),
}


SEEING = {kind for kind, family in FAMILIES.items() if family.vision and not family.built}


class Checkpoint:
    """Saved files of transformers for one case, read once."""

    def __init__(self, case: str, directory: Path) -> None:
        self.case = case
        model = tiny_vision.model_of(case)
        self.modules = [name for name, _ in model.named_parameters()]
        self.path = tiny_vision.save_model(model, directory)
        self.hf = tiny_hf.read_config(self.path)
        self.tensors = load_file(self.path / "model.safetensors")
        self.shapes = {name: tuple(x.shape) for name, x in self.tensors.items()}
        self.family = get_family(self.hf["model_type"])
        self.config = self.family.with_checkpoint_names(
            config_from_hf(self.hf), self.tensors.keys(), self.shapes
        )


@pytest.fixture(scope="module", params=list(tiny_vision.CASES))
def checkpoint(request: Any, tmp_path_factory: Any) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("factor", [None, 1, 3])
@pytest.mark.parametrize("kind", ["aya_vision", "cohere2_vision"])
def test_the_projector_merges_a_square_of_patches(kind: str, factor: int | None) -> None:
    document = tiny_vision.described(kind)
    if factor is None:
        del document["downsample_factor"]
    else:
        document["downsample_factor"] = factor
    family, config = get_family(kind), config_from_hf(document)
    shapes = family.hf_shapes(family.with_module_names(config))
    merged = document["vision_config"]["hidden_size"] * (factor or 2) ** 2
    assert shapes["model.multi_modal_projector.linear_1.weight"][1] == merged


def test_every_family_has_a_case() -> None:
    assert {model_type for model_type, *_ in tiny_vision.CASES.values()} == SEEING


def test_every_tensor_is_known_by_name_and_shape(checkpoint: Checkpoint) -> None:
    assert checkpoint.family.hf_shapes(checkpoint.config) == checkpoint.shapes
    names = [param.mca_name() for param in checkpoint.family.params(checkpoint.config)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("size", [1, 2])
def test_round_trip_is_bit_exact(checkpoint: Checkpoint, size: int) -> None:
    for param in checkpoint.family.params(checkpoint.config):
        source = [checkpoint.tensors[name] for name in param.hf_names()]
        pieces = [param.to_mca(source, rank, size) for rank in range(size)]
        assert tuple(param.to_full(source).shape) == full_shape(param, checkpoint.config)
        for before, after in zip(source, param.to_hf(pieces), strict=True):
            assert torch.equal(before[param.expert] if param.stacked else before, after), param.mca_name()


def test_config_survives_both_ways(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    assert config_to_hf(config) == checkpoint.hf
    assert McaModelConfig.from_json(config.to_json()) == config
    cast = config_to_hf(replace(config, dtype="bfloat16", vocab_size=80))
    parts = [cast, *(part for part in cast.values() if isinstance(part, dict))]
    assert {part["dtype"] for part in parts if "dtype" in part} == {"bfloat16"}
    assert cast["text_config"]["vocab_size"] == 80
    assert config_from_hf(cast).dtype == "bfloat16"


def test_a_config_json_made_from_scratch_means_the_same(checkpoint: Checkpoint) -> None:
    config = config_from_hf(checkpoint.hf)
    again = config_from_hf(config_to_hf(replace(config, hf_config={})))
    beside: dict[str, Any] = {"hf_config": {}, "vision_fields": {}}
    assert again.replace_fields(**beside) == config.replace_fields(**beside)


def test_both_spellings_are_read_and_written(checkpoint: Checkpoint) -> None:
    family, config = checkpoint.family, config_from_hf(checkpoint.hf)
    assert family.vision is not None
    for which in range(len(family.vision.spellings)):
        spelled = replace(checkpoint.config, extra={**checkpoint.config.extra, "hf_spelling": which})
        shapes = family.hf_shapes(spelled)
        assert family.hf_shapes(family.with_checkpoint_names(config, shapes.keys(), shapes)) == shapes
    named = {
        name
        for name in family.hf_shapes(family.with_module_names(checkpoint.config))
        if "experts" not in name
    }
    assert named >= {name for name in checkpoint.modules if "experts" not in name}


@pytest.mark.parametrize(
    ("case", "file"),
    [
        ("kimi_k25-moe", "vision_tower.encoder.blocks.0.wqkv.weight"),
        ("qianfan_ocr", "vision_model.encoder.layers.0.attn.qkv.weight"),
    ],
)
def test_fused_tensors_of_a_tower_are_transformers_projections(case: str, file: str, tmp_path: Path) -> None:
    """From the names of modules, and in published files, which transformers reads."""
    made = Checkpoint(case, tmp_path / "saved")
    state = {name: x.detach() for name, x in tiny_vision.model_of(case).state_dict().items()}
    assert made.family.vision is not None
    modules = made.family.vision.params(made.family.with_module_names(made.config))
    fused = {param.mca: param.to_full([state[name] for name in param.hf_names()]) for param in modules}
    saved = made.family.params(made.config)
    whole = {
        param.mca_name(): param.to_full([made.tensors[name] for name in param.hf_names()]) for param in saved
    }
    assert sum(".wqkv." in name for name in fused) == 4
    assert all(torch.equal(x, whole[name]) for name, x in fused.items())
    published = replace(made.config, extra={**made.config.extra, "hf_spelling": 0})
    names = {param.mca_name(): param for param in made.family.params(published)}
    files = {
        name: x.contiguous()
        for key, param in names.items()
        for name, x in zip(param.hf_names(), param.from_full(whole[key]), strict=True)
    }
    assert file in files
    (tmp_path / "published").mkdir()
    save_file(files, tmp_path / "published/model.safetensors", {"format": "pt"})
    (tmp_path / "published/config.json").write_text(json.dumps(made.hf))
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "published").state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(x, state[name]) for name, x in loaded.items())


def test_prediction_layers_of_a_text_part_are_carried(tmp_path: Path) -> None:
    directory = tiny_vision.save("glm_ocr", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    more = {
        f"model.language_model.layers.4.{name}.weight": torch.zeros(3, 2) for name in ("eh_proj", "enorm")
    }
    save_file({**tensors, **more}, directory / "model.safetensors", {"format": "pt"})
    source = open_checkpoint(directory)
    known = {name for param in source.params for name in param.hf_names()}
    assert known == {*tensors, *more}
    built = without_passthrough(source.config)
    names = {name for param in get_family("glm_ocr").params(built) for name in param.hf_names()}
    assert names == tensors.keys()


@pytest.mark.cases(8)
@pytest.mark.parametrize("kind", sorted(SEEING))
@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("outer", [None, False, True])
def test_whether_the_head_is_tied_is_as_transformers_has_it(
    kind: str, inner: bool | None, outer: bool | None
) -> None:
    case = next(case for case, (model_type, *_) in tiny_vision.CASES.items() if model_type == kind)
    hf = tiny_vision.described(case, **said(inner))
    hf = {key: value for key, value in hf.items() if key != "tie_word_embeddings"} | said(outer)
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(hf)))
    with torch.device("meta"):
        model = transformers.AutoModelForMultimodalLM.from_config(config)
    model.tie_weights()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert config_from_hf(hf).head.tie_word_embeddings is tied
    assert config_from_hf(config.to_dict()).head.tie_word_embeddings is tied


def said(tied: bool | None) -> dict[str, bool]:
    return {} if tied is None else {"tie_word_embeddings": tied}


def test_published_experts_lie_the_other_way(tmp_path: Path) -> None:
    saved = Checkpoint("qwen3_vl_moe", tmp_path)
    turned = {
        name: x.transpose(1, 2).contiguous() if ".experts." in name else x
        for name, x in saved.tensors.items()
    }
    shapes = {name: tuple(x.shape) for name, x in turned.items()}
    found = saved.family.with_checkpoint_names(config_from_hf(saved.hf), turned.keys(), shapes)
    assert saved.family.hf_shapes(found) == shapes
    same = zip(saved.family.params(found), saved.family.params(saved.config), strict=True)
    for published, own in same:
        first = published.to_full([turned[name] for name in published.hf_names()])
        second = own.to_full([saved.tensors[name] for name in own.hf_names()])
        assert torch.equal(first, second), own.mca_name()


def test_tensors_that_no_table_names_are_carried(tmp_path: Path, caplog: Any) -> None:
    saved = Checkpoint("gemma3", tmp_path)
    shapes = {**saved.shapes, "vision_tower.head.probe": (1, 1, 16)}
    with caplog.at_level(logging.WARNING):
        found = saved.family.with_checkpoint_names(config_from_hf(saved.hf), shapes.keys(), shapes)
    assert (
        "because mca does not know them: 1 tensor of the vision model (vision_tower.head.probe)"
        in caplog.text
    )
    again = McaModelConfig.from_json(found.to_json())
    assert saved.family.hf_shapes(again) == shapes


@pytest.mark.parametrize("case", ["qwen2_vl", "qwen2_5_vl"])
def test_flat_configurations_mean_the_same(case: str) -> None:
    """Read the published form: keys of the text part next to those of the vision model, with another type of RoPE."""
    hf = tiny_vision.described(case)
    text = hf.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    flat = {**text, **hf, "rope_theta": 1e4, "torch_dtype": "bfloat16"}
    read, nested = config_from_hf(flat), config_from_hf(tiny_vision.described(case))
    beside = {"hf_config": {}, "dtype": "float32"}
    assert replace(read, **beside) == replace(nested, **beside)
    assert config_to_hf(read) == flat
    assert config_to_hf(replace(read, vocab_size=80)) == {**flat, "vocab_size": 80}
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(flat)))
    assert theirs.text_config.rope_parameters["mrope_section"] == list(read.mrope.mrope_section or ())


@pytest.mark.cases(0, always=["minimax_m3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("kind", sorted(SEEING))
def test_absent_keys_mean_what_transformers_says(kind: str) -> None:
    text: dict[str, Any] = {
        "internvl": {"model_type": "qwen2"},
        "mistral3": {"model_type": "mistral"},
        "exaone4_5": {"model_type": "exaone4"},
        "ovis2": {"hidden_size": 1536, "vocab_size": 151643},  # defaults of transformers at the top
        "glm4v_moe": {"head_dim": 128},  # of the default, 42, transformers rotates an odd number of channels
    }.get(kind, {})
    hearing = ("qwen2_audio", "qwen3_asr", "voxtral", "audioflamingo3", "glmasr")
    towers = ["audio_config"] if kind in hearing else ["vision_config"]
    towers += ["audio_config"] * ("omni" in kind)
    empty: dict[str, Any] = {tower: {} for tower in towers}
    full = transformers.AutoConfig.for_model(kind, text_config=dict(text), **empty).to_dict()
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")
    sizes += (
        "max_position_embeddings",
        "head_dim",
        "moe_intermediate_size",
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("n_routed_experts", "num_experts_per_tok"),
        "shared_expert_intermediate_size",
    )
    least = {key: full["text_config"][key] for key in sizes if key in full["text_config"]}
    bare = {"model_type": kind, "text_config": {**text, **least}, **empty}
    written, guessed = config_from_hf(full), config_from_hf(bare)
    same: dict[str, Any] = {"hf_config": {}, "dtype": "float32", "vision_fields": {}, "extra": {}}
    assert guessed.replace_fields(**same) == written.replace_fields(**same)
    family = get_family(kind)
    assert vision_shapes(guessed) == vision_shapes(written), family


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe"])
def test_a_load_balancing_loss_without_a_coefficient_has_transformers(kind: str) -> None:
    hf = tiny_vision.described(kind)
    hf["text_config"] = {**hf["text_config"], "output_router_logits": True}
    hf["text_config"].pop("router_aux_loss_coef", None)
    config = config_from_hf(hf)
    theirs = transformers.AutoConfig.for_model(kind).text_config.router_aux_loss_coef
    assert (config.moe.moe_aux_loss_coeff, config.moe.moe_router_load_balancing_type) == (theirs, "aux_loss")


def vision_shapes(config: McaModelConfig) -> dict[str, tuple[int, ...]]:
    params = get_family(config.model_type).params(config)
    return {param.mca: full_shape(param, config) for param in params if param.stage is Stage.VISION}


def published() -> Iterator[str]:
    yield from sorted(path.stem for path in CONFIGS.glob("*.json"))


def test_every_published_config_is_checked() -> None:
    assert set(published()) == set(PUBLISHED)


@pytest.mark.cases(0, always=["internvl3-78b"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_transformers_tensors(name: str) -> None:
    hf = json.loads((CONFIGS / f"{name}.json").read_text())
    with torch.device("meta"):
        model = transformers.AutoModelForMultimodalLM.from_config(
            transformers.AutoConfig.for_model(**json.loads(json.dumps(hf)))
        )
    expected = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    config, family = config_from_hf(hf), get_family(hf["model_type"])
    found = family.with_checkpoint_names(config.replace_fields(mtp_num_layers=0), expected.keys(), expected)
    shapes = family.hf_shapes(family.with_module_names(found))
    if config.head.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    assert shapes == expected
    assert sum(map(prod, shapes.values())) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("qwen3_vl", {"vision_config": None}, "'vision_config' must be an object"),
        (
            "internvl",
            {"text_config": {"model_type": "phi3"}},
            "text_config is of model_type 'phi3'; supported",
        ),
        (
            "qwen2_vl",
            {"text_config": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}},
            "'rope_type' is 'dynamic' with mrope_section",
        ),
        (
            "qwen2_vl",
            {"text_config": {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}},
            "'rope_type' is 'dynamic' with mrope_section",
        ),
        ("qwen2_audio", {"audio_config": None}, "'audio_config' must be an object"),
        ("ovis2", {"vocab_size": 5}, "'vocab_size' is 5, but 70 in text_config; they must be equal"),
        ("qwen3_vl", {"is_causal": False}, "'is_causal' is False"),
        ("qwen3_vl", {"text_config": {"is_causal": False}}, "'is_causal' is False"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(
    case: str, change: dict[str, Any], message: str
) -> None:
    hf = tiny_vision.described(case)
    for key, value in change.items():
        hf[key] = {**hf[key], **value} if isinstance(value, dict) else value
    with pytest.raises(McaError, match=message):
        config_from_hf(hf)


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("internvl", {"image_size": [28, 56], "patch_size": [14, 28]}),
        ("internvl", {"image_size": [56, 28], "patch_size": [7, 14]}),
    ],
)
def test_height_and_width_of_a_tower_are_kept_apart(case: str, sizes: dict[str, list[int]]) -> None:
    hf = tiny_vision.described(case)
    hf["vision_config"] |= sizes
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(
            transformers.AutoConfig.for_model(**copy.deepcopy(hf))
        )
    expected = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    family = get_family(hf["model_type"])
    config = family.with_checkpoint_names(config_from_hf(hf), expected.keys(), expected)
    assert family.hf_shapes(config) == expected


@pytest.mark.parametrize("layer", [-1, 3, True, None, "1"])
def test_a_tower_of_minicpm_merges_windows_behind_one_of_its_layers(layer: Any) -> None:
    hf = tiny_vision.described("minicpmv4_6") | {"insert_layer_id": layer}
    family, config = get_family("minicpmv4_6"), config_from_hf(hf)
    assert family.vision is not None and family.vision.tokens_of_size is not None
    with pytest.raises(
        McaError, match=rf"'insert_layer_id' of config\.json is {layer!r}; expected a .* 0 to 2"
    ):
        family.vision.tokens_of_size(config, 8, 8)
    without = config_from_hf(hf | {"downsample_mode": "4x"})
    assert family.vision.tokens_of_size(without, 8, 8) == 16
    with pytest.raises(McaError, match=r"'downsample_mode' of config\.json is '2x'; expected '16x' or '4x'"):
        family.vision.tokens_of_size(config_from_hf(hf | {"downsample_mode": "2x"}), 8, 8)


@pytest.mark.parametrize("key", ["window_kernel_size", "merge_kernel_size"])
def test_minicpm_merges_two_by_two_patches_alone(key: str) -> None:
    hf = tiny_vision.described("minicpmv4_6")
    values = hf["vision_config"] if key == "window_kernel_size" else hf
    values[key] = [4, 4]
    with pytest.raises(McaError, match=rf"'{key}' of config\.json is \[4, 4\]; expected \[2, 2\]"):
        config_from_hf(hf)
