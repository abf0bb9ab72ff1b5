"""`Reference` is the frozen model that a loss compares with: another model, or the trained one without its adapter.

It computes log-probabilities of sequences. What they are compared for is decided by the trainers.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mca_config.errors import McaError, raise_problems
from mca_config.model_config import McaModelConfig
from mca_config.training import TrainingArguments
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.checkpoint.reference_log_probs import model_fingerprint
from mca_train.engine.pipeline import Pipeline
from mca_train.engine.rng import preserved_rng
from mca_train.groups import Ranks
from mca_train.losses.chunked import chunk_losses, preserved_output
from mca_train.losses.label_smoothing import smooth_labels
from mca_train.losses.preference import (
    adapter_reference_problems,
    counted_sequences,
    reference_problems,
    sequence_logps,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_models import VirtualModels
    from mca_models.megatron.peft import PeftModels

logger = logging.getLogger(__name__)


def resolve_reference(
    model: "VirtualModels",
    given: "VirtualModels | None",
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    kept: bool = False,
) -> "VirtualModels | None":
    """The reference model that ``given`` means beside the trained one; None: this one itself, without its adapter.

    Args:
        model: The trained one.
        given: What a user gave as reference; the model that the adapter was put on means the one without it.
        tokenizer: Says how far the tokens go; None: as far as the trained model's vocabulary.
        kept: It is run before the first step alone, so it may be the trained one.

    Raises:
        McaError: It would change as the trained one does, has an adapter that it does not know, or computes no
            log-probabilities of what the trained one sees.
    """
    from mca_models.megatron.peft import PeftModels

    if given is None or given.chunks is not model.chunks:
        if given is not None:
            given.reject_hidden_adapter()
            rows = model.config.vocab_size
            tokens = rows if tokenizer is None else min(rows, len(tokenizer))
            raise_problems(_differences(given.config, model.config, tokens), "reference")
        return given
    if isinstance(model, PeftModels) and given is not model:
        return None
    if not kept:
        raise McaError(
            "the reference is the trained model itself, with which nothing would be compared; leave it out where there "
            "is an adapter, or load the model a second time"
        )
    return given


def _differences(reference: McaModelConfig, model: McaModelConfig, tokens: int) -> Iterator[str]:
    yield from reference_problems(reference, model)
    if reference.num_labels is None and reference.vocab_size < tokens:
        yield (
            f"the vocabulary of the reference has {reference.vocab_size} rows, the tokens are {tokens}; load it with "
            f"AutoModel.from_pretrained(..., vocab_size={tokens})"
        )


def require_adapter_reference(model: "VirtualModels", args: TrainingArguments, loss: str) -> None:
    """Raises unless ``model`` without its adapter is what ``loss`` can compare with.

    Raises:
        McaError: It has none, or what is left without it changes in training.
    """
    from mca_models.megatron.peft import PeftModels

    if not isinstance(model, PeftModels):
        raise McaError(f"{loss} compares with a reference: give one, or a model with a LoRA adapter")
    if model.adapter.modules_to_save:
        raise McaError(
            "modules_to_save trains parts of the base model, which is then no reference any more; give a "
            "reference model, or remove modules_to_save"
        )
    for problem in adapter_reference_problems(args):
        raise McaError(problem)


def warn_trl_differences(model: "VirtualModels", *, without_adapter: bool = False) -> None:
    """Warns of what is compared otherwise than TRL's trainers do, who turn dropout off and copy an adapter.

    Args:
        model: The trained one, as it is given.
        without_adapter: It is its own reference, without its adapter.
    """
    from mca_models.megatron.peft import PeftModels

    adapted = model if isinstance(model, PeftModels) else None
    rates = {name: getattr(model.megatron, name) for name in ("attention_dropout", "hidden_dropout")}
    rates["lora_dropout"] = 0.0 if adapted is None else adapted.adapter.dropout
    if drops := [f"{name} {rate}" for name, rate in rates.items() if rate]:
        logger.warning(
            "training drops (%s) where TRL's trainers do not; set it to 0 to do as they do", ", ".join(drops)
        )
    named = [] if adapted is None or not without_adapter else adapted.adapter_parameters()
    if any(bool(factor.any()) for name, factor in named if ".lora_B." in name):
        logger.warning(
            "the adapter was trained before: the reference is the base model without it, not the model as it begins "
            "(as with TRL); for that, merge the adapter and give the result as reference model"
        )


class ReferenceModel:
    """Runs a frozen model; collective.

    Args:
        model: Its ranks hold what the trained model's do.
        loss_chunk_size: As of the run.
        without_adapter: The model is the trained one, whose adapter is left out.
    """

    def __init__(
        self, model: "VirtualModels", loss_chunk_size: int | None, *, without_adapter: bool = False
    ) -> None:
        self._model, self._chunk_size = model, loss_chunk_size
        with preserved_output(model.chunks):
            self._set_output()  # what cannot be computed so is refused now
        self._pipeline = Pipeline(list(model.chunks), self._keep)
        self._adapted = cast("PeftModels", model) if without_adapter else None
        self._outputs: list[tuple[Tensor, MicroBatch]] = []

    def name(self) -> str:
        """See `model_fingerprint`."""
        with self._pipeline.params_gathered():
            return model_fingerprint(self._model, with_adapter=self._adapted is None)

    def log_probs(self, batch: StepBatch) -> list[tuple[Tensor, MicroBatch]]:
        """Log-probability of every sequence, ``[sequences]`` for each micro-batch; none but on the last stage."""
        self._outputs = []
        with (
            preserved_rng(),
            preserved_output(self._model.chunks),
            self._pipeline.params_gathered(),
            self._frozen(),
        ):
            self._set_output()
            self._pipeline.evaluate(batch)
        return self._outputs

    def dataset_log_probs(
        self, steps: Iterator[StepBatch], samples: int, sequences: int, ranks: Ranks
    ) -> Tensor:
        """The same of a whole dataset, ``[samples, sequences]`` fp64, on every rank; NaN of what no step has.

        Args:
            steps: Of it, each sequence with its number as its only value, from 1 on; the others' are 0.
            samples: In the dataset.
            sequences: Of each sample.
            ranks: This one among the others.
        """
        total = torch.zeros(2, 1 + samples * sequences, dtype=torch.float64, device=ranks.device)
        for batch in steps:
            for sums, micro in self.log_probs(batch):
                known = sums.double().where(counted_sequences(micro), 0.0)  # a filler repeats a sequence
                places = cast("Tensor", micro.values)[:, 0].long()
                total.index_add_(1, places, torch.stack([known, torch.ones_like(known)]))
        found: Tensor
        found, met = groups.sum_over_replicas(total)[:, 1:]
        return found.where(met > 0, torch.nan).reshape(samples, sequences)

    def _set_output(self) -> None:
        """Plain cross entropy, whatever a trainer of the same model has set."""
        smooth_labels(self._model.chunks, 0.0, self._model.config.vocab_size)
        chunk_losses(self._model.chunks, self._chunk_size, wants_logits=False)

    def _frozen(self) -> AbstractContextManager[None]:
        return nullcontext() if self._adapted is None else self._adapted.disable_adapter()

    def _keep(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        sums, counts = sequence_logps(output, batch)
        self._outputs.append((sums, batch))
        return sums.sum(), counts.sum()
