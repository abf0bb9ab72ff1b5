"""Text preview of tokenized samples: counts, lengths, and decoded samples with their targets.

It prints nothing. `samples` makes the samples.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mca_config.printable import counted
from mca_train.data.token_dataset import IGNORED, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_train.data.mixture import Mixture
    from mca_train.data.preferences import PairDataset
    from mca_train.data.token_dataset import TokenDataset

OPEN, CLOSE = "⟦", "⟧"
_BARS, _WIDEST, _SHOWN, _LONGEST = 10, 40, 3, 4000


def render_preview(
    samples: "TokenDataset | PairDataset | Mixture", tokenizer: "PreTrainedTokenizerBase", shown: int = _SHOWN
) -> str:
    """Render the preview of ``samples``.

    Args:
        samples: Tokenized samples.
        tokenizer: Tokenizer that decodes them.
        shown: Number of decoded samples: the first, the last, and some in between.
    """
    lengths = np.asarray(samples.lengths, np.int64)
    lengths = lengths.reshape(len(samples), -1)
    sequences = lengths.reshape(-1)
    targets = sum(_count_targets(samples[index]) for index in range(len(samples)))
    pairs = lengths.shape[1] > 1
    lines = [
        f"{counted(len(samples), 'pair' if pairs else 'sample')}, {counted(int(sequences.sum()), 'token')}, "
        f"of which {targets:,} are targets",
        f"tokens of a {'sequence' if pairs else 'sample'}: {int(sequences.min())} to {int(sequences.max())}, "
        f"median {int(np.median(sequences))}, mean {sequences.mean():.0f}",
        "",
        *length_histogram(sequences),
    ]
    indices = dict.fromkeys(np.linspace(0, len(samples) - 1, min(shown, len(samples))).astype(int).tolist())
    for index in indices:
        lines += ["", f"sample {index}, targets between {OPEN} and {CLOSE}:"]
        lines += [text for side in _sequences(samples[index]) for text in render_sequence(*side, tokenizer)]
    return "\n".join(lines) + "\n"


def length_histogram(lengths: NDArray[np.int64]) -> Iterator[str]:
    """Yield one bar per range of lengths."""
    low, high = int(lengths.min()), int(lengths.max())
    edges = np.unique(np.linspace(low, high + 1, _BARS + 1).astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    width = len(str(high))
    for first, stop, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "#" * (-(-int(count) * _WIDEST // int(counts.max())))
        yield f"  {first:>{width}} - {stop - 1:>{width}}  {bar:<{_WIDEST}}  {count:,}"


def render_sequence(
    ids: list[int], is_target: list[bool], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[str]:
    """Yield the lines of a decoded sequence with marked targets, shortened if it is very long."""
    text = ""
    for targets, tokens in _group_targets(ids, is_target):
        part = str(tokenizer.decode(tokens))
        text += f"{OPEN}{part}{CLOSE}" if targets else part
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    yield from (f"  | {line}" for line in text.split("\n"))


def _group_targets(ids: Iterable[int], is_target: Iterable[bool]) -> Iterator[tuple[bool, list[int]]]:
    run: list[int] = []
    before = False
    for token, counts in zip(ids, is_target, strict=True):
        if run and counts != before:
            yield before, run
            run = []
        run.append(token)
        before = counts
    if run:
        yield before, run


def _sequences(sample: Sample) -> Iterator[tuple[list[int], list[bool]]]:
    for side in ("", "chosen_", "rejected_"):
        if f"{side}input_ids" in sample:
            labels = sample[f"{side}labels"]
            yield sample[f"{side}input_ids"].tolist(), (labels != IGNORED).tolist()


def _count_targets(sample: Sample) -> int:
    """Count the trained tokens; the first token of a sequence is never trained."""
    return sum(
        int((values[1:] != IGNORED).sum()) for name, values in sample.items() if name.endswith("labels")
    )
