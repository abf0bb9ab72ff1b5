"""Models with images after three steps, and after an export, are transformers'.

`--cases all` tests every family, and steps on more layouts.
"""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import vision_reference
from case_tables import IMAGE_STEPS
from cases import Case, as_params, needed
from checkpoint_files import read
from fp64_judge import PLAIN, double_precision, in_double
from harness import run_ranks
from layouts import arguments
from vision_passes import DENSE, SPARSE, forward_backward, of_all_parts, sizes
from vision_reference import Mixed, mixed

pytestmark = pytest.mark.ranks

STEPS, RATE, CLIP = 3, 1e-3, 0.05
BUFFERS = ("correction_bias", "layer_scalar", "put_min", "put_max", "std_bias", "std_scale")
"""Ends of the names of tensors that no optimizer moves."""


def stepped(reference: Mixed, layout: str, path: Path, *, shared: bool) -> list[float]:
    """Three steps of Megatron's Adam with clipping, exported; the norms. Runs on every rank."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model, chunks = of_all_parts(reference, layout, use_distributed_optimizer=shared)
    config = OptimizerConfig(
        optimizer="adam", lr=RATE, weight_decay=0.0, clip_grad=CLIP, use_distributed_optimizer=shared
    )
    optimizer = get_megatron_optimizer(config, chunks)
    norms = []
    for _ in range(STEPS):
        for parameter in model.parameters():  # the plain optimizer hangs its gradients there
            parameter.grad = None
        forward_backward(reference, layout, model, chunks, [])
        _, norm, _ = optimizer.step()
        norms.append(float(norm))
    model.save_pretrained_as_hf(path)
    return norms


def exported(references: list[Mixed], folder: Path) -> None:
    """Each model, read and written again. Runs on every rank."""
    for reference in references:
        model, _ = of_all_parts(reference, "tp2sp")
        model.save_pretrained_as_hf(folder / f"{reference.path.name}-exported")


@pytest.fixture(scope="module")
def exports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Mixed]:
    """The references of models that are exported in the same folder."""
    folder = tmp_path_factory.mktemp("exported")
    references = {model: mixed(model, folder) for model in needed(request, "model")}
    run_ranks(2, exported, list(references.values()), folder, timeout=300)
    return references


@pytest.mark.cases(0, always=["qwen3_vl"])
@pytest.mark.parametrize("model", (*DENSE, *SPARSE))
def test_transformers_makes_the_same_of_an_export_and_images(model: str, exports: dict[str, Mixed]) -> None:
    reference, theirs = exports[model], vision_reference.vision_model(model)
    path = reference.path.parent / f"{model}-exported"
    ours = transformers.AutoModelForMultimodalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        found, right = (
            vision_reference.logits_of(each, reference.input_ids, reference.images) for each in (ours, theirs)
        )
    assert torch.equal(found, right)
    negative = tuple(
        {name: -x if name in ("pixel_values", "input_features") else x for name, x in each.items()}
        for each in reference.images
    )
    with torch.no_grad():
        assert not torch.equal(vision_reference.logits_of(ours, reference.input_ids, negative), right)


@pytest.mark.cases(0, always=["qwen2_5_vl-tp2sp-distributed-optimizer", "qwen3_vl-dp2-distributed-optimizer"])
@pytest.mark.parametrize("case", as_params(IMAGE_STEPS))
def test_three_clipped_steps_equal_transformers(case: Case, tmp_path: Path) -> None:
    """The vision model counts once in the norm of all gradients, and moves with the rest."""
    reference, shared = mixed(case.model, tmp_path), "distributed-optimizer" in case.options
    model = copy.deepcopy(vision_reference.vision_model(case.model))
    norms = vision_reference.stepped(model, reference, STEPS, RATE, CLIP)
    model.save_pretrained(tmp_path / "theirs")
    # the gradients of a delta net are those of transformers to 1e-5, and Adam's third step is of their roundings too
    # 1e-7 of noise in the weights of gemma4-31b moves transformers' second norm by 2.6e-4
    within = 5e-4 if case.model.startswith(("qwen3_5", "gemma4-31b")) else 1e-4
    for found in run_ranks(2, stepped, reference, case.layout, tmp_path / "ours", shared=shared):
        assert found == pytest.approx(norms, rel=within)
    folders = (reference.path, tmp_path / "theirs", tmp_path / "ours", reference.gradients)
    before, theirs, ours, gradients = (read(folder) for folder in folders)
    unmoved = 0
    for name, right in theirs.items():
        gradient = gradients[name].abs() if not name.endswith(BUFFERS) else torch.zeros(right.shape)
        assert bool((right != before[name]).any()) == bool(gradient.any()), name
        # where a gradient is next to nothing, Adam makes a step of its rounding errors
        nothing = (gradient <= 1e-5 * gradient.max()).expand(right.shape)
        near = ((ours[name] - right).abs() <= 0.02 * RATE) | nothing
        assert float(near.float().mean()) > 0.99, name
        unmoved += int(nothing.sum())
    assert unmoved < 0.2 * sum(right.numel() for right in theirs.values())


def stepped_in_double(reference: Mixed, path: Path) -> list[float]:
    """`stepped` in fp64. Runs on a rank."""
    with double_precision():
        return stepped(reference, "tp1", path, shared=True)


def test_three_clipped_steps_of_a_delta_net_are_exact_in_fp64(tmp_path: Path) -> None:
    """In fp32 the third norm is off by 3e-4, as that of transformers is if 1e-7 of noise is in the weights."""
    reference = mixed("qwen3_5", tmp_path)
    config = copy.deepcopy(vision_reference.vision_model("qwen3_5").config)
    make = transformers.AutoModelForMultimodalLM.from_config
    weights = vision_reference.vision_model("qwen3_5").state_dict()
    model = in_double(lambda: make(config, **PLAIN), weights)
    with double_precision():
        norms = vision_reference.stepped(model, reference, STEPS, RATE, CLIP)
    found = run_ranks(1, stepped_in_double, reference, tmp_path / "ours")[0]
    assert found == pytest.approx(norms, rel=1e-11)


def _frozen_in_python(model: Any, reported: Any) -> str:
    """Parameters that are trained though others of the same part are frozen."""
    frozen = [tensor for _, tensor in model.trained_parameters()][::2]
    for tensor in frozen:
        tensor.requires_grad_(False)
    reported(model, freeze=["vision"])
    return "some" if any(tensor.requires_grad for tensor in frozen) else ""


def refused(reference: Mixed) -> list[str]:
    """Return the trainer's errors; of two stages only the first has the vision model. Runs on every rank."""
    from mca_config.errors import McaError
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model
    from mca_train.engine.optimizer import select_trained_parts

    def reported(model: Any, **given: Any) -> str:
        unset = dict.fromkeys(
            ("freeze", *(f"{part}_learning_rate" for part in ("vision", "audio", "projector")))
        )
        args = SimpleNamespace(**{**unset, "overlap_param_gather": False, **given})
        try:
            select_trained_parts(model, args)
        except McaError as error:
            return str(error)
        return ""

    model = AutoModel.from_pretrained(reference.path, arguments(sizes("pp2")))
    said = [reported(model, overlap_param_gather=True), reported(model, vision_learning_rate=1e-5)]
    said += [reported(model, overlap_param_gather=True, freeze=["vision"])]
    said += [reported(model, vision_learning_rate=1e-5, freeze=["projector"])]
    said += [reported(model, freeze=[]), _frozen_in_python(model, reported)]
    model.requires_grad_(False)
    targets = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear"}
    adapted = get_peft_model(model, targets, parts={"language", "vision"})
    said += [reported(adapted, overlap_param_gather=True), reported(adapted, vision_learning_rate=1e-5)]
    return [
        *said,
        reported(adapted, freeze=["language", "projector"]),
        reported(adapted, freeze=["projector"]),
    ]


def test_parts_that_cannot_be_trained_raise_an_error_on_every_rank(tmp_path: Path) -> None:
    both = run_ranks(2, refused, mixed("qwen2_5_vl", tmp_path))
    gather = "overlap_param_gather is not supported with a trained vision or audio tower"
    one_rate = "vision_learning_rate: an adapter has one learning rate"
    on = "freeze: the adapter is on language; remove it from freeze"
    expected = ["", "vision_learning_rate: vision is frozen", gather, *[""] * 3, gather, one_rate, on, ""]
    for said in both:
        assert [bool(words) for words in said] == [bool(words) for words in expected]
        assert all(words.startswith(start) for words, start in zip(said, expected, strict=True))
