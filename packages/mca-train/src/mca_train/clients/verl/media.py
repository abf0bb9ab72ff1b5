"""Images and videos of verl's batches as those of mca's samples."""

from collections.abc import Sequence

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.media import positions
from mca_train.clients.sample_media import MEDIA_INPUTS, BatchMedia
from mca_train.data.sample_images import SampleImages

KEY = "multi_modal_inputs"
_DERIVED = ("second_per_grid_ts", "mm_token_type_ids")
"""Inputs that follow from tokens and positions."""


def sample_images(
    data: TensorDict, tokens: Sequence[Tensor], config: McaModelConfig
) -> list[SampleImages | None]:
    """Return the images and videos of each sequence; None: it has none.

    Args:
        data: verl's micro-batch.
        tokens: ``input_ids`` of each sequence.
        config: Configuration of the model.

    Raises:
        McaError: The model has no images, or other inputs or positions than verl's.
    """
    if KEY not in data.keys():
        return [None] * len(tokens)
    by_sample = [each.data if isinstance(each, NonTensorData) else each for each in data[KEY]]
    if not any(by_sample):
        return [None] * len(tokens)
    if config.mrope is None or "spatial_merge_size" not in config.hf_config.get("vision_config", {}):
        raise McaError(
            f"verl's batch has images or videos, which mca takes from verl for Qwen's vision-language models only, not "
            f"for {config.model_type}; train on text only"
        )
    rows = [each.cpu() for each in data["position_ids"].unbind()]
    return [
        _images(inputs or {}, ids, place, config)
        for inputs, ids, place in zip(by_sample, tokens, rows, strict=True)
    ]


def _images(inputs: Values, ids: Tensor, theirs: Tensor, config: McaModelConfig) -> SampleImages | None:
    known = {name for names in MEDIA_INPUTS.values() for name in names}
    if unknown := sorted(inputs.keys() - known - set(_DERIVED)):
        raise McaError(
            f"verl's batch has {', '.join(unknown)}; expected images and videos as {', '.join(sorted(known))}"
        )
    media = BatchMedia({name: inputs[name].cpu() for name in known & inputs.keys()}, config)
    sections = theirs[-3:] if theirs.ndim == 2 else theirs.expand(3, -1)  # verl puts text positions in front
    found = media.take(ids, sections[0])
    media.require_taken()
    ours = torch.from_numpy(positions(len(ids), found.places if found else ()))
    if not torch.equal(sections, ours.to(sections.dtype)):
        raise McaError(
            "verl's batch has position_ids that mca does not have for this model and its images; train on text only"
        )
    return found
