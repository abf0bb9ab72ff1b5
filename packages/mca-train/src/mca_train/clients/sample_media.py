"""Images and videos in a batch of another program, and their locations among the tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.media import ImageSpan, placeholders
from mca_models.templates import get_family
from mca_train.data.sample_images import SampleImages

MEDIA_INPUTS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
"""Names of the patches and of the grids of each medium in the batch."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Program whose batches have media, with the remedies for media that are cut off.

    Args:
        name: Its name.
        length: Its option for the number of tokens.
        pixels: Its option for the size of a medium, with ``{medium}``.
    """

    name: str
    length: str
    pixels: str


LLAMA_FACTORY = Program(name="LLaMA-Factory", length="cutoff_len", pixels="{medium}_max_pixels")
ROLL = Program(
    name="ROLL", length="prompt_length and sequence_length", pixels="data_args.{medium}_max_pixels"
)
VERL = Program(
    name="verl",
    length="data.max_prompt_length, or data.max_length in sft",
    pixels="max_pixels of the {medium}s in the dataset",
)


@dataclass(frozen=True)
class Medium:
    """One image, or the frames of a video without text between them.

    Args:
        patches: Patches of all frames, ``[frames * rows * columns, values]``.
        rows: Rows of patches of a frame.
        columns: Columns of patches of a frame.
        frames: Number of frames.
    """

    patches: Tensor
    rows: int
    columns: int
    frames: int


class BatchMedia:
    """Images and videos of one batch, which its sequences take in order.

    Args:
        batch: Batch of the program's collator.
        config: Configuration of the model.
        program: The program.
    """

    def __init__(self, batch: Mapping[str, Tensor], config: McaModelConfig, program: Program) -> None:
        self._program = program
        self._tokens = {token: medium for medium, token in placeholders(config.vision_fields).items()}
        self._media = {medium: _media(batch, medium, config, program) for medium in MEDIA_INPUTS}
        self._config = config

    def take(self, tokens: Tensor, times: Tensor | None) -> SampleImages | None:
        """Return the images and videos of the next sequence; None: it has none.

        Args:
            tokens: Its tokens.
            times: Time positions of its tokens; None: the collator has none.

        Raises:
            McaError: The placeholders among the tokens are not those of the next images.
        """
        known = torch.tensor(list(self._tokens), dtype=tokens.dtype)
        where = torch.isin(tokens, known).nonzero().flatten().tolist()
        places: list[ImageSpan] = []
        media: list[Medium] = []
        while where:
            name = self._tokens[int(tokens[where[0]])]
            if (medium := next(self._media[name], None)) is None:
                raise McaError(
                    f"{self._program.name}: a sample has more {name} tokens than its {name}s need; check the dataset"
                )
            place = self._place(where[0], medium, times)
            own, where = where[: place.tokens], where[place.tokens :]
            if own != list(range(place.start, place.start + place.tokens)):
                raise self._cut_off(name)
            places.append(place)
            media.append(medium)
        return SampleImages(tuple(places), lambda: _tensors(media)) if places else None

    def require_taken(self) -> None:
        """Check that the sequences have taken every image and video.

        Raises:
            McaError: One is left.
        """
        for name, left in self._media.items():
            if next(left, None) is not None:
                raise self._cut_off(name)

    def _place(self, start: int, medium: Medium, times: Tensor | None) -> ImageSpan:
        merged = int(self._config.hf_config["vision_config"]["spatial_merge_size"])
        rows, columns = medium.rows // merged, medium.columns // merged
        if medium.frames == 1:
            return ImageSpan(start, rows, columns)
        if times is None:
            raise McaError(
                f"{self._program.name}'s batch has no position_ids, which give the times of a video's frames; add them"
            )
        if (second := start + rows * columns) >= len(times):
            raise self._cut_off("video")
        return ImageSpan(start, rows, columns, medium.frames, float(times[second] - times[start]))

    def _cut_off(self, medium: str) -> McaError:
        length, pixels = self._program.length, self._program.pixels.format(medium=medium)
        return McaError(
            f"{self._program.name}: a sample's {medium} is cut off; raise {length}, or lower {pixels}"
        )


def _media(
    batch: Mapping[str, Tensor], medium: str, config: McaModelConfig, program: Program
) -> Iterator[Medium]:
    """Yield the images, or the videos, of ``batch``; a frame with text in front of it is a video of one frame."""
    patches, grids = (batch.get(name) for name in MEDIA_INPUTS[medium])
    if patches is None:
        return
    if grids is None:
        raise McaError(
            f"{medium}s of {config.model_type} are not supported with {program.name}, whose batch has "
            f"{MEDIA_INPUTS[medium][1]} for Qwen's models only; use mca-train sft"
        )
    vision = get_family(config.model_type).vision
    divided = medium == "video" and vision is not None and vision.video_tokens == "timestamps"
    for (frames, rows, columns), own in zip(
        grids.tolist(), patches.split(grids.prod(1).tolist()), strict=True
    ):
        parts = own.chunk(frames) if divided else (own,)
        yield from (Medium(part, rows, columns, 1 if divided else frames) for part in parts)


def _tensors(media: list[Medium]) -> dict[str, Tensor]:
    """Return the inputs of the vision tower: each frame is a grid of one frame."""
    grids = [[1, medium.rows, medium.columns] for medium in media for _ in range(medium.frames)]
    return {
        "pixel_values": torch.cat([medium.patches for medium in media]),
        "image_grid_thw": torch.tensor(grids),
    }
