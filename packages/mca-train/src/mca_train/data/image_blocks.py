"""Pre-training blocks of texts with images, which are never split across blocks.

Each ``<image>`` of a row is the placeholder of an image in its column. `ImageBlockStream` makes
blocks of streamed rows. `samples` and `streams` make blocks of text alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from mca_config.errors import McaError
from mca_config.types import JsonObject, Values
from mca_train.config.arguments import DataArguments
from mca_train.data.encoding import block_tokenizer
from mca_train.data.image_rows import ImageRows
from mca_train.data.media_tokens import Span
from mca_train.data.medium_tokens import Grid
from mca_train.data.placeholders import require_no_placeholders
from mca_train.data.sample_images import DatasetImages, ImageTable, SampleImages
from mca_train.data.samples import lists, map_in_memory
from mca_train.data.streams import FileRows, Row, RowStream
from mca_train.data.token_dataset import IGNORED, Sample, TokenDataset

if TYPE_CHECKING:
    import datasets


TextEncoder = Callable[[Values, str], tuple[Sequence[int], Sequence[bool], list[Grid]]]


def image_blocks(
    rows: "datasets.Dataset", read: ImageRows, arguments: DataArguments, key: str
) -> TokenDataset:
    """Concatenate all texts, each with EOS, and split them into blocks of up to ``seq_length`` tokens.

    Args:
        rows: Rows of the files.
        read: Image options of the rows.
        arguments: Names of columns, and lengths.
        key: Argument that names the files, for errors.

    Raises:
        McaError: A row is invalid, or an image is longer than a block.
    """
    tokenized = _tokenize_rows(rows, read, arguments, key)
    tokens = np.concatenate(
        [np.asarray(ids, np.int32) for ids in tokenized["input_ids"]] or [np.zeros(0, np.int32)]
    )
    is_target = np.concatenate(
        [np.asarray(side, np.bool_) for side in tokenized["is_target"]] or [np.zeros(0, np.bool_)]
    )
    if len(tokens) < 2:
        raise McaError(f"{key}: the texts have fewer than two tokens together; set a file with longer texts")
    origins = [(row, which) for row, grids in enumerate(tokenized["grids"]) for which in range(len(grids))]
    grids = [Grid.from_numbers(numbers) for of_row in tokenized["grids"] for numbers in of_row]
    spans = read.tokens.spans(tokens, grids) if grids else []
    cuts = block_cuts(len(tokens), spans, arguments.seq_length, key)
    lengths = np.diff(cuts)
    is_kept = lengths > 1  # a single token has no target
    of_kept = np.repeat(is_kept, lengths)
    offsets = np.cumsum([0, *lengths[is_kept]], dtype=np.int64)
    made = TokenDataset(tokens[of_kept], offsets, is_target[of_kept])
    if grids:
        firsts = np.searchsorted([start for start, _ in spans], cuts).tolist()
        blocks = zip(pairwise(firsts), is_kept, strict=True)
        slices = [slice(first, last) for (first, last), kept in blocks if kept]
        table = ImageTable.from_samples((grids[some], origins[some]) for some in slices)
        made.images = DatasetImages(rows=rows, table=table, read=read, key=key)
    return made


def _tokenize_rows(
    rows: "datasets.Dataset", read: ImageRows, arguments: DataArguments, key: str
) -> "datasets.Dataset":
    encode = text_encoder(rows.column_names, read, arguments, key)

    def made(row: Values, index: int) -> JsonObject:
        tokens, targets, grids = encode(row, f"row {index}")
        return {"input_ids": tokens, "is_target": targets, "grids": [grid.numbers for grid in grids]}

    features = {"input_ids": lists("int32", 1), "is_target": lists("bool", 1), "grids": lists("float64", 2)}
    return map_in_memory(rows, made, features, arguments.preprocessing_num_workers)


def text_encoder(names: Sequence[str], read: ImageRows, arguments: DataArguments, key: str) -> TextEncoder:
    """Return the function from a row and its location to tokens, targets and image grids."""
    marked, plain = (
        block_tokenizer(names, read.tokenizer, arguments, key, vision) for vision in (None, read.vision)
    )

    def encode(row: Values, place: str) -> tuple[Sequence[int], Sequence[bool], list[Grid]]:
        try:
            text, files = read.text(row)
            if files:
                (tokens,) = marked([{arguments.text_column: text}], [place])
            else:
                (tokens,) = plain([{**row, arguments.text_column: text}], [place]) or ([],)
            targets = [True] * len(tokens)
            if not files:
                return tokens, targets, []
            require_no_placeholders(tokens, read.vision, media={"image"})
            grids = read.grids(files, f"{key}, {place}")
            return *read.tokens.expand(tokens, targets, grids), grids
        except McaError as error:
            reason = str(error).removeprefix(f"{key}, {place}: ")
            raise McaError(f"{key}, {place}: {reason}") from error

    return encode


def block_cuts(total: int, spans: Sequence[Span], length: int, key: str) -> list[int]:
    """Return the boundaries of the blocks, which never split an image."""
    cuts, next_span = [0], 0
    while cuts[-1] < total:
        end = min(cuts[-1] + length, total)
        while next_span < len(spans) and spans[next_span][1] <= end:
            next_span += 1
        if next_span < len(spans) and spans[next_span][0] < end:
            start, stop = spans[next_span]
            if start == cuts[-1]:
                raise McaError(
                    f"{key}: an image has {stop - start} tokens with its marks, more than seq_length {length}; raise "
                    "it, or have the image processor make images smaller"
                )
            end = start
        cuts.append(end)
    return cuts


@dataclass(frozen=True)
class _Image:
    """Image among the tokens that are in no block yet: its grid, its row, and its index in the row."""

    grid: Grid
    row: Row
    which: int


class ImageBlockStream(RowStream):
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
        self._read, self._key, self._length = read, key, arguments.seq_length
        self._encode = text_encoder(names, read, arguments, key)
        order = f"blocks of {self._length} tokens of {rows.order_description}"
        super().__init__(rows, order, any(map(read.has_images, rows.heads)))

    def __iter__(self) -> Iterator[Sample]:
        tokens: list[int] = []
        targets: list[bool] = []
        images: list[_Image] = []
        for row in self.rows:
            own, is_target, grids = self._encode(row, row.place)
            tokens += own
            targets += is_target
            images += [_Image(grid, row, which) for which, grid in enumerate(grids)]
            if len(tokens) <= self._length:
                continue
            spans = self._spans(tokens, images)
            cuts = block_cuts(len(tokens), spans, self._length, self._key)[:-1]  # the last may still grow
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
            grids = [image.grid for image in images]
            rows = {image.row.place: image.row for image in images}
            origins = [(image.row.place, image.which) for image in images]
            places, location = self._read.tokens.locate(tokens, grids), f"{self._key}, {', '.join(rows)}"
            sample["images"] = SampleImages(
                places, lambda: self._read.tensors(rows, origins, grids, location)
            )
        return sample


def _before(spans: Sequence[Span], position: int) -> int:
    """Return the number of ``spans`` that begin before ``position``."""
    return sum(start < position for start, _ in spans)
