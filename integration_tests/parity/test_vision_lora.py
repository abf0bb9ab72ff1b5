"""Adapters on the vision model and the projector: gradients and merged weights are PEFT's on transformers' model.

`--cases all` tests more families and layouts.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import vision_reference
from case_tables import IMAGE_ADAPTERS
from cases import Case, as_params
from gradients import worst_errors
from harness import run_ranks
from layouts import arguments
from parity import TOLERANCE
from vision_passes import forward_backward, sizes, wrapped
from vision_reference import Mixed, mixed

pytestmark = pytest.mark.ranks


def with_peft(case: str, reference: Mixed, folder: Path) -> None:
    """An adapter with random values on every linear, its gradients in its place, and the merged model."""
    import peft

    settings = peft.LoraConfig(r=2, lora_alpha=3, target_modules="all-linear", init_lora_weights=False)
    if case.startswith("qianfan_ocr"):  # one tensor in mca, on which there are no adapters
        settings.exclude_modules = r".*vision_tower.*\.[qkv]_proj"
    torch.manual_seed(1)
    model: Any = peft.get_peft_model(copy.deepcopy(vision_reference.vision_model(case)), settings)
    model.save_pretrained(folder / "adapter")
    losses = vision_reference.losses_of(model, reference.input_ids, reference.images)
    losses.mean().backward()
    values = {name: x.detach().clone() for name, x in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder / "expected")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    model.merge_and_unload().save_pretrained(folder / "merged")


def adapted(reference: Mixed, layout: str, folder: Path) -> None:
    """The gradients of that adapter here, and the model merged with it. Runs on every rank."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import load_adapter

    plain = {"calculate_per_token_loss": True, "moe_aux_loss_coeff": 0.0}
    base = AutoModel.from_pretrained(reference.path, arguments(sizes(layout), **plain))
    before = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    model = load_adapter(base, folder / "adapter")
    model.save_merged_as_hf(folder / "found-merged")
    chunks = wrapped(model, layout)
    forward_backward(reference, layout, model, chunks, [])
    with torch.no_grad():
        for _, tensor in model.adapter_parameters():
            tensor.copy_(tensor.main_grad)
    model.save_pretrained_as_hf(folder / "found")
    unloaded = {name: one.requires_grad for name, one in model.merge_and_unload().named_parameters()}
    trains = [one for name, one in unloaded.items() if "vision_model." in name]
    assert unloaded == before and bool(trains) == chunks[0].module.pre_process and not any(trains)


@pytest.mark.cases(0, always=["qwen3_vl-tp2sp"])
@pytest.mark.parametrize("case", as_params(IMAGE_ADAPTERS))
def test_gradients_and_merged_weights_equal_pefts(case: Case, tmp_path: Path) -> None:
    reference = mixed(case.model, tmp_path)
    with_peft(case.model, reference, tmp_path)
    run_ranks(case.num_ranks, adapted, reference, case.layout, tmp_path)
    theirs, ours = (tensors(tmp_path / name) for name in ("expected", "found"))
    assert ours.keys() == theirs.keys()
    assert sum("language_model" not in name for name in theirs) > (4 if "unified" in case.model else 10)
    largest = max(float(x.abs().max()) for x in theirs.values())
    for name, right in theirs.items():
        scale = max(float(right.abs().max()), largest * 1e-3)
        # queries of gemma4-e2b's clipped tower have next to no gradient, of which 1.1e-4 is rounding
        within = 2 * TOLERANCE if case.model == "gemma4-e2b" else TOLERANCE
        assert float((ours[name] - right).abs().max()) / scale <= within, name
    worst = worst_errors(tmp_path / "merged", tmp_path / "found-merged")
    assert worst[0][1] <= 1e-6, worst


def tensors(adapter: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(adapter / "adapter_model.safetensors")


def new_adapter(reference: Mixed, folder: Path) -> list[str]:
    """The modules of a new adapter on tower and projector. Runs on every rank."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model

    base = AutoModel.from_pretrained(reference.path, arguments("tp2"))
    settings = {"r": 2, "target_modules": "all-linear"}
    model = get_peft_model(base, settings, parts={"vision", "projector"})
    model.save_pretrained_as_hf(folder / "new")
    return [name for name, tensor in model.named_parameters() if tensor.requires_grad]


def test_peft_loads_a_new_adapter_of_the_vision_model(tmp_path: Path) -> None:
    import peft

    reference = mixed("gemma3", tmp_path)
    names, _ = run_ranks(2, new_adapter, reference, tmp_path)
    assert names and all(".vision_model." in f".{name}" for name in names)
    model = copy.deepcopy(vision_reference.vision_model("gemma3"))
    lora = peft.PeftModel.from_pretrained(model, tmp_path / "new")
    wanted = {name for name, _ in lora.named_parameters() if "lora_" in name}
    assert {name.replace(".default", "") for name in wanted} == set(tensors(tmp_path / "new"))
