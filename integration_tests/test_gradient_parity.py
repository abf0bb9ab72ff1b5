"""One backward pass gives every Hugging Face tensor the gradient that transformers' autograd gives it.

Gradients travel as weights do: they are put in the place of the weights and exported, so that gathering and
templates are the tested ones.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from layouts import arguments, selected, world_size
from mca_models.checkpoint.hf_directory import HfSource
from mca_models.megatron.tensors import to_torch
from reference import Reference, hf_model, make_reference

pytestmark = pytest.mark.ranks

DENSE = ("llama", "qwen2-tied", "qwen3-tied", "mistral", "llama-one-group")
MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3")
DENSE_LAYOUTS = ("tp1", "tp2", "tp2sp", "tp4", "dp2", "pp2vpp2", "cp2", "tp2pp2vpp2", "tp2cp2sp", "cp2pp2")
MOE_LAYOUTS = (
    "tp1",
    "tp2sp",
    "dp2",
    "ep2",
    "tp2ep2etp1",
    "cp2",
    "cp2ep2",
    "pp2vpp2ep2",
    "tp2etp2ep2",
    "tp2cp2sp",
    "ep2allgather",
    "tp2ep2etp1allgather",
    "dp2etp2",
    "tp2etp1sp",
)
ETP_LAYOUTS = ("dp4etp4", "tp2dp2etp4sp", "tp4etp2sp", "pp2dp2etp2")
BIASED = ("glm4_moe", "deepseek_v3")
GRID = [(c, n) for c in DENSE for n in DENSE_LAYOUTS] + [(c, n) for c in MOE for n in MOE_LAYOUTS]
GRID += [("mixtral", layout) for layout in ETP_LAYOUTS]
TOLERANCE = 1e-4


def expected_gradients(reference: Reference, folder: Path) -> Path:
    """A checkpoint with transformers' gradients in the place of weights."""
    path = folder / f"{reference.case}-expected"
    model = copy.deepcopy(hf_model(reference.case))
    logits = model(reference.input_ids, use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), reference.input_ids[:, 1:].flatten()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(path)
    return path


def batches(input_ids: torch.Tensor, micro_batches: int) -> Iterator[dict[str, torch.Tensor]]:
    """This data-parallel rank's share of the micro-batches, this context rank's part; the last token has no target."""
    from megatron.core import parallel_state

    from mca_models.megatron import platform
    from mca_models.megatron.distributed import parallel
    from mca_models.megatron.layers.zigzag import take

    rows, length = input_ids.shape
    whole = {
        "input_ids": input_ids,
        "labels": input_ids.roll(-1, 1),
        "position_ids": torch.arange(length).expand(rows, -1),
        "loss_mask": (torch.arange(length) < length - 1).float().expand(rows, -1),
    }
    group = parallel.context_group()
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for index in range(replica, micro_batches, replicas):
        part = slice(index * rows // micro_batches, (index + 1) * rows // micro_batches)
        yield {
            name: take(x[part], 1, group.rank(), group.size()).to(platform.current_device())
            for name, x in whole.items()
        }


def forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    batch = next(iterator)
    mask = batch["loss_mask"]
    losses = model(**batch, attention_mask=None)

    def loss(losses: torch.Tensor) -> Any:
        return (losses * mask).sum(), mask.sum().int(), {}

    return losses, loss


def export_gradients(pairs: list[tuple[Reference, str]], folder: Path) -> None:
    """One forward and backward pass of each model on its layout, exported. Runs on every rank."""
    by_layout = sorted(pairs, key=lambda pair: pair[1])  # each has process groups of its own
    for reference, layout in by_layout:
        export_gradient(reference, layout, folder / f"{reference.case}-{layout}")


def export_gradient(reference: Reference, layout: str, path: Path, **settings: Any) -> None:
    """The gradients of one forward and backward pass, exported as if they were weights."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mca_models.megatron import AutoModel

    args = arguments(layout, calculate_per_token_loss=True, moe_aux_loss_coeff=0.0, **settings)
    model = AutoModel.from_pretrained(reference.path, args)
    model.megatron.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    chunks = [DistributedDataParallel(model.megatron, ddp, chunk) for chunk in model.chunks]
    count, replicas = 4, parallel_state.get_data_parallel_world_size()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[batches(reference.input_ids, count) for _ in chunks],
        model=chunks,
        num_microbatches=count // replicas,
        seq_length=reference.input_ids.shape[1],
        micro_batch_size=reference.input_ids.shape[0] // count,
        forward_only=False,
    )
    with torch.no_grad():
        for _, tensor in model.held():
            if isinstance(tensor, torch.nn.Parameter):
                tensor.copy_(tensor.main_grad)
    model.save_pretrained_as_hf(path)


@pytest.fixture(scope="module")
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gradients of every case and layout, and those expected."""
    folder = tmp_path_factory.mktemp("gradients")
    chosen = selected(request, GRID)
    grid = [pair for pair in GRID if pair in chosen or (pair[1] == "tp1" and pair[0] in BIASED)]
    references = {case: make_reference(case, folder, batch=4) for case, _ in grid}
    for reference in references.values():
        expected_gradients(reference, folder)
    for size in (1, 2, 4):
        pairs = [(references[case], layout) for case, layout in grid if world_size(layout) == size]
        if pairs:
            run_ranks(size, export_gradients, pairs, folder, timeout=300)
    return folder


def read(path: Path) -> dict[str, torch.Tensor]:
    return {info.name: to_torch(info.array().copy()) for info in HfSource(path).tensors()}


def worst_errors(expected: Path, found: Path) -> list[tuple[str, float]]:
    """The three tensors that differ most, relative to their own largest gradient, or a thousandth of all."""
    right, ours = read(expected), read(found)
    assert ours.keys() == right.keys()
    largest = max(float(x.abs().max()) for x in right.values())
    errors = {
        name: float((ours[name] - x).abs().max()) / max(float(x.abs().max()), largest * 1e-3)
        for name, x in right.items()
        if "e_score_correction_bias" not in name  # a buffer: the router's bias has no gradient
    }
    return sorted(errors.items(), key=lambda item: -item[1])[:3]


@pytest.mark.parametrize("case,layout", GRID)
def test_gradients_equal_autograd(case: str, layout: str, exported: Path) -> None:
    worst = worst_errors(exported / f"{case}-expected", exported / f"{case}-{layout}")
    assert worst[0][1] <= TOLERANCE, worst


@pytest.mark.parametrize("layout", ["tp2sp", "cp2", "pp2"])
def test_the_padding_token_gets_no_gradient_as_an_input(layout: str, tmp_path: Path) -> None:
    references = [make_reference(case, tmp_path, batch=4) for case in ("llama", "qwen3-tied")]
    padded = [replace(each, input_ids=each.input_ids.clone()) for each in references]
    for each in padded:
        each.input_ids[:, 5::4] = hf_model(each.case).config.pad_token_id
        expected_gradients(each, tmp_path)
    run_ranks(2, export_gradients, [(each, layout) for each in padded], tmp_path)
    for each in padded:
        worst = worst_errors(tmp_path / f"{each.case}-expected", tmp_path / f"{each.case}-{layout}")
        assert worst[0][1] <= TOLERANCE, worst


@pytest.mark.parametrize("case,layout", [pair for pair in GRID if pair[0] in BIASED])
def test_expert_biases_move_by_the_tokens_of_all_ranks(case: str, layout: str, exported: Path) -> None:
    moved, alone = read(exported / f"{case}-{layout}"), read(exported / f"{case}-tp1")
    biases = [name for name in moved if "e_score_correction_bias" in name]
    assert biases
    for name in biases:
        before = hf_model(case).state_dict()[name]
        assert (moved[name] - before).abs().max() > 1e-4
        assert torch.equal(moved[name], alone[name])
