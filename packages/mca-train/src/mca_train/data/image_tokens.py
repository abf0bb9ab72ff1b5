"""`ImageTokens` knows how many tokens an image of some size is, and makes what the vision model takes of its pixels.

It asks the checkpoint's own image processor. Nothing is known here of rows or of batches.
"""

import inspect
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mca_config.errors import McaError, UsageError
from mca_config.model_config import McaModelConfig
from mca_train.types import ImageProcessor

if TYPE_CHECKING:
    from mca_train.data.image_files import ImageFile

Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""


class ImageTokens:
    """The tokens of images for one model.

    Args:
        processor: Of Hugging Face; one that cuts images into a grid of patches, as Qwen's and GLM's do.
        token: The placeholder's id.

    Raises:
        UsageError: The processor is of another kind.
    """

    def __init__(self, processor: ImageProcessor, token: int) -> None:
        self.token = token
        self._processor = processor
        resize = getattr(sys.modules[type(processor).__module__], "smart_resize", None)
        if resize is None or not hasattr(processor, "merge_size"):
            raise UsageError(
                f"{type(processor).__name__}: images of this kind are not read yet; those of Qwen2-VL, Qwen2.5-VL, "
                "Qwen3-VL, Qwen3.5 and GLM-4V are"
            )
        self._resize, self._takes = resize, set(inspect.signature(resize).parameters)
        self._grid = lru_cache(maxsize=1 << 16)(self._computed)

    def grid(self, height: int, width: int) -> Grid:
        """Rows and columns of tokens of an image of ``height`` times ``width`` pixels.

        Raises:
            McaError: The processor does not take images of this shape.
        """
        return self._grid(height, width)

    def _computed(self, height: int, width: int) -> Grid:
        own = self._processor
        known = {
            "height": height,
            "width": width,
            "factor": own.patch_size * own.merge_size,
            "min_pixels": own.size["shortest_edge"],
            "max_pixels": own.size["longest_edge"],
            "num_frames": own.temporal_patch_size,
            "temporal_factor": own.temporal_patch_size,
        }
        try:
            high, wide = self._resize(**{key: value for key, value in known.items() if key in self._takes})
            patches = own.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise McaError(f"an image of {width} x {height} pixels cannot be used: {error}") from error
        rows, columns = high // known["factor"], wide // known["factor"]
        if rows * columns * own.merge_size**2 != patches:
            raise McaError(
                f"{type(own).__name__} makes {patches} patches of {width} x {height} pixels, which are not "
                f"{rows} x {columns} tokens; report it"
            )
        return rows, columns

    def expanded(
        self, tokens: Sequence[int], targets: Sequence[bool], grids: Sequence[Grid]
    ) -> tuple[list[int], list[bool]]:
        """``tokens`` with each placeholder so many times as its image has tokens; none of them is a target.

        Raises:
            McaError: There are not as many placeholders as images.
        """
        if (found := list(tokens).count(self.token)) != len(grids):
            raise McaError(
                f"the chat template makes {found} placeholders (token {self.token}) of {len(grids)} images; use one "
                "that writes one for each, and no text that spells it"
            )
        ids: list[int] = []
        learnt: list[bool] = []
        sizes = iter(grids)
        for token, target in zip(tokens, targets, strict=True):
            rows, columns = next(sizes) if token == self.token else (1, 1)
            ids += [token] * (rows * columns)
            learnt += [target and token != self.token] * (rows * columns)
        return ids, learnt

    def tensors(self, files: "Sequence[ImageFile]", grids: Sequence[Grid]) -> dict[str, Tensor]:
        """What the vision model takes of ``files``, whose tokens are ``grids``.

        Raises:
            McaError: One cannot be read, or is not as large as when its tokens were counted.
        """
        made = dict(self._processor(images=[file.pixels() for file in files], return_tensors="pt").data)
        merge = self._processor.merge_size
        found = [(rows // merge, columns // merge) for _, rows, columns in made["image_grid_thw"].tolist()]
        for file, grid, now in zip(files, grids, found, strict=True):
            if tuple(grid) != now:
                raise McaError(
                    f"image {file.place} had {grid[0]} x {grid[1]} tokens when rows were read, and has {now[0]} x "
                    f"{now[1]} now; leave files alone while they are trained on"
                )
        return made


def image_tokens(config: McaModelConfig, directories: Sequence[Path]) -> ImageTokens:
    """Those of a model, whose image processor is in one of ``directories``.

    Raises:
        UsageError: The model takes no images, or there is no processor.
    """
    if config.vision is None:
        raise UsageError(f"a {config.model_type} model takes no images; leave them out of the rows")
    token = config.vision.get("image_token_id")
    if token is None:
        raise UsageError(f"images of {config.model_type} are not read yet; leave them out of the rows")
    from transformers import AutoImageProcessor

    reasons = []
    for directory in directories:
        try:
            processor = AutoImageProcessor.from_pretrained(directory)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reasons.append(f"{directory}: {' '.join(str(error).split())[:200]}")
            continue
        return ImageTokens(processor, token)
    raise UsageError(f"rows have images, and there is no image processor: {'; '.join(reasons)}")
