"""Gradients of mca's models and of transformers' autograd, as directories of tensors.

Gradients are put in the place of weights and exported, so gathering and templates are tested too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cases import Case, group_for_forks
from checkpoint_files import read
from harness import run_ranks
from layouts import arguments
from parity import TOLERANCE
from reference import Reference, hf_model, make_reference, model_for
from routing import compare

NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
"""Seed OSS has it."""
UNTRAINED = ("e_score_correction_bias", "expert_bias", "layer_scalar", "act_fn.beta", "act_fn.eps")
"""Ends of the names of tensors that are no parameters, or get no gradient: Megatron moves biases by itself."""


def expected_gradients(reference: Reference, folder: Path) -> Path:
    """A checkpoint with transformers' gradients in the place of weights."""
    path = folder / f"{reference.model}-expected"
    return export_transformers_gradient(hf_model(reference.model), reference.input_ids, path)


def export_transformers_gradient(model: Any, input_ids: torch.Tensor, path: Path) -> Path:
    """Save the gradients of ``model`` as if they were its weights, which stay as they are."""
    return _save_gradients(model, model(input_ids, use_cache=False).logits, input_ids, path)


def _save_gradients(model: Any, logits: torch.Tensor, input_ids: torch.Tensor, path: Path) -> Path:
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()).backward()
    saved = model.state_dict(keep_vars=True)
    for name, tensor in saved.items():
        if isinstance(tensor, torch.nn.Parameter):
            saved[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    model.save_pretrained(path, state_dict=saved)
    model.zero_grad()
    return path


def _reference_with_gradients(model: str, folder: Path) -> Reference:
    """`make_reference` and `expected_gradients` of one forward pass."""
    reference = make_reference(model, folder, batch=4, with_graph=True)
    _save_gradients(hf_model(model), reference.logits, reference.input_ids, folder / f"{model}-expected")
    return replace(reference, logits=reference.logits.detach())


def batches(input_ids: torch.Tensor, micro_batches: int) -> Iterator[dict[str, torch.Tensor]]:
    """This data-parallel rank's share of the micro-batches, this context rank's part; the last token has no target."""
    from megatron.core import parallel_state

    from mca_models.megatron import platform
    from mca_models.megatron.distributed import parallel
    from mca_models.megatron.layers.zigzag import take_rank_tokens

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
            name: take_rank_tokens(x[part], 1, group.rank(), group.size()).to(platform.current_device())
            for name, x in whole.items()
        }


def forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    batch = next(iterator)
    mask = batch["loss_mask"]
    losses = model(**batch, attention_mask=None)

    def loss(losses: torch.Tensor) -> Any:
        return (losses * mask).sum(), mask.sum().int(), {}

    return losses, loss


Found = float | str
"""The largest difference of the logits, or what went wrong: it could not be built, or chose other experts."""


def compute(references: list[Reference], layout: str, folder: Path, **settings: Any) -> list[Found]:
    """Logits and gradients of each model; the gradients are exported. Runs on every rank."""
    found: list[Found] = []
    for reference in references:
        try:
            model = _model(reference, layout, **NO_DROPOUT, **settings)
            compared = compare(model, reference)
            export_gradient_of(model, reference, folder / f"{reference.model}-{layout}")
            found.append(compared.problem() or compared.difference)
        except Exception as error:  # the same on every rank: go on with the other models
            found.append(f"{type(error).__name__}: {error}")
    return found


def compute_each(references: dict[Case, Reference], folder: Path) -> list[Found]:
    """Return what `compute` finds for each case. Runs on every rank."""
    return [compute([reference], case.layout, folder)[0] for case, reference in references.items()]


def export_gradient(reference: Reference, layout: str, path: Path, **settings: Any) -> None:
    """The gradients of one forward and backward pass, exported as if they were weights."""
    export_gradient_of(_model(reference, layout, **settings), reference, path)


def _model(reference: Reference, layout: str, **settings: Any) -> Any:
    from mca_models.megatron import AutoModel

    sums = {"calculate_per_token_loss": True, "moe_aux_loss_coeff": 0.0}
    args = arguments(layout, **{**sums, **settings})
    return AutoModel.from_pretrained(reference.path, args)


def owners_not_called(model: Any) -> set[str]:
    """Modules that have parameters, until they are called: Megatron then waits for those that are being gathered."""
    found: set[str] = set()

    def await_call(name: str, module: torch.nn.Module) -> None:
        found.add(name)
        module.register_forward_pre_hook(lambda *_: found.discard(name))

    for number, chunk in enumerate(model.chunks):
        for name, module in chunk.named_modules():
            if any(each.requires_grad for each in module.parameters(recurse=False)):
                await_call(f"{number}.{name}", module)
    return found


def export_gradient_of(model: Any, reference: Reference, path: Path) -> None:
    """`export_gradient` of a model that is made for gradients of sums."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.megatron.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    chunks = [DistributedDataParallel(model.megatron, ddp, chunk) for chunk in model.chunks]
    replicas = parallel_state.get_data_parallel_world_size()
    count = min(4, 2 * replicas)
    uncalled = owners_not_called(model)
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[batches(reference.input_ids, count) for _ in chunks],
        model=chunks,
        num_microbatches=count // replicas,
        seq_length=reference.input_ids.shape[1],
        micro_batch_size=reference.input_ids.shape[0] // count,
        forward_only=False,
    )
    assert not uncalled, f"parameters are used of modules that are not called: {sorted(uncalled)}"
    with torch.no_grad():
        for _, tensor in model.local_params():
            if isinstance(tensor, torch.nn.Parameter):
                tensor.copy_(tensor.main_grad)
    model.save_pretrained_as_hf(path)


@dataclass(frozen=True)
class Computed:
    """The results of `compute` on every rank, and the folder of found and expected gradients."""

    folder: Path
    by_rank: dict[Case, list[Found]]

    def check(self, case: Case) -> None:
        """Logits, experts and gradients are those of transformers."""
        found = self.by_rank[case]
        assert all(isinstance(difference, float) and difference <= TOLERANCE for difference in found), found
        model = model_for(case)
        worst = worst_errors(self.folder / f"{model}-expected", self.folder / f"{model}-{case.layout}")
        assert worst[0][1] <= TOLERANCE, worst


def compute_all(cases: Sequence[Case], folder: Path) -> Computed:
    """Return what `compute` finds for each case."""
    references = {model: _reference_with_gradients(model, folder) for model in {*map(model_for, cases)}}
    computed = Computed(folder, {})
    for group in group_for_forks(cases):
        work = {case: references[model_for(case)] for case in group}
        for rank in run_ranks(group[0].num_ranks, compute_each, work, folder, timeout=300):
            for case, found in zip(group, rank, strict=True):
                computed.by_rank.setdefault(case, []).append(found)
    return computed


def is_trained(name: str) -> bool:
    """Return True if a tensor with this name gets a gradient; a router's bias, a buffer and an indexer do not."""
    return not name.endswith(UNTRAINED) and not any(part in name for part in (".indexer.", ".index_"))


def worst_errors(expected: Path, found: Path) -> list[tuple[str, float]]:
    """The three tensors that differ most, relative to their own largest gradient, or a thousandth of all."""
    right, ours = read(expected), read(found)
    assert ours.keys() == right.keys()
    largest = max(float(x.abs().max()) for x in right.values())
    errors = {
        name: float((ours[name] - x).abs().max()) / max(float(x.abs().max()), largest * 1e-3)
        for name, x in right.items()
        if is_trained(name)
    }
    return sorted(errors.items(), key=lambda item: -item[1])[:3]
