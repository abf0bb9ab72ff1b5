"""verl's batches, with images and videos, as micro-batches of mca, and mca's token values as verl's nested tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from verl.utils import tensordict_utils

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.media import placeholders, positions
from mca_models.megatron.distributed import parallel
from mca_models.megatron.features.processor_media import sequence_media
from mca_models.megatron.forward import gathered
from mca_models.megatron.layers.zigzag import restore_token_order
from mca_models.megatron.log_probs.vocabulary import TokenValues
from mca_train import groups
from mca_train.batching.collate import BatchOptions, PadCollator, StepCollator, model_options
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.packing import ROUTED_EXPERTS, packing_multiple
from mca_train.clients.sample_media import MEDIA_INPUTS, VERL, BatchMedia
from mca_train.data.sample_images import SampleImages
from mca_train.groups import Ranks
from mca_train.types import Sample, Upstream, VirtualModels

ExpertFunction = Callable[[TensorDict, Sequence[Tensor]], list[Tensor]]

_UNSUPPORTED = {
    "calculate_sum_pi_squared": "set actor.calculate_sum_pi_squared to false",
    "distillation_use_topk": "use verl's engine megatron for distillation",
    "distillation_only": "use verl's engine megatron for distillation",
}
_MEDIA = "multi_modal_inputs"
_DERIVED = ("second_per_grid_ts", "mm_token_type_ids")
"""Inputs that follow from tokens and positions."""
_SIZES = "images_seqlens"
"""Numbers of patches, which verl's agent loop adds for its estimate of FLOPs."""


@dataclass(frozen=True, kw_only=True)
class VerlMicroBatch(MicroBatch):
    """Micro-batch that keeps verl's data, from which its loss is computed."""

    data: TensorDict
    share: float
    """Part of the step's loss count: 1 / number of micro-batches, on the first context-parallel rank, else 0."""


def token_values(data: TensorDict) -> TokenValues:
    """Return the function of the values that verl asks for, at the temperature of ``data``.

    Raises:
        McaError: verl asks for something that is not supported.
    """
    for name, remedy in _UNSUPPORTED.items():
        if tensordict_utils.get(data, name):
            raise McaError(f"verl's batch has {name}, which the engine mca does not support; {remedy}")
    temperature = tensordict_utils.get(data, "temperature", 1.0)
    if isinstance(temperature, Tensor):
        if bool((temperature != temperature.flatten()[0]).any()):
            raise McaError(
                "verl's batch has several temperatures; the engine mca supports one for all samples"
            )
        temperature = float(temperature.flatten()[0])
    entropy = bool(tensordict_utils.get(data, "calculate_entropy"))
    return TokenValues(temperature=float(temperature), entropy=entropy)


def step_collator(models: VirtualModels, ranks: Ranks, *, packed: bool, pad_token_id: int) -> StepCollator:
    """Return the collator of this rank; a micro-batch's size and length are set by `step_batch`.

    Args:
        models: The model.
        ranks: This rank.
        packed: Pack the sequences of a micro-batch into one row.
        pad_token_id: Token of padding.
    """
    options = BatchOptions(
        collate=PadCollator(pad_token_id), pad_token_id=pad_token_id, **model_options(models, ranks)
    )
    return StepCollator.for_rank(options, ranks, models.megatron, micro_batch_size=1, packed=packed)


def step_batch(
    micro_batches: Sequence[TensorDict],
    collator: StepCollator,
    ranks: Ranks,
    config: McaModelConfig,
    experts: ExpertFunction | None = None,
) -> StepBatch:
    """Return the micro-batches with rows of equal number and length on all ranks; collective.

    Args:
        micro_batches: verl's, with ``input_ids`` as a nested tensor of sequences without padding.
        collator: From `step_collator`.
        ranks: This rank.
        config: Configuration of the model.
        experts: Function from a micro-batch and its tokens to their experts; None: the routers choose.
    """
    tokens = [sequences(data) for data in micro_batches]
    multiple = packing_multiple(ranks.layout.cp)
    rows = [
        sum(len(ids) + -len(ids) % multiple for ids in group) if collator.packed else max(map(len, group))
        for group in tokens
    ]
    length = int(groups.max_over_ranks(max(rows), ranks.device))
    height = int(groups.max_over_ranks(max(map(len, tokens)), ranks.device))
    share = 1 / len(micro_batches) if ranks.context_parallel_rank == 0 else 0.0
    steps = []
    for group, data in zip(tokens, micro_batches, strict=True):
        images = sample_images(data, group, config)
        samples: list[tuple[Sample, bool]] = [
            ({"input_ids": ids} | ({"images": own} if own else {}), True)
            for ids, own in zip(group, images, strict=True)
        ]
        if not collator.packed:
            samples += [({"input_ids": group[0][:1]}, False)] * (height - len(group))
        if experts is not None:
            chosen = experts(data, group)
            chosen += [chosen[0][:1]] * (len(samples) - len(group))
            samples = [
                (sample | {ROUTED_EXPERTS: each}, counts)
                for (sample, counts), each in zip(samples, chosen, strict=True)
            ]
        steps.append(replace(collator, length=length, micro_batch_size=len(samples))(samples))
    made = tuple(
        VerlMicroBatch(**vars(step.micro_batches[0]), data=data, share=share)
        for step, data in zip(steps, micro_batches, strict=True)
    )
    return replace(
        steps[0],
        micro_batches=made,
        num_samples=sum(step.num_samples for step in steps),
        num_tokens=sum(step.num_tokens for step in steps),
        squares=sum(step.squares for step in steps),
    )


def sequences(data: TensorDict) -> list[Tensor]:
    """Return the tokens of each sequence on the host.

    Raises:
        McaError: They are padded.
    """
    ids = data["input_ids"]
    if not ids.is_nested:
        raise McaError("verl's batch has padded input_ids; set data.pad_mode to no_padding")
    return [each.cpu() for each in ids.unbind()]


def nested_values(output: Tensor, batch: VerlMicroBatch) -> dict[str, Tensor]:
    """Return verl's ``model_output``: nested values of each token of the sequences, on every context-parallel rank.

    A token has the log-probability of the token that follows it, and the entropy of that token's distribution. The last
    token of a sequence has log-probability 0.

    Args:
        output: ``[rows, tokens]`` log-probabilities of this rank, or ``[2, rows, tokens]`` with entropies.
        batch: The micro-batch.
    """
    flat, offsets = flat_outputs(output if output.dim() == 3 else output[None], batch)
    ends = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    ends[offsets[1:] - 1] = True  # no token follows the last
    log_probs = flat[:, 0].masked_fill(ends, 0)
    nested = {"log_probs": torch.nested.nested_tensor_from_jagged(log_probs, offsets)}
    if flat.shape[1] > 1:
        nested["entropy"] = torch.nested.nested_tensor_from_jagged(flat[:, 1], offsets)
    return nested


def flat_outputs(values: Tensor, batch: VerlMicroBatch) -> tuple[Tensor, Tensor]:
    """Return the values of all tokens, ``[tokens, kinds]``, and where each sequence begins and the last one ends.

    Every context-parallel rank gets all tokens. Gradients go to the tokens of this rank only.

    Args:
        values: ``[kinds, rows, tokens]`` of this rank.
        batch: The micro-batch.
    """
    offsets = batch.data["input_ids"].offsets().to(values.device)
    lengths = batch.data["input_ids"].offsets().diff().tolist()
    group = parallel.context_group()
    parts = gathered(values.detach(), group)
    parts[group.rank()] = values
    by_token = torch.cat([part.permute(2, 1, 0) for part in parts])  # [tokens, rows, kinds]
    if batch.cu_seqlens is None:
        (rows,) = restore_token_order(by_token, (len(by_token),), group.size())
        sequences = [rows[:length, row] for row, length in enumerate(lengths)]
    else:
        row_lengths = batch.cu_seqlens.diff().tolist()
        ordered = restore_token_order(by_token, row_lengths, group.size())
        sequences = [
            tokens[:length, 0] for tokens, length in zip(ordered[: len(lengths)], lengths, strict=True)
        ]
    return torch.cat(sequences), offsets


def sample_images(
    data: TensorDict, tokens: Sequence[Tensor], config: McaModelConfig
) -> list[SampleImages | None]:
    """Return the images and videos of each sequence; None: it has none.

    Args:
        data: verl's micro-batch.
        tokens: ``input_ids`` of each sequence.
        config: Configuration of the model.

    Raises:
        McaError: The model takes no media, or other inputs or positions than verl's.
    """
    by_sample = [_inputs(each) for each in data[_MEDIA]] if _MEDIA in data.keys() else []
    if not any(by_sample):
        for ids in tokens:
            _require_no_placeholders(ids, config)
        return [None] * len(tokens)
    rows = [each.cpu() for each in data["position_ids"].unbind()]
    is_grid = config.mrope is not None and "spatial_merge_size" in config.hf_config.get("vision_config", {})
    find = _grid_images if is_grid else _images
    found = []
    for inputs, ids, place in zip(by_sample, tokens, rows, strict=True):
        if not inputs:
            _require_no_placeholders(ids, config)
        found.append(find(inputs, ids, place, config))
    return found


def _require_no_placeholders(ids: Tensor, config: McaModelConfig) -> None:
    """Raise if a sequence of text only has tokens of media, which the model would take for words."""
    for medium, token in placeholders(config.vision_fields).items():
        if bool((ids == token).any()):
            raise McaError(
                f"verl's batch has token {token}, the placeholder of {medium}s, but no {_MEDIA}; return them with the "
                "dataset, or keep the rollout from sampling this token"
            )


def _inputs(entry: Upstream) -> dict[str, Tensor]:
    """Return the inputs of one sequence, which verl's trainers keep as a dictionary, a TensorDict, or None."""
    inputs = entry.data if isinstance(entry, NonTensorData) else entry
    items = () if inputs is None else inputs.items()
    return {name: value for name, value in items if name != _SIZES}


def _images(inputs: Values, ids: Tensor, theirs: Tensor, config: McaModelConfig) -> SampleImages | None:
    """Return the media of a sequence of a model whose tokens have one position each."""
    try:
        found = sequence_media(ids, inputs, config)
    except McaError as error:
        raise McaError(f"verl's batch: {error}") from error
    if not torch.equal(theirs.cpu(), torch.arange(len(ids)).expand_as(theirs)):
        raise _other_positions()
    return None if found is None else SampleImages(found.places, found.tensors)


def _grid_images(inputs: Values, ids: Tensor, theirs: Tensor, config: McaModelConfig) -> SampleImages | None:
    """Return the media of a sequence of a model with M-RoPE, whose positions give the times of frames."""
    known = {name for names in MEDIA_INPUTS.values() for name in names}
    if unknown := sorted(inputs.keys() - known - set(_DERIVED)):
        raise McaError(
            f"verl's batch has {', '.join(unknown)}; expected images and videos as {', '.join(sorted(known))}"
        )
    media = BatchMedia({name: inputs[name].cpu() for name in known & inputs.keys()}, config, VERL)
    sections = theirs[-3:] if theirs.ndim == 2 else theirs.expand(3, -1)  # verl puts text positions in front
    found = media.take(ids, sections[0])
    media.require_taken()
    ours = torch.from_numpy(positions(len(ids), found.places if found else ()))
    if not torch.equal(sections, ours.to(sections.dtype)):
        raise _other_positions()
    return found


def _other_positions() -> McaError:
    return McaError(
        "verl's batch has position_ids that mca does not have for this model and its images; train on text only"
    )
