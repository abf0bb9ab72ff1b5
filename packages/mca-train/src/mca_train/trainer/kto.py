"""``KtoTrainer`` trains on answers that are good or bad, against a reference model.

The loss is in `losses.kto`. How far the model has moved is measured before each step on all of its samples.
"""

import logging
from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_train import groups
from mca_train.batching.kto_kl_pairs import KtoKlPairs
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.batching.step_stream import is_stream
from mca_train.data.token_dataset import Samples
from mca_train.losses.kto import KtoLoss, divergence, key_problems, model_problems, step_problems
from mca_train.losses.preference import counted_sequences, sequence_logps
from mca_train.losses.token_loss import of_sequences
from mca_train.trainer.base import TrainerOptions
from mca_train.trainer.reference import Reference, apart_from, require_reference, tell_differences
from mca_train.trainer.trainer import McaTrainer
from mca_train.types import SampleSource

if TYPE_CHECKING:
    from mca_models import VirtualModels

logger = logging.getLogger(__name__)


class KtoTrainer(McaTrainer):
    """Trains on samples whose ``values`` are 1 for a good answer and 0 for a bad one.

    Logs ``kl``, ``rewards/chosen``, ``rewards/rejected``, ``logps/chosen`` and ``logps/rejected`` (means over the good
    and over the bad answers, if there were any) and ``rewards/margins`` (the difference of the first two) beside the
    loss, in evaluation too.

    Args:
        reference: The frozen model to compare with, on the same layout. None, or what the adapter was put on: the model
            itself without its LoRA adapter, which it then must have.
        loss: The loss.
        options: As of `McaTrainer`; datasets in memory.
    """

    run_kind = "kto"
    signal_names = ("kl", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
    signal_differences = MappingProxyType({"rewards/margins": ("rewards/chosen", "rewards/rejected")})

    def __init__(
        self,
        *,
        reference: "VirtualModels | None" = None,
        loss: KtoLoss | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        super().__init__(**options)
        self.kto = loss or KtoLoss()
        args = self.args
        for problem in (*key_problems(args), *model_problems(self.model.megatron)):
            raise McaError(problem)
        reference = apart_from(self.model, reference, self.processing_class)
        if reference is None:
            require_reference(self.model, args, "kto")
        tell_differences(self.model, without_adapter=reference is None)
        if str(args.train_sampling_strategy) != "sequential":
            logger.warning(
                "kl is measured on answers of neighbours in the dataset, which are not those of the step unless "
                "train_sampling_strategy is sequential (as TRL asks)"
            )
        self._reference = Reference(
            reference or self.model, args.loss_chunk_size, without_adapter=reference is None
        )
        self._policy = Reference(self.model, args.loss_chunk_size)
        self._found: deque[Tensor] = deque()
        self._kl = torch.zeros((), device=self.ranks.device)
        self.train_dataset = self._mismatched(self.train_dataset, options.get("pack_length"))
        if isinstance(self.eval_dataset, dict):
            parts = self.eval_dataset.items()
            self.eval_dataset = {
                name: self._mismatched(part, options.get("pack_length")) for name, part in parts
            }
        else:
            self.eval_dataset = self._mismatched(self.eval_dataset, options.get("pack_length"))

    def _mismatched(self, dataset: SampleSource, length: int | None) -> Samples | None:
        if dataset is None:
            return None
        if is_stream(dataset):
            raise McaError("kto needs samples in memory, not a stream; set streaming to false")
        args = self.args
        group = args.per_device_train_batch_size * args.gradient_accumulation_steps
        group *= self.ranks.data_parallel_size
        for problem in step_problems(group):
            raise McaError(problem)
        if len(dataset) < 2:
            raise McaError("kto needs the answers of other samples, but a dataset has only one; give it more")
        return KtoKlPairs(dataset, group, length)

    def before_forward(self, batch: StepBatch) -> None:
        """Log-probabilities of the reference, and how far the model is from it, over the whole global batch."""
        if (others := batch.kl_batch) is None:
            raise McaError(
                "kto: this dataset did not exist when the trainer was created; create another one with it as "
                "train_dataset or eval_dataset"
            )
        self._found = deque(sums for sums, _ in self._reference.log_probs(batch))
        total = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        known = self._reference.log_probs(others)
        for (mine, micro), (its, _) in zip(self._policy.log_probs(others), known, strict=True):
            real = counted_sequences(micro)
            total += torch.stack([((mine - its) * real).sum().double(), real.sum().double()])
        self._kl = divergence(groups.sum_over_data(total))

    def compute_loss(self, output: Tensor, batch: MicroBatch, **_: object) -> tuple[Tensor, Tensor]:
        """The sum over this micro-batch's answers, and their number. Context-parallel ranks share both."""
        if batch.values is None:
            raise McaError(
                "a sample of the dataset has no 'values'; expected 1 for a good answer, 0 for a bad one"
            )
        sums, counts = sequence_logps(output, batch)
        gain, good, real = sums - self._found.popleft(), batch.values[:, 0] > 0, (counts > 0).float()
        self._add_signals(sums.detach(), gain.detach(), good.float() * real, (~good).float() * real)
        return of_sequences(self.kto(gain, good, self._kl), real, self.ranks)

    def _add_signals(self, sums: Tensor, gain: Tensor, good: Tensor, bad: Tensor) -> None:
        ranks = self.ranks.layout.cp
        one = torch.ones((), device=sums.device) / ranks
        added, counts = {"kl": self._kl * one}, {"kl": one}
        for name, values in (("rewards", self.kto.beta * gain), ("logps", sums)):
            for side, which in (("chosen", good), ("rejected", bad)):
                added[f"{name}/{side}"] = (values * which).sum() / ranks
                counts[f"{name}/{side}"] = which.sum() / ranks
        self.signals.add(added, counts)
