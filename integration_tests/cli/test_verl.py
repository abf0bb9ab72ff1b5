"""verl trains on mca's engine with the losses of verl's FSDP engine, and resumes bit for bit.

    .venv-verl/bin/python -m pytest -n 0 integration_tests/cli/test_verl.py

verl's own SFT trainer runs both engines on forked CPU ranks.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from train_cases import sparse_checkpoint
from verl_data import FSDP, MCA, sft_overrides, write_inputs, write_vision_inputs

PROGRAM = Path(__file__).parents[1] / "support" / "verl_jobs.py"
STEPS = 20
HF_MODEL = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.one_fork,
    pytest.mark.timeout(7200),  # one fixture runs the jobs of all cases
    pytest.mark.xdist_group("verl"),
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl (.ci/verl.txt)"),
]

SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "vpp2": (2, {"pp": 2, "vpp": 2}),
    "tp2pp2": (4, {"tp": 2, "pp": 2}),
    "dp2cp2": (4, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
}
"""Ranks and sizes."""
DENSE = [layout for layout in LAYOUTS if layout != "ep2"]


ERRORS = {
    (
        "engine.param_offload=true",
        "+engine.arguments={fp8_param:true}",
    ): "not supported with arguments.fp8_param",
    ("+engine.router_replay.record_file=a",): "engine.router_replay.record_file is not supported by mca",
    (
        "engine.router_replay.mode=R2",
        "engine.forward_only=true",
    ): "engine.router_replay.mode is 'R2' for a model that is not trained",
    ("engine.full_determinism=true",): "engine.full_determinism is not supported by mca",
    ("engine.dtype=int8",): "engine.dtype is 'int8'; expected one of float32, bfloat16, float16",
    ("+engine.arguments.recompute_granularty=full",): "unknown argument recompute_granularty; did you mean",
    ("+engine.arguments.tensor_model_parallel_size=2",): "set engine.tensor_model_parallel_size instead",
    ("+engine.arguments.num_train_epochs=2",): "engine.arguments.num_train_epochs has no effect in verl",
    ("+engine.arguments.sequence_packing=true",): "has no effect in verl; set model.use_remove_padding",
    ("engine.tensor_model_parallel_sise=2",): "Could not override 'engine.tensor_model_parallel_sise'",
    ("+engine.tensor_parallel=2",): "unexpected keyword argument 'tensor_parallel'",
    ("model.hf_config_path=moe",): "model.hf_config_path",
    ("optim=fsdp",): "add optim=megatron",
    ("optim.muon_momentum=0.9",): "optim.muon_momentum is 0.9, which mca does not support",
    ("+optim.override_optimizer_config.foreach=true",): "foreach is not supported by mca; expected adam_eps",
    ("model.lora.rank=8",): "model.lora.rank is an option of verl's Megatron engine",
    ("model.use_fused_kernels=true",): "model.use_fused_kernels is True",
    ("model.use_liger=true",): "model.use_liger is True",
    ("+checkpoint.async_save=true",): "checkpoint.async_save is not supported by the engine mca",
    ("checkpoint.save_contents=[optimizer]",): "checkpoint.save_contents is ['optimizer']; expected 'model'",
    ("checkpoint.load_contents=[model,rng]",): "checkpoint.load_contents is ['model', 'rng']; expected",
    (
        "checkpoint.load_contents=[model,extra]",
    ): "load_contents is ['model', 'extra']; the engine mca keeps extra",
    (
        "checkpoint.save_contents=[model,extra]",
    ): "save_contents is ['model', 'extra']; the engine mca keeps extra",
    ("+model.override_config.rope_theta=5",): "model.override_config.rope_theta is not supported",
}

ROLE_ERRORS = {
    ("actor_rollout_ref.actor.freeze_vision_tower=true",): "set actor.engine.arguments.freeze to [vision]",
    ("actor_rollout_ref.actor.use_prefix_grouper=true",): "actor.use_prefix_grouper is True",
    ("actor_rollout_ref.actor.qat.enable=true",): "actor.qat.enable is True, which the engine mca does not",
    ("critic.engine.router_replay.mode=R3",): "critic.engine.router_replay.mode is 'R3', but the experts",
}
"""Overrides of verl's PPO trainer and the error of the actor or the critic."""

BATCH_ERRORS = (
    "verl's batch has several temperatures",
    "verl's batch has distillation_use_topk",
    "verl's batch has calculate_sum_pi_squared",
    "verl's batch has padded input_ids; set data.pad_mode to no_padding",
    "verl's batch: a qwen2_5_vl model takes no media; pass text only",
    "verl's batch has audio_features; expected images and videos as image_grid_thw, pixel_values",
    "verl's batch has position_ids that mca does not have",
    "the placeholder of images, but no multi_modal_inputs",
    "verl's batch has position_ids that mca does not have",
)


def run_jobs(folder: Path, jobs: list[dict[str, Any]], *, mca: bool) -> None:
    """Run ``jobs`` one after the other in a program that imports verl once."""
    file = folder / f"jobs-{jobs[0]['name']}.json"
    file.write_text(json.dumps(jobs))
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MCA_DEVICE": "cpu",
    }
    chosen = {"VERL_USE_EXTERNAL_PLUGINS": "mca" if mca else "none"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, file],
        env=os.environ | quiet | chosen,
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def sft_job(folder: Path, name: str, ranks: int, *overrides: str, steps: int = STEPS) -> dict[str, Any]:
    everything = [*sft_overrides(folder, name, steps), *overrides]
    return {
        "kind": "sft",
        "name": name,
        "ranks": ranks,
        "log": f"{folder}/{name}.jsonl",
        "overrides": everything,
    }


def layout_job(
    folder: Path, layout: str, *overrides: str, name: str = "", steps: int = STEPS
) -> dict[str, Any]:
    """Return a job of mca on one of `LAYOUTS`."""
    ranks, sizes = LAYOUTS[layout]
    chosen = [f"engine.{SIZES[size]}={number}" for size, number in sizes.items()]
    return sft_job(folder, name or layout, ranks, *MCA, *chosen, *overrides, steps=steps)


def logged(folder: Path, name: str, key: str) -> list[float]:
    """Return a logged value of each step of run ``name``."""
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["data"][key] for line in lines]


def iterations(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return what run ``name`` wrote of each iteration."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def same_iterations(folder: Path, ours: str, theirs: str) -> list[tuple[int, bool]]:
    """Compare the iterations of two runs of GRPO or of the critic; return the changes that ours sent."""
    mine, others = iterations(folder, ours), iterations(folder, theirs)
    assert len(mine) == len(others) == 3
    changes = [line.pop("delta", None) for line in mine]
    for line, other in zip(mine, others, strict=True):
        assert line.keys() == other.keys()
        for key, values in line.items():
            # losses are sums of terms of about 1 of both signs
            assert values == pytest.approx(other[key], rel=1e-5, abs=1e-5), key
    return changes


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("verl")
    write_inputs(folder)
    write_vision_inputs(folder)
    return folder


def replay_jobs(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield jobs of router replay, on packed and padded rows."""
    for mode, layout, packed, more in (
        ("R3", "tp2", True, {}),
        ("R3", "cp2", True, {}),
        ("R3", "pp2", False, {}),
        ("R2", "tp2", True, {"sequence_parallel": True}),
        ("R2", "cp2", True, {}),
        ("R2", "vpp2", False, {}),
        ("R2", "ep2", False, {}),
    ):
        ranks, sizes = LAYOUTS[layout]
        named = {SIZES[size]: number for size, number in sizes.items()} | more
        job = {"kind": "replay", "name": f"{mode}-{layout}", "mode": mode, "ranks": ranks, "sizes": named}
        yield job | {"packed": packed, "model": str(folder / "sparse")}


@pytest.fixture(scope="module")
def fsdp(request: pytest.FixtureRequest, inputs: Path) -> Path:
    """Run the jobs of verl's own engine that the selected tests need, in one program."""
    rl = [] if not selected(request, test_grpo_has_the_losses_of_the_fsdp_engine) else [FSDP]
    jobs = [sft_job(inputs, "fsdp", 2, *FSDP, HF_MODEL)]
    jobs += [grpo_of(sft_job(inputs, "grpo-fsdp", 2, *options)) for options in rl]
    if selected(request, test_images_have_the_losses_of_the_fsdp_engine):
        jobs.append(sft_job(inputs, "images-fsdp", 2, *FSDP, *image_options(inputs), steps=8))
    if selected(request, test_the_critic_has_the_values_and_losses_of_the_fsdp_engine):
        jobs.append(critic_of(sft_job(inputs, "critic-fsdp", 2, *FSDP)))
    if selected(request, test_a_reward_model_as_critic_has_its_values):
        jobs.append(critic_of(sft_job(inputs, "reward-fsdp", 2, *FSDP), model="reward"))
    if selected(request, test_grpo_on_images_and_videos_has_the_losses_of_the_fsdp_engine):
        jobs.append(media_of(sft_job(inputs, "media-fsdp", 2, *FSDP)))
    if selected(request, test_a_step_takes_the_gradients_of_several_calls):
        jobs.append(tinker_of(sft_job(inputs, "tinker-fsdp", 2, *FSDP)))
    if selected(request, test_grpo_of_experts_has_the_losses_of_the_fsdp_engine):
        jobs.append(grpo_of(sft_job(inputs, "grpo-moe-fsdp", 2, *FSDP, f"model.path={inputs}/moe")))
    if selected(request, test_lora_has_the_losses_of_the_fsdp_engine):
        lora = lora_options(inputs)
        jobs.append(sft_job(inputs, "lora-fsdp", 2, *FSDP, *lora))
        jobs.append(grpo_of(sft_job(inputs, "grpo-lora-fsdp", 2, *FSDP, *lora)))
    if selected(request, test_experts_have_the_losses_of_the_fsdp_engine):
        jobs.append(sft_job(inputs, "moe-fsdp", 2, *FSDP, f"model.path={inputs}/moe"))
    run_jobs(inputs, jobs, mca=False)
    return inputs


@pytest.fixture(scope="module")
def mca(request: pytest.FixtureRequest, inputs: Path) -> Path:
    """Run the jobs of mca's engine that the selected tests need, in one program."""
    layouts = ids_of(request, test_sft_has_the_losses_of_the_fsdp_engine)
    jobs = [layout_job(inputs, layout, HF_MODEL) for layout in layouts]
    jobs += [*sft_jobs(request, inputs), *rl_jobs(request, inputs), *critic_jobs(request, inputs)]
    jobs += option_jobs(inputs)
    run_jobs(inputs, jobs, mca=True)
    return inputs


def sft_jobs(request: pytest.FixtureRequest, inputs: Path) -> Iterator[dict[str, Any]]:
    """Yield the jobs of SFT that the selected tests need, except those of all layouts."""
    if selected(request, test_a_killed_run_resumes_bit_for_bit, test_a_run_resumes_on_another_layout):
        yield from resume_jobs(inputs)
    if selected(request, test_a_run_resumes_on_another_layout):
        saved = f"{FROM}={inputs}/whole/global_step_10"
        yield layout_job(inputs, "dp2cp2", *RESUME, saved, name="other")
    if selected(request, test_experts_have_the_losses_of_the_fsdp_engine):
        yield layout_job(inputs, "ep2", f"model.path={inputs}/moe", name="moe-ep2")
        yield layout_job(inputs, "tp2", f"model.path={inputs}/moe", name="moe-tp2")
    for layout in ids_of(request, test_images_have_the_losses_of_the_fsdp_engine):
        yield layout_job(inputs, layout, *image_options(inputs), name=f"images-{layout}", steps=8)
    if selected(request, test_bf16_and_padded_rows_have_about_the_losses_of_fp32):
        yield layout_job(inputs, "dp2", "engine.dtype=bfloat16", *PADDED, name="bf16")
        yield layout_job(inputs, "pp2", *PADDED, name="padded")
    if selected(request, test_lora_has_the_losses_of_the_fsdp_engine):
        lora = lora_options(inputs)
        yield layout_job(inputs, "tp2", *lora, name="lora")
        yield grpo_of(layout_job(inputs, "tp2", *lora, name="grpo-lora")) | {"adapter": True}


def rl_jobs(request: pytest.FixtureRequest, inputs: Path) -> Iterator[dict[str, Any]]:
    """Yield the jobs of reinforcement learning that the selected tests need."""
    for layout in ids_of(request, test_grpo_has_the_losses_of_the_fsdp_engine):
        yield grpo_of(layout_job(inputs, layout, name=f"grpo-{layout}")) | {"delta": True}
    for layout in ids_of(request, test_grpo_of_experts_has_the_losses_of_the_fsdp_engine):
        moe = layout_job(inputs, layout, f"model.path={inputs}/moe", name=f"grpo-moe-{layout}")
        yield grpo_of(moe) | {"delta": True}
    for layout in ids_of(request, test_grpo_on_images_and_videos_has_the_losses_of_the_fsdp_engine):
        yield media_of(layout_job(inputs, layout, *MEDIA[layout], name=f"media-{layout}"))
    for layout in ids_of(request, test_a_step_takes_the_gradients_of_several_calls):
        yield tinker_of(layout_job(inputs, layout, *TINKER[layout], name=f"tinker-{layout}"))
    for case in ids_of(request, test_offloading_changes_no_bit):
        yield from offload_jobs(inputs, case)
    if selected(request, test_the_engine_replays_given_or_own_experts):
        sparse_checkpoint(inputs / "sparse")
        yield from replay_jobs(inputs)


def critic_jobs(request: pytest.FixtureRequest, inputs: Path) -> Iterator[dict[str, Any]]:
    """Yield the jobs of the critic that the selected tests need."""
    for layout in ids_of(request, test_the_critic_has_the_values_and_losses_of_the_fsdp_engine):
        job = critic_of(layout_job(inputs, layout, HF_MODEL, name=f"critic-{layout}"))
        yield job | {"saves": f"{inputs}/critic-{layout}-saved"}
    if selected(request, test_a_reward_model_as_critic_has_its_values):
        yield critic_of(layout_job(inputs, "tp2", name="reward-tp2"), model="reward")
    if selected(request, test_a_new_value_head_is_the_same_on_every_layout):
        yield critic_of(layout_job(inputs, "tp2", name="head-tp2"), model="model")
        yield critic_of(layout_job(inputs, "pp2", *PADDED, name="head-pp2"), model="model")
    for layout in ("tp2", "dp2") if selected(request, test_a_critic_with_lora_trains_its_head_too) else ():
        lora = layout_job(inputs, layout, "model.lora_rank=4", name=f"critic-lora-{layout}")
        yield critic_of(lora) | {"trains": [".lora.lora_", "output_layer"]}


def selected(request: pytest.FixtureRequest, *tests: Callable[..., None]) -> bool:
    """Return whether this run has one of ``tests``."""
    names = {test.__name__ for test in tests}
    return any(item.module is request.module and item.originalname in names for item in request.session.items)


def ids_of(request: pytest.FixtureRequest, test: Callable[..., None]) -> list[str]:
    """Return the ids of this run's cases of ``test``."""
    items = (item for item in request.session.items if item.module is request.module)
    return [item.callspec.id for item in items if item.originalname == test.__name__]


def critic_of(job: dict[str, Any], *, model: str = "critic") -> dict[str, Any]:
    """Return ``job`` as iterations of the critic that starts from ``model``."""
    path = str(Path(job["log"]).parent / model)
    changed = [*job["overrides"], "optim.lr_warmup_steps=0", f"model.path={path}"]
    return job | {"kind": "critic", "iterations": 3, "overrides": changed}


OFFLOADS: dict[str, tuple[str, ...]] = {
    "fp32-tp2": (),
    "bf16-dp2": ("engine.dtype=bfloat16",),
    "bf16-dp2-each-rank-all-states": ("engine.dtype=bfloat16", "engine.use_distributed_optimizer=false"),
}
"""Options of GRPO runs with offload; main parameters are views of the model's buffers, shards, or full copies."""


MEDIA: dict[str, tuple[str, ...]] = {
    "dp2": ("model.use_remove_padding=false",),
    "tp2": (),
    "pp2": (),
    "cp2": (),
}
"""Options of the runs on images and videos."""
TINKER: dict[str, tuple[str, ...]] = {
    "dp2": ("engine.param_offload=true", "engine.optimizer_offload=true"),
    "tp2": ("engine.use_distributed_optimizer=false",),
    "tp2pp2": (),
}
"""Options of the runs with several calls before a step."""


def offload_jobs(folder: Path, case: str) -> list[dict[str, Any]]:
    """Return a job without and a job with offload."""
    layout, options = case.split("-")[1], OFFLOADS[case]
    kept = grpo_of(layout_job(folder, layout, *options, name=f"kept-{case}")) | {"delta": True}
    offload = ("engine.param_offload=true", "engine.optimizer_offload=true")
    moved = grpo_of(layout_job(folder, layout, *options, *offload, name=f"moved-{case}"))
    return [kept, moved | {"delta": True, "offloads": True}]


def tinker_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return ``job`` as steps of verl's Tinker worker."""
    return job | {"kind": "tinker", "iterations": 3}


def media_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return ``job`` as iterations of GRPO of a Qwen2.5-VL on prompts with images, with a video, and without."""
    changed = [*job["overrides"], f"model.path={Path(job['log']).parent}/vision"]
    return grpo_of(job | {"overrides": changed}) | {"media": True}


def grpo_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return ``job`` as iterations of GRPO instead of SFT, at a constant rate from the first step."""
    return job | {
        "kind": "grpo",
        "iterations": 3,
        "overrides": [*job["overrides"], "optim.lr_warmup_steps=0"],
    }


PADDED = (
    "model.use_remove_padding=false",
    "data.use_dynamic_bsz=true",
    "data.max_token_len_per_gpu=200",
    "model.enable_gradient_checkpointing=true",
)
"""Rows with padding, micro-batches of different sizes, and recomputation."""
RESUME = ("trainer.save_freq=10", "trainer.resume_mode=resume_path")
FROM = "trainer.resume_from_path"


def lora_options(folder: Path) -> list[str]:
    """Return overrides that train the adapter in ``folder`` and send merged weights to the rollout."""
    return ["model.lora_rank=4", f"model.lora_adapter_path={folder}/adapter", "model.lora.merge=true"]


def image_options(folder: Path) -> list[str]:
    """Return overrides that train a Qwen2.5-VL on chats with images."""
    return [f"model.path={folder}/vision", f"data.train_files={folder}/images.parquet", "data.max_length=256"]


def resume_jobs(folder: Path) -> list[dict[str, Any]]:
    """Return jobs of a run that is killed after step 13, of its repetition, and of an uninterrupted run."""
    killed = layout_job(folder, "dp2", "trainer.save_freq=10", name="killed") | {"kill_after_lines": 13}
    again = layout_job(folder, "dp2", "trainer.save_freq=5", name="killed") | {"log": f"{folder}/again.jsonl"}
    again["overrides"].append("trainer.max_ckpt_to_keep=1")
    return [killed, again, layout_job(folder, "dp2", "trainer.save_freq=10", name="whole")]


def option_jobs(folder: Path) -> list[dict[str, Any]]:
    """Return jobs that write configurations and errors."""
    search = "hydra.searchpath=[pkg://mca_train.clients.verl.config]"
    ppo = [search, "model_engine=mca", f"actor_rollout_ref.model.path={folder}/model"]
    ppo += ["actor_rollout_ref.actor.use_dynamic_bsz=true", f"critic.model.path={folder}/model"]
    ppo += ["actor_rollout_ref.actor.engine.tensor_model_parallel_size=2"]
    sft = [*sft_overrides(folder, "errors", 1), *MCA[:-1]]
    kinds: dict[str, dict[str, Any]] = {
        "ppo_config": {"overrides": ppo},
        "role_errors": {"overrides": ppo, "cases": [[], *map(list, ROLE_ERRORS)]},
        "errors": {"overrides": sft, "cases": [[], *map(list, ERRORS)]},
        "batch_errors": {"vision": f"{folder}/vision"},
    }
    return [
        {"kind": kind, "name": kind, "ranks": 1, "log": f"{folder}/{kind}.json"} | more
        for kind, more in kinds.items()
    ]


@pytest.mark.cases(0, always=["dp2", "tp2"])
@pytest.mark.parametrize("layout", DENSE)
def test_sft_has_the_losses_of_the_fsdp_engine(layout, mca, fsdp):
    for key in ("train/loss", "train/grad_norm", "train/lr"):
        ours, theirs = logged(mca, layout, key), logged(fsdp, "fsdp", key)
        assert len(ours) == STEPS
        assert ours == pytest.approx(theirs, rel=1e-5), key  # fp32 sums in another order; 20 Adam steps


@pytest.mark.qualify
@pytest.mark.parametrize("layout", ["moe-ep2", "moe-tp2"])
def test_experts_have_the_losses_of_the_fsdp_engine(layout, mca, fsdp):
    for key in ("train/loss", "train/grad_norm"):
        # 20 steps at 1e-3 let a token change its expert
        assert logged(mca, layout, key) == pytest.approx(logged(fsdp, "moe-fsdp", key), rel=1e-4), key


@pytest.mark.cases(0, always=["tp2"])
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "cp2"])
def test_images_have_the_losses_of_the_fsdp_engine(layout, mca, fsdp):
    for key in ("train/loss", "train/grad_norm"):
        ours, theirs = logged(mca, f"images-{layout}", key), logged(fsdp, "images-fsdp", key)
        assert len(ours) == 8
        assert ours == pytest.approx(theirs, rel=1e-5), key  # fp32 sums in another order


@pytest.mark.qualify
def test_lora_has_the_losses_of_the_fsdp_engine(mca, fsdp):
    """SFT and GRPO train an adapter; the reference of GRPO is the model without it."""
    for key in ("train/loss", "train/grad_norm"):
        assert logged(mca, "lora", key) == pytest.approx(logged(fsdp, "lora-fsdp", key), rel=1e-5), key
    same_iterations(mca, "grpo-lora", "grpo-lora-fsdp")


@pytest.mark.qualify
def test_bf16_and_padded_rows_have_about_the_losses_of_fp32(mca, fsdp):
    losses = logged(fsdp, "fsdp", "train/loss")
    assert logged(mca, "padded", "train/loss") == pytest.approx(losses, rel=1e-5)
    assert logged(mca, "bf16", "train/loss") == pytest.approx(losses, rel=2e-2)  # bf16 has 8 bits


def test_the_exported_model_is_that_of_the_fsdp_engine(request, mca, fsdp):
    theirs = load_file(fsdp / "fsdp" / f"global_step_{STEPS}" / "huggingface" / "model.safetensors")
    for layout in ids_of(request, test_sft_has_the_losses_of_the_fsdp_engine):
        folder = mca / layout / f"global_step_{STEPS}" / "hf"
        ours = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-4)  # 20 Adam steps of 1e-3


def test_a_killed_run_resumes_bit_for_bit(mca):
    for key in ("train/loss", "train/grad_norm", "train/lr"):
        assert logged(mca, "again", key) == logged(mca, "whole", key)[10:]
    kept = sorted(path.name for path in (mca / "killed").iterdir() if path.is_dir())
    # max_ckpt_to_keep counts a process's own checkpoints: that of step 15 is deleted, that of the killed run is not
    assert kept == ["global_step_10", "global_step_20"]


@pytest.mark.qualify
def test_a_run_resumes_on_another_layout(mca):
    for key in ("train/loss", "train/lr"):
        assert logged(mca, "other", key) == pytest.approx(logged(mca, "whole", key)[10:], rel=1e-5), key


@pytest.mark.cases(0, always=["tp2"])
@pytest.mark.parametrize("layout", DENSE)
def test_grpo_has_the_losses_of_the_fsdp_engine(layout, mca, fsdp):
    """The engine gives log-probabilities, updates the policy, and sends its weights to the rollout."""
    for changed, equal in same_iterations(mca, f"grpo-{layout}", "grpo-fsdp"):
        assert changed > 0 and equal


@pytest.mark.cases(0, always=["tp2"])
@pytest.mark.parametrize("layout", DENSE)
def test_the_critic_has_the_values_and_losses_of_the_fsdp_engine(layout, mca, fsdp):
    """The jobs also compare the values with those of the model that they save."""
    same_iterations(mca, f"critic-{layout}", "critic-fsdp")


@pytest.mark.qualify
def test_a_reward_model_as_critic_has_its_values(mca, fsdp):
    """verl's other engines add a bias, 0 at first, which they train."""
    ours, theirs = (iterations(mca, name)[0] for name in ("reward-tp2", "reward-fsdp"))
    assert ours["values"] == pytest.approx(theirs["values"], rel=1e-5, abs=1e-5)


@pytest.mark.qualify
def test_a_new_value_head_is_the_same_on_every_layout(mca):
    """A language model gets a new head, which the seed decides."""
    same_iterations(mca, "head-tp2", "head-pp2")


@pytest.mark.qualify
def test_a_critic_with_lora_trains_its_head_too(mca):
    """The jobs check what is trained; verl's FSDP engine would put an adapter on the head instead."""
    same_iterations(mca, "critic-lora-tp2", "critic-lora-dp2")


@pytest.mark.cases(0, always=["ep2"])
@pytest.mark.parametrize("layout", ["ep2", "tp2"])
def test_grpo_of_experts_has_the_losses_of_the_fsdp_engine(layout, mca, fsdp):
    for changed, equal in same_iterations(mca, f"grpo-moe-{layout}", "grpo-moe-fsdp"):
        assert changed > 0 and equal


@pytest.mark.cases(0, always=["tp2"])
@pytest.mark.parametrize("layout", MEDIA)
def test_grpo_on_images_and_videos_has_the_losses_of_the_fsdp_engine(layout, mca, fsdp):
    """verl's agent loop makes the inputs of images and videos."""
    same_iterations(mca, f"media-{layout}", "media-fsdp")


@pytest.mark.cases(0, always=["dp2"])
@pytest.mark.parametrize("layout", TINKER)
def test_a_step_takes_the_gradients_of_several_calls(layout, mca, fsdp):
    """verl's Tinker worker calls the engine twice before each step, whose rate it sets."""
    ours, theirs = iterations(mca, f"tinker-{layout}"), iterations(fsdp, "tinker-fsdp")
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        for call, expected in zip(mine["calls"], other["calls"], strict=True):
            values = (
                slice(None) if layout == "dp2" else slice(1)
            )  # a replica has its sequences' log-probabilities
            assert call[values] == pytest.approx(expected[values], rel=1e-5)


@pytest.mark.cases(0, always=["bf16-dp2"])
@pytest.mark.parametrize("case", OFFLOADS)
def test_offloading_changes_no_bit(case, mca):
    """Parameters, gradients and optimizer states go to host memory and back at each of verl's calls."""
    assert iterations(mca, f"moved-{case}") == iterations(mca, f"kept-{case}")


def test_the_ppo_trainer_composes_all_roles(mca):
    found = json.loads((mca / "ppo_config.json").read_text())
    trained = ["McaEngineConfig", 2, False]
    assert found == {"actor": trained, "ref": ["McaEngineConfig", 2, True], "critic": trained}


def test_what_is_not_supported_is_an_error_that_names_the_option(mca):
    for file, errors in (("errors", ERRORS), ("role_errors", ROLE_ERRORS)):
        supported, *found = json.loads((mca / f"{file}.json").read_text())
        assert supported == "no error"
        for error, expected in zip(found, errors.values(), strict=True):
            assert expected in error
    for error, expected in zip(
        json.loads((mca / "batch_errors.json").read_text()), BATCH_ERRORS, strict=True
    ):
        assert expected in error


def test_the_engine_replays_given_or_own_experts(mca):
    """The jobs compare with `VirtualModels.log_probs`, which is compared with a forced transformers model."""
