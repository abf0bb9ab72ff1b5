"""Pre-training blocks of streamed texts with images, as `image_blocks` makes them in memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from mca_config.errors import McaError
from mca_train.config.arguments import DataArguments
from mca_train.data.file_rows import FileRows, Row
from mca_train.data.grids import Grid
from mca_train.data.image_blocks import block_cuts, text_encoder
from mca_train.data.image_rows import ImageRows
from mca_train.data.media_tokens import Span
from mca_train.data.sample_images import SampleImages
from mca_train.data.token_dataset import IGNORED, Sample


@dataclass(frozen=True)
class _Image:
    """Image among the tokens that are in no block yet: its grid, its row, and its index in the row."""

    grid: Grid
    row: Row
    which: int


class ImageBlockStream(IterableDataset[Sample]):
    """Stream of blocks from concatenated texts, each with EOS; images are never split.

    Args:
        rows: Rows in the order of concatenation.
        names: Columns of the rows.
        read: Image options of the rows.
        arguments: Names of columns, and lengths.
        key: Argument that names the files, for errors.
    """

    def __init__(
        self, rows: FileRows, names: Sequence[str], read: ImageRows, arguments: DataArguments, key: str
    ) -> None:
        self._rows, self._read, self._key = rows, read, key
        self._encode = text_encoder(names, read, arguments, key)
        self._length = arguments.seq_length
        self.order_description = f"blocks of {self._length} tokens of {rows.order_description}"
        self.has_images = any(map(read.has_images, rows.heads))
        """True if the first row of a file has images."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the shuffle."""
        self._rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[Sample]:
        tokens: list[int] = []
        targets: list[bool] = []
        images: list[_Image] = []
        for row in self._rows:
            own, is_target, grids = self._encode(row, row.place)
            tokens += own
            targets += is_target
            images += [_Image(grid, row, which) for which, grid in enumerate(grids)]
            if len(tokens) <= self._length:
                continue
            spans = self._spans(tokens, images)
            cuts = block_cuts(len(tokens), spans, self._length, self._key)[
                :-1
            ]  # the last block may still grow
            for start, stop in pairwise(cuts):
                if stop - start == 1:
                    continue  # a single token has no target
                some = images[_before(spans, start) : _before(spans, stop)]
                yield self._block(tokens[start:stop], targets[start:stop], some)
            tokens, targets = tokens[cuts[-1] :], targets[cuts[-1] :]
            images = images[_before(spans, cuts[-1]) :]
        if len(tokens) > 1:
            yield self._block(tokens, targets, images)

    def _spans(self, tokens: Sequence[int], images: Sequence[_Image]) -> list[Span]:
        if not images:
            return []
        return self._read.tokens.spans(tokens, [image.grid for image in images])

    def _block(self, tokens: Sequence[int], targets: Sequence[bool], images: Sequence[_Image]) -> Sample:
        ids = torch.tensor(tokens)
        sample: Sample = {"input_ids": ids, "labels": ids.where(torch.tensor(targets), IGNORED)}
        if images:
            places = self._read.tokens.locate(tokens, [image.grid for image in images])
            sample["images"] = SampleImages(places, lambda: self._tensors(images))
        return sample

    def _tensors(self, images: Sequence[_Image]) -> Mapping[str, Tensor]:
        rows = {image.row.place: image.row for image in images}
        try:
            files = {place: self._read.files(row) for place, row in rows.items()}
            found = [files[image.row.place][image.which] for image in images]
            return self._read.tokens.tensors(found, [image.grid for image in images])
        except McaError as error:
            raise McaError(f"{self._key}, {', '.join(rows)}: {error}") from error


def _before(spans: Sequence[Span], position: int) -> int:
    """Return the number of ``spans`` that begin before ``position``."""
    return sum(start < position for start, _ in spans)
