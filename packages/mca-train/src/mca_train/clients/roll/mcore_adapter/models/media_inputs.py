"""Images and videos of ROLL's micro-batches as the arguments of mca's chunks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.media import placeholders, positions
from mca_models.megatron.distributed import parallel
from mca_models.megatron.features.sequence_media import media_joiner
from mca_models.megatron.layers.zigzag import take_rank_tokens
from mca_models.megatron.tensors import weights_dtype
from mca_train.clients.sample_media import MEDIA_INPUTS, ROLL, BatchMedia
from mca_train.data.sample_images import SampleImages
from mca_train.types import Chunk

UNCUT = ("input_ids", "attention_mask")
"""Tensors that every context-parallel rank passes to a chunk in full, since the media are located in them."""
_NAMES = {name for names in MEDIA_INPUTS.values() for name in names}
_DERIVED = {"second_per_grid_ts", "mm_token_type_ids", "force_vit_image", "force_vit_video", "loss_mask"}
"""Inputs that follow from tokens and positions, or that mca does not need."""


class MediaInputs:
    """Forward pre-hook of a chunk that locates the media of a micro-batch and cuts its tokens.

    Args:
        chunk: The chunk.
        config: Configuration of the model.

    Raises:
        McaError: The model's media have no grids, by which ROLL's joined inputs are divided among sequences.
    """

    def __init__(self, chunk: Chunk, config: McaModelConfig) -> None:
        if config.mrope is None or "spatial_merge_size" not in config.hf_config.get("vision_config", {}):
            raise McaError(
                f"images of {config.model_type} are not supported with ROLL, which joins those of a micro-batch; use a "
                "Qwen-VL model, or mca-train"
            )
        self._config = config
        self._join = media_joiner(config, decodes=chunk.pre_process).join
        self._tokens = torch.tensor(list(placeholders(config.vision_fields).values()))
        chunk.register_forward_pre_hook(self.before_chunk, with_kwargs=True, prepend=True)

    def before_chunk(
        self, chunk: Chunk, args: tuple[object, ...], kwargs: JsonObject
    ) -> tuple[tuple[object, ...], JsonObject]:
        """Return the arguments of mca's chunk for those of ROLL.

        Raises:
            McaError: The inputs or positions are of another kind than the model's.
        """
        media = {name: kwargs[name] for name in _NAMES & kwargs.keys()}
        given = {name: value for name, value in kwargs.items() if name not in _NAMES | _DERIVED}
        tokens, theirs = given["input_ids"], given.pop("position_ids", None)
        spans = self._located(tokens.cpu(), theirs, given.pop("attention_mask", None), media)
        joined = self._join(spans, [tokens.shape[1]] * len(tokens), _cut, packed=False).to(tokens.device)
        images = joined.keywords(weights_dtype(chunk))
        ours = {"input_ids": _cut(tokens, 1), "attention_mask": None, "position_ids": joined.sections}
        return args, given | ours | images

    def _located(
        self, tokens: Tensor, theirs: Tensor | None, mask: Tensor | None, media: Mapping[str, Tensor]
    ) -> list[SampleImages | None]:
        """Return the media of each sequence, among the tokens of all."""
        if not media:
            if bool(torch.isin(tokens, self._tokens).any()):
                raise McaError(
                    "a micro-batch has placeholders of media, but no multi_modal_inputs; return them with the batch"
                )
            return [None] * len(tokens)
        batch = BatchMedia({name: value.cpu() for name, value in media.items()}, self._config, ROLL)
        sections = [None] * len(tokens) if theirs is None else list(theirs.cpu().unbind(1))
        located = [
            batch.take(ids, None if own is None else own[0])
            for ids, own in zip(tokens, sections, strict=True)
        ]
        batch.require_taken()
        for row, (own, images) in enumerate(zip(sections, located, strict=True)):
            if own is not None:
                real = torch.ones_like(tokens[row]) if mask is None else mask[row].cpu()
                _require_positions(own[:, real.bool()], images, real)
        return located


def _cut(tokens: Tensor, axis: int) -> Tensor:
    group = parallel.context_group()
    return take_rank_tokens(tokens, axis, group.rank(), group.size()).contiguous()


def _require_positions(theirs: Tensor, images: SampleImages | None, real: Tensor) -> None:
    """Raise unless ROLL's positions of the tokens that are no padding are mca's, up to a shift.

    Args:
        theirs: ``[3, tokens]``.
        images: Media of the sequence.
        real: 1 for each token that is no padding, else 0.
    """
    ours = torch.from_numpy(positions(len(real), images.places if images else ()))[:, real.bool()]
    shift = theirs - ours.to(theirs.dtype)
    if shift.numel() and not bool((shift == shift[0, 0]).all()):
        raise McaError(
            "a micro-batch has position_ids that mca does not have for this model and its images; train on text only"
        )
