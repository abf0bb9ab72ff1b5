"""Images and videos of verl's batches as those of mca's samples."""

from collections.abc import Sequence

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.media import placeholders, positions
from mca_models.megatron.features.processor_media import sequence_media
from mca_train.clients.sample_media import MEDIA_INPUTS, VERL, BatchMedia
from mca_train.data.sample_images import SampleImages
from mca_train.types import Upstream

KEY = "multi_modal_inputs"
_DERIVED = ("second_per_grid_ts", "mm_token_type_ids")
"""Inputs that follow from tokens and positions."""
_SIZES = "images_seqlens"
"""Numbers of patches, which verl's agent loop adds for its estimate of FLOPs."""


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
    by_sample = [_inputs(each) for each in data[KEY]] if KEY in data.keys() else []
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
    """Raise if a sequence of text only has tokens of media, which the model would take for words.

    Raises:
        McaError: It has.
    """
    for medium, token in placeholders(config.vision_fields).items():
        if bool((ids == token).any()):
            raise McaError(
                f"verl's batch has token {token}, the placeholder of {medium}s, but no {KEY}; return them with the "
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
