"""Samples of mca from the rows and the collator of LLaMA-Factory.

Its collator returns ``input_ids`` without the last token and ``labels`` without the first, padded on the right. It is
called with one row of the dataset at a time, and the padding is removed: `batching` pads or packs as the layout needs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.media import positions
from mca_train.batching.collate import Collator
from mca_train.batching.packing import PackedDataset, PackingStats
from mca_train.batching.sampling import is_stream
from mca_train.clients.sample_media import LLAMA_FACTORY, MEDIA_INPUTS, BatchMedia
from mca_train.types import Sample, SampleSource

_MEDIA = tuple(name for names in MEDIA_INPUTS.values() for name in names)
_READ = ("input_ids", "labels", "attention_mask", "position_ids", *_MEDIA)
_DERIVED = ("mm_token_type_ids", "rope_deltas", "token_type_ids", "second_per_grid_ts", "video_metadata")
"""Inputs that follow from the tokens and their positions."""


@dataclass(frozen=True, kw_only=True)
class SampleMaker:
    """Function from a row of the client's dataset to a sample: a sequence, a preference pair, or a pack.

    Args:
        collate: The client's collator.
        config: Configuration of the model.
    """

    collate: Collator
    config: McaModelConfig

    def __call__(self, row: Mapping[str, Sample]) -> Sample:
        """Return the sample of ``row``.

        Raises:
            McaError: The collator returned an input that is not supported.
        """
        # the collator's wrapper shortens the tokens and labels of pairs, but not their masks
        inputs = {name: mask[:-1] if name.endswith("_attention_mask") else mask for name, mask in row.items()}
        batch = self.collate([inputs])
        if unknown := sorted(batch.keys() - {*_READ, *_DERIVED}):
            raise McaError(
                f"the collator returned {', '.join(unknown)}; expected text, or images and videos as "
                f"{', '.join(_MEDIA)}; use mca-train sft for audio and other media of {self.config.model_type}"
            )
        media = BatchMedia(batch, self.config, LLAMA_FACTORY)
        rows = self._rows(batch, media)
        if row.get("images") or row.get("videos"):  # without any, the collator adds a white image
            media.require_taken()
        if "chosen_input_ids" not in row:
            return rows[0] if len(rows[0]) > 1 else rows[0][0]
        sides = zip(("chosen", "rejected"), rows, strict=True)
        return {f"{side}_{name}": value for side, (sample,) in sides for name, value in sample.items()}

    def _rows(self, batch: Mapping[str, Tensor], media: BatchMedia) -> list[list[Sample]]:
        """Return the sequences of each row of ``batch``, without padding."""
        rows = []
        for row, mask in enumerate(batch["attention_mask"]):
            tokens = int((mask > 0).sum())
            if not bool((mask[:tokens] > 0).all()):
                raise McaError("the collator pads on the left; set padding_side of its tokenizer to 'right'")
            lengths = torch.unique_consecutive(mask[:tokens], return_counts=True)[1].tolist()
            ends = np.cumsum(lengths)
            cuts = [slice(int(end) - length, int(end)) for end, length in zip(ends, lengths, strict=True)]
            rows.append([self._sequence(batch, row, cut, media) for cut in cuts])
        return rows

    def _sequence(self, batch: Mapping[str, Tensor], row: int, cut: slice, media: BatchMedia) -> Sample:
        sample: Sample = {name: batch[name][row, cut] for name in ("input_ids", "labels")}
        theirs = batch["position_ids"][..., row, cut] if "position_ids" in batch else None
        times = theirs[0] if theirs is not None and theirs.ndim == 2 else None
        images = media.take(sample["input_ids"], times)
        if images is not None:
            sample["images"] = images
        if theirs is not None:
            places = images.places if images is not None else ()
            ours = torch.from_numpy(positions(len(sample["input_ids"]), places))
            if not torch.equal(theirs, ours if theirs.ndim == 2 else ours[0]):
                raise McaError(
                    "the collator returned position_ids that mca does not have for this model; set packing: false, "
                    "or neat_packing: true"
                )
        return sample


class ClientSamples(Dataset[Sample]):
    """Samples of a dataset in memory.

    Args:
        rows: ``datasets.Dataset`` of the client.
        make: Function from a row to a sample.
    """

    def __init__(self, rows: SampleSource, make: SampleMaker) -> None:
        self._rows, self._make = rows, make

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        return self._make(self._rows[int(index)])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of the sequences of each sample: ``[samples, sequences]``."""
        names = sorted(name for name in self._rows.column_names if name.endswith("input_ids"))
        rows = self._rows.select_columns(names)
        return np.array([[len(row[name]) - 1 for name in names] for row in rows], np.int64)


class ClientPacks(PackedDataset):
    """Packs of ``neat_packing``: each row of the client's dataset is one pack.

    Args:
        samples: The rows.
    """

    def __init__(self, samples: ClientSamples) -> None:
        lengths = samples.lengths
        self.dataset, self.units = samples, "packs of the client"
        self.packs = list(np.arange(len(samples))[:, None])
        self.fill = PackingStats(
            samples=len(samples),
            tokens=int(lengths.sum()),
            packs=len(samples),
            length=int(lengths.max(initial=1)),
            longest=int(lengths.max(initial=1)),
        )

    def __getitem__(self, index: int) -> list[Sample]:
        pack = self.dataset[index]
        return pack if isinstance(pack, list) else [pack]


class ClientStream(IterableDataset[Sample]):
    """Samples of a streamed dataset.

    Args:
        rows: ``datasets.IterableDataset`` of the client.
        make: Function from a row to a sample.
    """

    def __init__(self, rows: SampleSource, make: SampleMaker) -> None:
        self._rows, self._make = rows, make

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which the order depends on."""
        self._rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[Sample]:
        return map(self._make, self._rows)


def client_samples(rows: SampleSource, make: SampleMaker) -> SampleSource:
    """Return the samples of the client's dataset ``rows``, or of each of a dict of them.

    Raises:
        McaError: The rows are a stream of packs.
    """
    if rows is None:
        return None
    if isinstance(rows, dict):
        return {name: client_samples(part, make) for name, part in rows.items()}
    columns: Sequence[str] = getattr(rows, "column_names", None) or ()
    packed = "packing_params" in columns
    if is_stream(rows):
        if packed:
            raise McaError("neat_packing is not supported with streaming; set streaming: false")
        return ClientStream(rows, make)
    samples = ClientSamples(rows, make)
    return ClientPacks(samples) if packed else samples
