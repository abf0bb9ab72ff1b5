"""LLaMA-Factory 0.9.5 trains on mca through ``mcore_adapter`` with the losses of LLaMA-Factory's Hugging Face runs.

The stage ``llamafactory`` of ``.ci/stages.sh`` makes the environment ``.venv-lf``, and ``.venv-lf-3.12``. Then:

    .venv-lf/bin/python -m pytest -n 0 --cases all integration_tests/cli/test_llamafactory.py
"""

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

from cases import needed

MISSING = importlib.util.find_spec("llamafactory") is None

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.one_fork,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        MISSING, reason="needs llamafactory==0.9.5 in an environment with .ci/llamafactory.txt"
    ),
]

LORA = {"finetuning_type": "lora", "lora_rank": 4, "learning_rate": 1e-2}
DPO = {"stage": "dpo", "dataset": "pairs", "learning_rate": 1e-4}
# With a processor, LLaMA-Factory's Hugging Face trainer averages the means of micro-batches; mca averages over all
# targets of a step. One micro-batch makes them equal.
IMAGES = {
    "model": "vision",
    "template": "qwen2_vl",
    "dataset": "sft_images",
    "gradient_accumulation_steps": 1,
}

QWEN3_VL = IMAGES | {"model": "vision3", "template": "qwen3_vl_nothink"}
VIDEOS = {"dataset": "sft_videos", "cutoff_len": 512, "video_fps": 1.0}
UNFROZEN = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}

CASES: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": DPO,
    "pt": {"stage": "pt", "dataset": "texts"},
    "packing": {"neat_packing": True},
    "cut": {"cutoff_len": 12},
    "evaluation": {
        "val_size": 0.25,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "per_device_eval_batch_size": 24,  # all: Hugging Face averages the means of batches
    },
    "lora": LORA,
    "dpo-lora": DPO | LORA,
    "streaming": {"streaming": True, "dataloader_num_workers": 1},  # its shards
    "moe": {"model": "moe", "template": "qwen3_nothink"},
    "granite": {"model": "granite"},  # not in LLaMA-Factory's own list
    "dpo-smoothed": DPO | {"pref_ftx": 0.5, "dpo_label_smoothing": 0.1},
    "simpo": DPO | {"pref_loss": "simpo"},
    "orpo": DPO | {"pref_loss": "orpo"},
    "images": IMAGES,
    "images-unfrozen": IMAGES | UNFROZEN,
    "images-language-frozen": IMAGES | UNFROZEN | {"freeze_language_model": True},
    "images-lora": IMAGES | LORA,
    "images-qwen3": QWEN3_VL | UNFROZEN,
    "videos": IMAGES | VIDEOS,
    "videos-qwen3": QWEN3_VL | VIDEOS | UNFROZEN,
    "dpo-images": IMAGES | DPO | {"dataset": "pairs_images"},
}
"""Runs, as changes of ``llamafactory_runs.BASE``."""

EXPERTS = {
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "gradient_accumulation_steps": 1,  # on two data-parallel ranks: the same global batch
}
LAYOUTS = {"moe": EXPERTS}
"""Layouts of four ranks; others: tensor and pipeline size 2."""

PT_LENGTH = 129
"""LLaMA-Factory packs rows of ``cutoff_len + 1`` tokens for mca, which are ``cutoff_len`` targets."""

HF_CHANGES = {"pt": {"cutoff_len": PT_LENGTH}, "cut": {"cutoff_len": 13}}  # cutoff_len targets too

TOLERANCES = dict.fromkeys((case for case, run in CASES.items() if run.get("stage") == "dpo"), 1e-4)
"""Relative; dpo starts at log 2 with log-probabilities of hundreds, whose differences are its loss. Others: 1e-5."""


# The keys of examples/megatron in LLaMA-Factory's repository, and two of ROLL's.
EXAMPLES: dict[str, dict[str, Any]] = {
    "qwen2_vl_full": IMAGES
    | {
        "image_max_pixels": 262144,
        "video_max_pixels": 16384,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "bf16": True,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "bias_activation_fusion": True,
        "apply_rope_fusion": True,
        "use_distributed_optimizer": True,
        "use_mca": True,
    },
    "qwen3_moe_full": {
        "model": "moe",
        "template": "qwen3_nothink",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "lr_scheduler_type": "constant",
        "bf16": True,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "pipeline_model_parallel_size": 2,
        "bias_activation_fusion": True,
        "apply_rope_fusion": True,
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
        "overlap_grad_reduce": True,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": 2,
        "recompute_granularity": "full",
        "distributed_timeout_minutes": 60,
    },
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    from llamafactory_runs import workspace

    return workspace(tmp_path_factory.mktemp("llamafactory"))


@pytest.fixture(scope="module")
def trained(made, request):
    """Folder of the finished runs of the needed cases; LLaMA-Factory's own launcher starts the ranks of sft."""
    from llamafactory_runs import LAYOUT, launch, train

    cases = needed(request)
    train([made.run(f"hf-{case}", **CASES[case] | HF_CHANGES.get(case, {})) for case in cases], mca=False)
    runs = {case: made.run(f"mca-{case}", **CASES[case], **LAYOUTS.get(case, LAYOUT)) for case in cases}
    if run := runs.pop("sft", None):
        launch(run, made.folder, ranks=4)
    train(list(runs.values()), mca=True, ranks=4)
    return made.folder


@pytest.mark.cases(0, always=["sft", "dpo"])
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_the_hugging_face_run(trained, case):
    from llamafactory_runs import history

    for name in ("loss", "eval_loss"):
        ours, theirs = (history(trained / f"{kind}-{case}", name) for kind in ("mca", "hf"))
        if case == "pt":  # its Hugging Face run counts the first label of a row, which is no target
            theirs = [loss * PT_LENGTH / (PT_LENGTH - 1) for loss in theirs]
        expected = {"loss": 20, "eval_loss": 4 if case == "evaluation" else 0}
        assert len(ours) == expected[name]
        assert ours == pytest.approx(theirs, rel=TOLERANCES.get(case, 1e-5))


@pytest.fixture
def converter(monkeypatch):
    """The module whose functions LLaMA-Factory's script ``megatron_merge.py`` calls."""
    from mca_train.clients import client_path

    monkeypatch.syspath_prepend(client_path("mcore_adapter"))
    return importlib.import_module("mcore_adapter.models.converter.post_converter")


@pytest.fixture
def export(converter):
    """Convert a trained directory to Hugging Face's format."""

    def convert(source: Path) -> Path:
        target = source.with_name(f"{source.name}-exported")
        if not target.exists():  # by another test
            converter.convert_checkpoint_to_hf(source, target)
        return target

    return convert


FULL = [name for name, run in CASES.items() if "finetuning_type" not in run]


@pytest.mark.cases(0, always=["sft"])
@pytest.mark.parametrize("case", FULL)
def test_transformers_loads_the_trained_model(trained, case, export):
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer

    folders = export(trained / f"mca-{case}"), trained / f"hf-{case}"
    kind = AutoModelForMultimodalLM if "template" in CASES[case] and case != "moe" else AutoModelForCausalLM
    ours, theirs = (kind.from_pretrained(folder) for folder in folders)
    words = AutoTokenizer.from_pretrained(folders[0])("the quick brown fox jumps", return_tensors="pt")
    words.pop("token_type_ids", None)
    with torch.no_grad():
        torch.testing.assert_close(
            ours(**words).logits, theirs(**words).logits, rtol=0, atol=1e-3
        )  # 20 steps of Adam


@pytest.mark.cases(0)
@pytest.mark.parametrize(("case", "frozen"), [("images", True), ("images-unfrozen", False)])
def test_frozen_parts_keep_their_bits(trained, case, frozen, export):
    from safetensors.torch import load_file

    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (trained / "vision", export(trained / f"mca-{case}"))
    )
    assert before.keys() == after.keys()
    moved = {name for name in before if not before[name].equal(after[name])}
    for part in ("visual.blocks", "visual.merger"):
        assert any(part in name for name in before)
        assert any(part in name for name in moved) != frozen
    assert any("layers" in name for name in moved)


@pytest.mark.cases(0)
@pytest.mark.parametrize("case", ["lora"])
def test_the_adapter_is_that_of_the_hugging_face_run(trained, case, converter):
    import torch
    from safetensors.torch import load_file

    converter.convert_checkpoint_to_hf(trained / "text", trained / "peft", trained / f"mca-{case}")
    ours, theirs = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (trained / "peft", trained / f"hf-{case}")
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)  # they moved by 0.1 in 20 steps of Adam


@pytest.mark.qualify
def test_converted_weights_keep_their_bits(made, converter):
    from safetensors.torch import load_file

    from llamafactory_runs import LAYOUT
    from mca_config.arguments import DistributingParallelArguments

    source, there, back = (made.folder / name for name in ("text", "converted", "back"))
    converter.convert_checkpoint_to_mca(source, there, DistributingParallelArguments(**LAYOUT))
    converter.convert_checkpoint_to_hf(there, back)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, back))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


@pytest.mark.qualify
@pytest.mark.parametrize("case", ["sft", "dpo", "lora", "images-unfrozen", "streaming"])
def test_a_killed_run_resumes_by_the_same_command(trained, made, case):
    import psutil

    from llamafactory_runs import LAYOUT, history, launch, start

    run = made.run(f"resumed-{case}", **CASES[case], **LAYOUT) | {"save_strategy": "steps", "save_steps": 4}
    with start(run, made.folder, ranks=4) as process:
        while not Path(run["output_dir"], "checkpoint-8").exists():
            assert process.poll() is None
            time.sleep(0.05)
        ranks = psutil.Process(process.pid).children(recursive=True)  # of torchrun, each in a new session
        assert len(ranks) >= 4
        for each in (*ranks, process):
            each.kill()
    assert not Path(run["output_dir"], "trainer_state.json").exists()
    assert "Resuming training from" in launch(run, made.folder, ranks=4)
    assert history(run["output_dir"]) == history(trained / f"mca-{case}")


@pytest.mark.qualify
@pytest.mark.parametrize("case", ["sft"])
def test_a_run_starts_from_a_directory_of_mca(trained, made, case):
    from llamafactory_runs import LAYOUT, history, train

    changes = CASES[case] | {"max_steps": 2}
    train([made.run("again", model=f"mca-{case}", **changes, **LAYOUT)], mca=True, ranks=4)
    train([made.run("hf-again", model=f"hf-{case}", **changes)], mca=False)
    ours, theirs = (history(made.folder / name) for name in ("again", "hf-again"))
    assert ours == pytest.approx(theirs, rel=1e-4)  # their weights differ after 20 steps of Adam


@pytest.mark.qualify
@pytest.mark.parametrize("example", EXAMPLES)
def test_their_examples_run(made, example):
    from llamafactory_runs import history, train

    train([made.run(example, **EXAMPLES[example]) | {"max_steps": 2}], mca=True, ranks=4)
    first, second = history(made.folder / example)
    assert 5 < first < 7  # log 416 = 6.03
    assert second < 7


BYPASSES: dict[str, tuple[dict[str, Any], str]] = {
    "hyper_parallel": (
        {"use_hyper_parallel": True},
        "use_hyper_parallel: true is not supported with USE_MCA",
    ),
    "reward": ({"stage": "rm", "dataset": "pairs"}, "stage: rm is not supported with USE_MCA"),
    "kto": ({"stage": "kto", "dataset": "pairs"}, "stage: kto is not supported with USE_MCA"),
    "freeze": ({"finetuning_type": "freeze"}, "finetuning_type: freeze is not supported"),
    # transformers 5.6, which LLaMA-Factory needs, has no class for its features
    "audio": (
        IMAGES | {"model": "audio", "template": "qwen2_audio", "dataset": "sft_audios"},
        r"qwen2_audio: transformers 5\.6\.0 has no model of its features alone",
    ),
    "revision": ({"model_revision": "v2"}, "model_revision: v2 is not supported"),
}


@pytest.mark.qualify
@pytest.mark.parametrize("case", BYPASSES)
def test_a_run_that_mca_would_not_do_as_asked_is_an_error(made, case):
    from llamafactory_runs import train

    changes, message = BYPASSES[case]
    with pytest.raises(AssertionError, match=message):
        train([made.run(f"rejected-{case}", **changes)], mca=True)
