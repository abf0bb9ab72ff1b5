"""``mca-train plan`` as a user runs it. Its figures are tested in ``plan``."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mca_config.layout import ParallelLayout
from mca_models.templates import config_from_hf
from mca_train.cli import main
from mca_train.run import layout_search, plan_command
from mca_train.run.settings import load_values

pytestmark = pytest.mark.usefixtures("own_threads")

OVERLAP = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
VISION = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 260,
    "video_token_id": 261,
    "vision_start_token_id": 262,
    "vision_end_token_id": 263,
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
}
"""With features of images after each of the first two layers."""


@pytest.fixture
def vision(run, tmp_path):
    """Makes the model one that takes images."""
    path = tmp_path / "model/config.json"
    text = json.loads(path.read_text()) | {"model_type": "qwen3_vl_text", "rope_parameters": ROTARY}
    return lambda: path.write_text(json.dumps(VISION | {"text_config": text}))


def test_plan_needs_no_weights(run, capsys):
    path = run(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        gradient_accumulation_steps=4,
        nproc_per_node=8,
    )
    assert main(["plan", path]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "run          mca-train sft by its keys; for another kind: mca-train plan pretrain|sft|dpo|"
    )
    assert "data parallel 2" in text
    assert "bubble       20.0%" in text
    assert "2-3 head" in text
    assert "global batch 64 samples" in text
    assert main(["plan", path, "--sequence_packing"]) == 0
    assert "global batch 64 packs" in capsys.readouterr().out


def test_plan_is_no_rank_and_fits_a_device(run, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    path = run(tensor_model_parallel_size=2)
    assert main(["plan", "sft", path, "--gpus", "16", "--device", "gib:4.001"]) == 0
    text = capsys.readouterr().out
    assert "data parallel 8" in text
    (stage,) = [line for line in text.splitlines() if line.startswith("    0  embedding 0-3 head")]
    assert "  does not fit: " in stage and stage.endswith(" GiB too much")
    assert "makes it fit" in text and " GiB on the fullest stage)\n" in text
    assert main(["plan", "sft", path, "--gpus", "16", "--device", "h200"]) == 0
    assert "fit" not in capsys.readouterr().out
    assert main(["plan", "sft", path, "--gpus", "16", "--device", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["version"], found["world_size"]) == ("mca-train/plan", 1, 16)
    assert [stage["fits"] for stage in found["stages"]] == [True]
    assert main(["plan", "sft", path, "--gpus", "7", "--json"]) == 2
    assert "7 ranks cannot be divided" in json.loads(capsys.readouterr().out)["problems"][0]


def test_fp8_of_a_device_is_planned_on_a_machine_without(run, capsys):
    path, needs = run(bf16=True), {}
    for name, words in {"bf16": [], "fp8": ["--fp8", "hybrid"]}.items():
        assert main(["plan", "sft", path, "--device", "h100-80", "--json", *words]) == 0
        (needs[name],) = json.loads(capsys.readouterr().out)["stages"]
    layers = needs["bf16"]["parameters"] - 264 * 64 - 64  # a tied embedding and the last norm
    assert needs["fp8"]["weights"] == needs["bf16"]["weights"] + 2 * layers
    assert needs["fp8"]["activations"] < needs["bf16"]["activations"]
    assert main(["plan", "sft", path, "--fp8", "hybrid"]) == 2
    assert "fp8 needs CUDA" in capsys.readouterr().out


OF_ENGINE = {
    "attention_backend": "flash",
    "cp_comm_type": "p2p",
    "moe_permute_fusion": True,
    "apply_rope_fusion": True,
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "te",
    "gradient_accumulation_fusion": True,
    "moe_token_dispatcher_type": "flex",
}


@pytest.mark.parametrize("where", [{"transformer_impl": "transformer_engine"}, {}])
def test_what_only_a_device_does_is_planned_for_one_and_refused_on_a_machine_without(run, where, capsys):
    path = run(bf16=True, context_parallel_size=2, **OF_ENGINE, **where)
    assert main(["plan", "sft", path, "--gpus", "2", "--device", "h100-80"]) == 0
    assert "Transformer Engine's, on h100-80" in capsys.readouterr().out
    assert main(["plan", "sft", path, "--gpus", "2", "--device", "h100-80", "--search"]) == 0
    assert "1. tp 1" in capsys.readouterr().out
    assert main(["plan", "sft", path, "--gpus", "2"]) == (0 if where else 2)
    assert ("attention_backend flash needs" in capsys.readouterr().out) == (not where)


def test_a_dry_run_for_a_device_keeps_what_this_machine_has_too(run, monkeypatch):
    made = []
    monkeypatch.setattr(plan_command, "_dry_run", lambda run, *_, **__: made.append(run.settings.training))
    for dispatcher in ("allgather", "flex"):
        path = run(bf16=True, attention_backend="flash", moe_token_dispatcher_type=dispatcher)
        assert main(["plan", "sft", path, "--device", "h100-80", "--dry_run"]) == 0
    assert [each.attention_backend for each in made] == [None, None]
    assert [each.moe_token_dispatcher_type for each in made] == ["allgather", None]


def test_a_plan_and_a_search_refuse_what_the_attention_of_the_device_cannot_do(run, tmp_path, capsys):
    file = tmp_path / "model/config.json"
    oss = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16}
    oss |= {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "swiglu_limit": 7.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "gpt_oss"} | oss))
    path = run(bf16=True, seq_length=8192, per_device_train_batch_size=1, tensor_model_parallel_size=2)
    words = ["plan", "sft", path, "--gpus", "2", "--device", "gib:40"]  # one sample: either tp 2 or cp 2
    cut = ["--context_parallel_size", "2", "--tensor_model_parallel_size", "1"]
    assert main([*words, *cut]) == 2
    refused = capsys.readouterr().out
    assert "ring attention has no sliding window" in refused and "attention sinks under context" in refused
    for backend in ([], ["--attention_backend", "local"]):
        assert main([*words, "--search", "--json", *backend]) == 0
        layouts = json.loads(capsys.readouterr().out)["layouts"]
        assert {found["layout_sizes"]["cp"] for found in layouts} == ({1, 2} if backend else {1})
    assert main([*words, *cut, *backend]) == 0


@pytest.mark.parametrize(("dtype", "key"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_the_dtype_of_the_checkpoint_is_planned_if_no_key_names_another(run, dtype, key, tmp_path, capsys):
    def planned(dtype, **changes):
        file = tmp_path / "model/config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": dtype}))
        assert main(["plan", "dpo", run(nproc_per_node=2, **changes), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["stages"]

    (stage,) = left_out = planned(dtype)
    assert stage["weights"] == stage["reference"] == 2 * stage["parameters"]
    assert stage["optimizer"] == 12 * stage["parameters"], "two moments and the main weights"
    assert left_out == planned("float32", **{key: True}) == planned(dtype, **{key: True})
    if key == "fp16":
        assert main(["plan", "dpo", run(nproc_per_node=2), "--check_for_nan_in_grad", "true"]) == 2
        assert "check_for_nan_in_grad with fp16 needs loss_scale" in capsys.readouterr().out
    (single,) = planned("float32")
    assert single["weights"] == single["reference"] == 4 * single["parameters"]
    assert single["optimizer"] == 8 * single["parameters"]


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_quantised_checkpoint_is_planned_in_the_dtype_that_it_is_read_in(run, method, tmp_path, capsys):
    file = tmp_path / "model/config.json"
    document = json.loads(file.read_text()) | {"quantization_config": {"quant_method": method}}
    for dtype, size in (({}, 2), ({"dtype": "float16"}, 2), ({"dtype": "float32"}, 4)):
        plain = {key: value for key, value in document.items() if key not in ("dtype", "torch_dtype")}
        file.write_text(json.dumps(plain | dtype))
        assert main(["plan", "dpo", run(nproc_per_node=2), "--json"]) == 0
        (stage,) = json.loads(capsys.readouterr().out)["stages"]
        assert stage["weights"] == stage["reference"] == size * stage["parameters"], dtype


@pytest.mark.parametrize(("packing", "unit"), [(True, "packs"), (False, "samples")])
def test_a_search_counts_the_global_batch_as_the_plan(packing, unit, run, capsys):
    words = ["plan", "sft", run(sequence_packing=packing), "--gpus", "1", "--device", "gib:40"]
    assert main(words) == 0
    assert f"global batch 8 {unit}" in capsys.readouterr().out.replace("  ", " ")
    assert main([*words, "--search"]) == 0
    assert f"global batch 8 {unit}" in capsys.readouterr().out


def test_a_search_finds_layouts_that_can_be_run(run, capsys):
    path = run(tensor_model_parallel_size=2, gradient_accumulation_steps=4)
    assert main(["plan", "sft", path, "--gpus", "8", "--search", "--device", "gib:40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layouts"]
    times = [layout["time"]["total"] for layout in found["layouts"]]
    assert times == sorted(times)
    for layout in found["layouts"]:
        keys = [f"--{name}={json.dumps(value)}" for name, value in layout["changes"].items()]
        assert main(["plan", "sft", path, "--gpus", "8", "--device", "gib:40", "--json", *keys]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert planned["global_batch"] == found["samples_per_step"]
        assert max(stage["total"] for stage in planned["stages"]) == layout["bytes"]
    assert main(["plan", "sft", path, "--gpus", "8", "--search"]) == 0
    assert "1. tp" in capsys.readouterr().out


@pytest.mark.parametrize("first", [40, 10_000])
def test_a_search_goes_on_where_the_fastest_layouts_are_refused(run, first, capsys, monkeypatch):
    asked = []

    def problems(task, values, changes, gpus, target):
        asked.append(changes)
        return ("layouts are refused", f"so is {changes}") if len(asked) <= first else ()

    monkeypatch.setattr(layout_search, "_problems", problems)
    words = ["plan", "sft", run(gradient_accumulation_steps=8), "--gpus", "8", "--search"]
    assert main([*words, "--json"]) == (0 if first == 40 else 1)
    found = json.loads(capsys.readouterr().out)
    assert found["checked"] == len(asked) > 40
    assert len(found["layouts"]) == (5 if first == 40 else 0)
    count = min(first, len(asked))
    assert found["refused"][0] == {"problem": "layouts are refused", "layouts": count}
    asked.clear()
    monkeypatch.setattr(layout_search, "_SECONDS", 0.0)
    assert main(words) == 1
    text = capsys.readouterr().out
    assert "layouts fit, but the 40 fastest have problems:\n  - layouts are refused (40 of them)\n" in text
    assert "other problem" in text
    assert "take" not in text and "compare" not in text


@pytest.mark.parametrize(
    ("gib", "length", "reported"),
    [
        (
            4.001,
            128,
            r"alone need .* take 4 devices, set optimizer_cpu_offload: true, or train an adapter \(lora",
        ),
        (4.0004, 64, r"alone need 0.0 GiB of each of 2 devices \(0.0 usable\); take 8 devices$"),
        (4.0025, 1024, "need .* activations do not fit in the rest; take .*, set seq_length: 512"),
    ],
)
def test_a_search_without_a_layout_says_what_would_fit(run, gib, length, reported, capsys):
    path = run(gradient_accumulation_steps=8, bf16=True, seq_length=length)
    words = ["plan", "sft", path, "--gpus", "2", "--search", "--device", f"gib:{gib}"]
    assert main(words) == 1
    text = capsys.readouterr().out
    assert re.search(f"\nno layout fits: weights, gradients and optimizer {reported}", text, re.M)
    if length == 64:
        assert main([*words, "--json"]) == 1
        assert text.endswith(json.loads(capsys.readouterr().out)["shortage"] + "\n")


def test_a_layout_that_nearly_fills_a_device_is_marked(run, capsys):
    words = [
        "plan",
        "sft",
        run(gradient_accumulation_steps=8, bf16=True),
        "--gpus",
        "2",
        "--search",
        "--json",
    ]
    assert main([*words, "--device", "gib:40"]) == 0
    needs = json.loads(capsys.readouterr().out)["layouts"][0]["bytes"] / 1024**3
    for share, is_marked in ((0.97, True), (0.93, False)):
        assert main([*words[:-1], "--device", f"gib:{4 + needs / share:.9f}"]) == 0
        assert (" GiB (tight)\n" in capsys.readouterr().out.partition("2. ")[0]) == is_marked


def test_plan_of_an_adapter_and_of_a_reference(run, capsys):
    assert main(["plan", run(lora_rank=4)]) == 0
    adapted = capsys.readouterr().out
    assert "trained (LoRA)" in adapted
    assert "on host" not in adapted
    assert "reference" not in adapted
    assert main(["plan", run(dpo_beta=0.2)]) == 0
    assert "reference" in capsys.readouterr().out
    assert main(["plan", run(dpo_beta=0.2, lora_rank=4, optimizer_cpu_offload=True)]) == 0
    offloaded = capsys.readouterr().out
    assert "on host" in offloaded
    head, row = offloaded[offloaded.index("stage  layers") :].splitlines()[:2]
    assert re.search(r"total GiB +on host +in flight$", head)
    assert len(row) == len(head), "a size for each column"
    assert "reference" not in offloaded


def test_an_impossible_plan_says_all_reasons(run, capsys):
    assert main(["plan", run(tensor_model_parallel_size=3, pipeline_model_parallel_size=3)]) == 2
    text = capsys.readouterr().out
    assert text.count("  - ") >= 2


def test_a_plan_names_positions_that_the_model_does_not_have(run, capsys):
    assert main(["plan", run(seq_length=129)]) == 0
    assert (
        "seq_length 129: sequences of 129 tokens are longer than the model's 128 positions"
        in capsys.readouterr().out
    )
    assert main(["plan", run(seq_length=128)]) == 0
    assert "positions" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["pretrain", "sft", "dpo", "kto", "reward", "classify"])
def test_a_plan_knows_the_kind_of_run(run, kind, capsys):
    changes = {"num_labels": 3} if kind == "classify" else {}
    assert main(["plan", kind, run(**changes)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == ["run", "mca-train", kind]
    assert ("reference" in text) == (kind in ("dpo", "kto"))


@pytest.mark.parametrize(
    ("kind", "changes", "left"),
    [
        ("kto", {}, ["use_distributed_optimizer", "overlap_grad_reduce"]),
        ("dpo", {"lora_rank": 4}, ["use_distributed_optimizer", "overlap_grad_reduce"]),
        ("sft", {"optimizer": "sgd"}, ["overlap_grad_reduce"]),
        ("sft", {"freeze": []}, ["use_distributed_optimizer", "overlap_grad_reduce"]),
    ],
)
def test_a_search_keeps_to_what_the_run_does_not_exclude(run, kind, changes, left, vision, capsys):
    if "freeze" in changes:
        vision()
    path = run(gradient_accumulation_steps=4, **changes)
    assert main(["plan", kind, path, "--gpus", "2", "--search", "--device", "gib:40", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert layouts
    assert all([name for name in OVERLAP if name in found["changes"]] == left for found in layouts)
    times = [found["time"] for found in layouts]
    assert all((time["extra_forward"] > 0) == (kind in ("dpo", "kto")) for time in times), (
        "a reference is run"
    )


def test_what_a_run_writes_down_has_the_images_of_the_plan(run, vision, capsys):
    from mca_train.run.record import make_record
    from mca_train.run.rules import check
    from mca_train.run.settings import make_settings
    from mca_train.tasks import TASKS

    vision()
    path = run(seq_length=256)
    assert main(["plan", "sft", path, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["images"]
    values, where = load_values(Path(path), [])
    made = check(TASKS["sft"], make_settings(TASKS["sft"], values, where)).run
    found = make_record(made)["plan"]
    assert (found["images"], found["stages"]) == (planned["images"], planned["stages"])


def test_a_plan_knows_what_a_reference_excludes(run, capsys):
    overlap = dict.fromkeys(OVERLAP, True)
    for kind, changes in [("kto", {}), ("dpo", {"lora_rank": 4})]:
        assert main(["plan", kind, run(**changes, **overlap)]) == 2
        assert "overlap_param_gather is not supported with" in capsys.readouterr().out
    assert main(["plan", "dpo", run(lora_rank=4, dpo_loss="simpo", **overlap)]) == 0


def test_images_are_counted_only_where_the_run_takes_them(run, vision, capsys):
    vision()
    path = run(gradient_accumulation_steps=8)
    late = ["--pipeline_model_parallel_size", "4"]  # one layer on the first stage, which needs two
    words = ["plan", "sft", path, "--image_size", "64"]
    assert main([*words, *late]) == 2
    assert "images: the first pipeline stage has 1 layer;" in capsys.readouterr().out
    assert main([*words, "--gpus", "4", "--search", "--json"]) == 0
    chunks = [found["layout_sizes"] for found in json.loads(capsys.readouterr().out)["layouts"]]
    assert all(4 // sizes["pp"] // sizes["vpp"] >= 2 for sizes in chunks)
    assert any(sizes["pp"] == 2 for sizes in chunks)
    path = run(gradient_accumulation_steps=8, seq_length=256)
    assert main(["plan", "sft", path]) == 0
    assert "images       1 of 448 x 448" in capsys.readouterr().out
    assert main(["plan", "sft", path, *late]) == 0
    text = capsys.readouterr().out
    assert "images: the first pipeline stage has 1 layer;" in text and "(none were counted)" in text


def test_images_that_the_layers_of_a_device_do_not_take_are_not_counted(run, tmp_path, capsys):
    folder = Path(__file__).parents[3] / "packages/mca-models/tests/data/vision_configs"
    path = run(seq_length=512)
    (tmp_path / "model/config.json").write_text((folder / "gemma-3-27b.json").read_text())
    for words in (["--gpus", "64"], ["--gpus", "64", "--search"]):
        assert main(["plan", "sft", path, "--device", "h100-80", *words]) == 0
        assert "set attention_backend to local (none were counted)" in capsys.readouterr().out
    assert main(["plan", "sft", path, "--device", "h100-80", "--images", "1"]) == 2
    assert "this run is impossible:\n  - images: images of gemma3" in capsys.readouterr().out
    assert main(["plan", "sft", path, "--device", "h100-80", "--freeze", "[]"]) == 2


@pytest.mark.parametrize(
    "held",
    [
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 2},
    ],
    ids=["vpp", "etp"],
)
def test_a_search_replaces_the_whole_layout_of_an_mca_checkpoint(run, held, tmp_path, capsys):
    hf = tmp_path / "model/config.json"
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    document = json.loads(hf.read_text()) | ({"model_type": "qwen3_moe"} | experts)
    config = replace(config_from_hf(document), layout=ParallelLayout(**held))
    hf.unlink()
    config.save(hf.parent)
    path = run(gradient_accumulation_steps=4)
    samples = {}
    for gpus in ("1", "4"):
        words = ["plan", "sft", path, "--device", "gib:40", "--json", "--gpus", gpus]
        assert main([*words, "--search"]) == 0  # whatever the checkpoint's own layout needs
        found = json.loads(capsys.readouterr().out)
        samples[gpus] = found["samples_per_step"]
        assert found["layouts"]
        for layout in found["layouts"]:
            keys = [f"--{name}={json.dumps(value)}" for name, value in layout["changes"].items()]
            assert main([*words, *keys]) == 0
            planned = json.loads(capsys.readouterr().out)
            assert planned["layout_sizes"] == layout["layout_sizes"]
            assert planned["global_batch"] == found["samples_per_step"]
    assert samples["4"] == 8 * 4 * 4 // config.layout.model_parallel_size


def test_layouts_that_differ_in_vpp_alone_are_shown_only_to_fill_up():
    def timed(total, pp, vpp=None):
        layout = ParallelLayout(
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            tensor_model_parallel_size=1,
        )
        return SimpleNamespace(layout=layout, time=SimpleNamespace(total=total))

    alike = [timed(number / 10, 4, 2 + number) for number in range(6)]
    others = [timed(5 + pp, pp) for pp in (1, 2, 8)]
    shown = layout_search._varied(alike + others)
    assert [one.time.total for one in shown] == [0.0, 0.1, 6, 7, 13]
    assert len(layout_search._varied(alike)) == 5
