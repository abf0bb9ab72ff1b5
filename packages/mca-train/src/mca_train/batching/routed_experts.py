"""Experts that an engine chose for the tokens of samples: the column ``routed_experts``.

They are checked and joined per sequence, and sliced like the tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.router_replay import LIVE, checked_experts
from mca_train.batching.micro_batch import MicroBatch
from mca_train.batching.packing import ROUTED_EXPERTS, count_tokens
from mca_train.batching.sample_consistency import checksum
from mca_train.types import Sample

Cut = Callable[[Tensor, int], Tensor]
"""Function from a full tensor and an axis to the shard of this context-parallel rank."""

Sequences = list[tuple[Sample, bool]]
"""Sequences of a micro-batch, each with a flag that is False for sequences that do not count."""

_WHERE = f"{ROUTED_EXPERTS!r} of a sample"


@dataclass(frozen=True, kw_only=True)
class ExpertBatching:
    """Check and batching of the experts of samples.

    Args:
        config: The model; None: its experts are not checked, and none may be given.
        required: Every sample must have experts.
    """

    config: McaModelConfig | None = None
    required: bool = False

    def checked(self, groups: Sequence[Sequences]) -> list[Sequences]:
        """Return the sequences of all micro-batches with their experts as int16 ``[tokens, layers, topk]``.

        Raises:
            McaError: Experts are wrong, or only some samples have them.
        """
        present = [has_experts(each) for group in groups for each, _ in group]
        if not all(present) and (self.required or any(present)):
            raise McaError(
                f"a sample of the dataset has no {ROUTED_EXPERTS!r}, which "
                f"{'this trainer requires' if self.required else 'other samples have'}; give each sample its experts, "
                f"{LIVE} for tokens without"
            )
        if not any(present):
            return [*groups]
        return [[(self._checked(each), counts) for each, counts in group] for group in groups]

    def _checked(self, sequence: Sample) -> Sample:
        if self.config is None:
            raise McaError(f"{_WHERE} is given, but the model of these batches is not known; remove it")
        experts = torch.as_tensor(sequence[ROUTED_EXPERTS])
        tokens = len(sequence["input_ids"])
        if experts.ndim != 3 or len(experts) != tokens:
            raise McaError(
                f"{_WHERE} has shape {list(experts.shape)} for {tokens} tokens; expected [{tokens}, layers, topk], "
                f"with {LIVE} for tokens without, such as the last one of an engine"
            )
        return {**sequence, ROUTED_EXPERTS: checked_experts(self.config, experts, _WHERE)}

    def add_experts(
        self, batch: MicroBatch, sequences: Sequences, lengths: Sequence[int], cut: Cut
    ) -> MicroBatch:
        """Return ``batch`` with the experts of ``sequences``, each padded to one of ``lengths``, packed or not."""
        found = [sequence[ROUTED_EXPERTS] for sequence, _ in sequences if has_experts(sequence)]
        if not found:
            return batch
        found += [found[0][:0]] * (len(lengths) - len(found))  # padding of a pack
        padded = [
            cut(pad(each[:length], (0, 0, 0, 0, 0, length - len(each[:length])), value=LIVE)[None], 1)
            for each, length in zip(found, lengths, strict=True)
        ]
        return replace(batch, routed_experts=torch.cat(padded, 1 if batch.cu_seqlens is not None else 0))


def has_experts(sample: Sample) -> bool:
    """Return whether ``sample`` has experts."""
    return isinstance(sample, Mapping) and ROUTED_EXPERTS in sample


def without_experts(feature: Sample) -> Sample:
    """Return ``feature`` without its experts, which data collators cannot pad."""
    if not has_experts(feature):
        return feature
    return {name: value for name, value in feature.items() if name != ROUTED_EXPERTS}


def require_expert_rows(features: Sequence[Sample], num_tokens: Tensor, *, shifted: bool) -> None:
    """Raise if a collator changed the tokens of samples with experts.

    Args:
        features: Samples of a micro-batch.
        num_tokens: Tokens of each row of the collator.
        shifted: Rows have one token less than samples.

    Raises:
        McaError: A row has another number of tokens than its sample.
    """
    for feature, tokens in zip(features, num_tokens.tolist(), strict=True):
        if has_experts(feature) and tokens != count_tokens(feature) - shifted:
            raise McaError(
                f"data_collator made a row of {tokens} tokens of a sample with {count_tokens(feature)}, whose "
                f"{ROUTED_EXPERTS!r} then belong to other tokens; let it keep all tokens, or remove the column"
            )


def experts_checksum(sequences: Iterable[tuple[Sample, bool]]) -> int | None:
    """Return a CRC-32 of the experts of ``sequences``; None: they have none."""
    found = [sequence[ROUTED_EXPERTS] for sequence, _ in sequences if has_experts(sequence)]
    return checksum(found) if found else None
