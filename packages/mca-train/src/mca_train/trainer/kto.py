"""``KtoTrainer`` trains on unpaired answers that are good or bad, against a reference model.

The loss is in `losses.preference`. Its KL estimate is computed before each step over all samples of the step.
"""

import logging
from collections import deque
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_train import groups
from mca_train.batching.kto_kl_pairs import KtoKlPairs
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.sampling import is_stream
from mca_train.data.token_dataset import Samples
from mca_train.losses.options import kto_dataset_problems, kto_step_problems
from mca_train.losses.preference import KtoLoss, counted_sequences, divergence, sequence_logps
from mca_train.losses.token_loss import sequence_loss
from mca_train.trainer.base import TrainerOptions
from mca_train.trainer.reference import ReferenceModel, resolve_reference, warn_trl_differences
from mca_train.trainer.rules import RULES, unpaired
from mca_train.trainer.trainer import McaTrainer
from mca_train.types import SampleSource

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
