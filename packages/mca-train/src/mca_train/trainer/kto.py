"""``KtoTrainer`` trains on unpaired answers that are good or bad, against a reference model.

The loss is in `losses.preference`. Its KL estimate is computed before each step over all samples of the step, from
`KtoKlPairs`: each prompt with the completion of another sample, in addition to its own completion.
"""

import logging
from collections import deque
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mca_config.errors import McaError
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.packing import sequence_lengths
from mca_train.batching.sampling import is_stream
from mca_train.data.token_dataset import IGNORED, Samples, describe_order
from mca_train.losses.options import kto_dataset_problems, kto_step_problems
from mca_train.losses.preference import KtoLoss, counted_sequences, divergence, sequence_logps
from mca_train.losses.token_loss import sequence_loss
from mca_train.trainer.base import TrainerOptions
from mca_train.trainer.reference import ReferenceModel, resolve_reference, warn_trl_differences
from mca_train.trainer.rules import RULES, unpaired
from mca_train.trainer.trainer import McaTrainer
from mca_train.types import Sample, SampleSource

if TYPE_CHECKING:
    from mca_models import VirtualModels

logger = logging.getLogger(__name__)


class KtoTrainer(McaTrainer):
    """Trainer for samples whose ``values`` are 1 for a good answer and 0 for a bad one.

    Logs ``kl``, ``rewards/chosen``, ``rewards/rejected``, ``logps/chosen`` and ``logps/rejected`` (means over the good
    and over the bad answers, if there were any) and ``rewards/margins`` (the difference of the rewards) in addition to
    the loss, in evaluation too.

    Args:
        reference: Frozen reference model on the same layout. None, or the adapter's base model: the model itself
            without its LoRA adapter, which it then must have.
        loss: The loss.
        options: Options of `McaTrainer`; datasets in memory.
    """

    run_kind = "kto"
    metric_names = ("kl", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
    metric_differences = MappingProxyType({"rewards/margins": ("rewards/chosen", "rewards/rejected")})
    _rules = (*RULES, unpaired)

    def __init__(
        self,
        *,
        reference: "VirtualModels | None" = None,
        loss: KtoLoss | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        super().__init__(**options)
        self.kto = loss or KtoLoss()
        reference = resolve_reference(self.model, reference, self.processing_class)
        self._reference = ReferenceModel.for_trained(self.model, reference, self.args, "kto")
        warn_trl_differences(self.model, without_adapter=reference is None)
        if str(self.args.train_sampling_strategy) != "sequential":
            logger.warning(
                "kl is estimated with the answers of neighboring rows, which are usually in other steps; for those of "
                "the same step, as in TRL, set train_sampling_strategy to sequential"
            )
        self._policy = ReferenceModel(self.model, self.args.loss_chunk_size)
        self._reference_queue: deque[Tensor] = deque()
        self._kl = torch.zeros((), device=self.ranks.device)
        length = options.get("pack_length")
        self.replace_datasets(lambda dataset, _: self._add_kl_pairs(dataset, length))

    def _add_kl_pairs(self, dataset: SampleSource, length: int | None) -> Samples:
        if is_stream(dataset):
            raise McaError("kto needs samples in memory, not a stream; set streaming to false")
        group = self.get_total_train_batch_size(self.args)
        for problem in chain(kto_step_problems(group), kto_dataset_problems(len(dataset))):
            raise McaError(problem)
        return KtoKlPairs(dataset, group, length)

    def before_forward(self, batch: StepBatch) -> None:
        """Compute the reference's log-probabilities and the KL estimate over the global batch."""
        if (mismatched := batch.kl_batch) is None:
            raise McaError(
                "kto: this dataset did not exist when the trainer was created; create a new trainer with it as "
                "train_dataset or eval_dataset"
            )
        self._reference_queue = deque(sums for sums, _ in self._reference.log_probs(batch))
        total = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        reference = self._reference.log_probs(mismatched)
        for (policy_sums, micro), (reference_sums, _) in zip(
            self._policy.log_probs(mismatched), reference, strict=True
        ):
            real = counted_sequences(micro)
            total += torch.stack(
                [((policy_sums - reference_sums) * real).sum().double(), real.sum().double()]
            )
        self._kl = divergence(groups.sum_over_data(total))

    def compute_loss(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the loss sum over this micro-batch's answers and their count, which context-parallel ranks share."""
        if batch.values is None:
            raise McaError(
                "a sample of the dataset has no 'values'; expected 1 for a good answer, 0 for a bad one"
            )
        sums, counts = sequence_logps(output, batch)
        gain, good, real = (
            sums - self._reference_queue.popleft(),
            batch.values[:, 0] > 0,
            (counts > 0).float(),
        )
        self._add_metrics(sums.detach(), gain.detach(), good.float() * real, (~good).float() * real)
        return sequence_loss(self.kto(gain, good, self._kl), real, self.ranks)

    def _add_metrics(self, sums: Tensor, gain: Tensor, good: Tensor, bad: Tensor) -> None:
        ranks = self.ranks.layout.cp
        one = torch.ones((), device=sums.device) / ranks
        added, counts = {"kl": self._kl * one}, {"kl": one}
        for name, values in (("rewards", self.kto.beta * gain), ("logps", sums)):
            for side, which in (("chosen", good), ("rejected", bad)):
                added[f"{name}/{side}"] = (values * which).sum() / ranks
                counts[f"{name}/{side}"] = which.sum() / ranks
        self.metrics.add(added, counts)


class KtoKlPairs(Dataset[Sample]):
    """Dataset whose samples have ``other_input_ids`` and ``other_labels`` as well.

    Args:
        dataset: In-memory dataset; a completion begins with the first target.
        group: Number of consecutive samples that exchange completions: each takes the one of the sample before it, or
            of an earlier one if both have the same prompt.
        length: Maximum number of tokens; longer sequences are truncated.
    """

    def __init__(self, dataset: SampleSource, group: int, length: int | None) -> None:
        self.lengths = sequence_lengths(dataset)
        self.order_description = describe_order(dataset)
        self._dataset, self._group, self._length = dataset, group, length
        self._distances: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        sample, other = self._dataset[index], self._dataset[self._partner(index)]
        own, its = (_answer_start(item["labels"]) for item in (sample, other))
        made = {
            f"other_{name}": torch.cat([sample[name][:own], other[name][its:]])[: self._length]
            for name in ("input_ids", "labels")
        }
        if (images := sample.get("images")) is not None:
            made["other_images"] = images
        for item, start in ((sample, own), (other, its)):
            if _has_image_after(item, start):
                raise McaError(
                    "kto exchanges completions, and a completion has an image; put images in prompts only"
                )
        return {**sample, **made}

    def _partner(self, index: int) -> int:
        first = index - index % self._group
        size = min(self._group, len(self) - first)
        if size > 1:
            return first + (index - first - self._offset(first, size)) % size
        own = self._prompt(index)  # the only sample of the last group
        before = range(index - 1, max(index - self._group, 0) - 1, -1)
        return next((number for number in before if self._prompt(number) != own), max(index - 1, 0))

    def _offset(self, first: int, size: int) -> int:
        """Return the smallest offset in the group at ``first`` that pairs the fewest equal prompts."""
        if first not in self._distances:
            prompts = np.array([hash(self._prompt(first + number)) for number in range(size)])
            equal = ((prompts == np.roll(prompts, distance)).sum() for distance in range(1, size))
            known: list[int] = []
            for count in equal:
                known.append(int(count))
                if not count:
                    break
            self._distances[first] = 1 + int(np.argmin(known))
        return self._distances[first]

    def _prompt(self, index: int) -> tuple[int, ...]:
        sample = self._dataset[index]
        tokens = torch.as_tensor(sample["input_ids"])[: _answer_start(sample["labels"])]
        return tuple(tokens.tolist())


def _answer_start(labels: torch.Tensor) -> int:
    """Return the index of the first target."""
    found = (torch.as_tensor(labels) != IGNORED).nonzero()
    return int(found[0]) if len(found) else len(labels)


def _has_image_after(sample: Sample, start: int) -> bool:
    images = sample.get("images")
    return images is not None and any(place.start >= start for place in images.places)
