"""`ReferenceModel` is the frozen reference of a loss: another model, or the trained one without its adapter.

It computes log-probabilities of sequences; the trainers compare them. `ReferenceLogProbs` saves those of a dataset in
``output_dir`` for resumed runs, several times while they are computed. A file of other samples or another reference is
ignored.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mca_config.errors import McaError, raise_problems
from mca_config.files import atomic_write, write_error
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_config.training import TrainingArguments
from mca_models.megatron.features.router_replay import RoutedExperts
from mca_models.megatron.log_probs.chunks import preserved_output
from mca_models.megatron.peft import PeftModels
from mca_models.megatron.state.fingerprint import fingerprint
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch, StepBatch
from mca_train.data.sample_images import SampleImages
from mca_train.engine.engine import Pipeline
from mca_train.engine.rng import preserved_rng
from mca_train.groups import Ranks
from mca_train.losses.loss_inputs import chunk_losses, smooth_labels
from mca_train.losses.options import adapter_reference_problems
from mca_train.losses.preference import counted_sequences, reference_problems, sequence_logps
from mca_train.types import SampleSource, VirtualModels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def resolve_reference(
    model: "VirtualModels",
    reference: "VirtualModels | None",
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    kept: bool = False,
) -> "VirtualModels | None":
    """Return the reference model; None means the trained model without its adapter.

    Args:
        model: The trained model.
        reference: The user's reference; an adapter's base model means the trained model without its adapter.
        tokenizer: Defines the largest token; None: the trained model's vocabulary.
        kept: The reference runs only before the first step, so it may be the trained model.

    Raises:
        McaError: It would change in training, has an adapter that it does not know, or cannot compute log-probabilities
            of the trained model's inputs.
    """
    if reference is None or reference.chunks is not model.chunks:
        if reference is not None:
            reference.reject_hidden_adapter()
            rows = model.config.vocab_size
            tokens = rows if tokenizer is None else min(rows, len(tokenizer))
            raise_problems(_differences(reference.config, model.config, tokens), "reference")
        return reference
    if isinstance(model, PeftModels) and reference is not model:
        return None
    if not kept:
        raise McaError(
            "reference is the trained model itself; remove it if there is an adapter, or load the model a second "
            "time"
        )
    return reference


def _differences(reference: McaModelConfig, model: McaModelConfig, tokens: int) -> Iterator[str]:
    yield from reference_problems(reference, model)
    if reference.head.num_labels is None and reference.vocab_size < tokens:
        yield (
            f"the reference has a vocabulary of {reference.vocab_size}, the tokenizer {tokens} tokens; load it with "
            f"AutoModel.from_pretrained(..., vocab_size={tokens})"
        )


def _require_adapter_reference(model: "VirtualModels", args: TrainingArguments, loss: str) -> None:
    """Raise unless ``model`` without its adapter can be the reference of ``loss``."""
    if not isinstance(model, PeftModels):
        raise McaError(f"{loss} needs a reference: pass one, or a model with a LoRA adapter")
    if model.adapter.modules_to_save:
        raise McaError(
            "modules_to_save trains parts of the base model, which then cannot be the reference; pass a "
            "reference model, or remove modules_to_save"
        )
    for problem in adapter_reference_problems(args):
        raise McaError(problem)


def warn_trl_differences(model: "VirtualModels", *, without_adapter: bool = False) -> None:
    """Warn of differences to TRL's trainers, which disable dropout and copy an adapter.

    Args:
        model: The trained model.
        without_adapter: It is its own reference, without its adapter.
    """
    adapted = model if isinstance(model, PeftModels) else None
    rates = {name: getattr(model.megatron, name) for name in ("attention_dropout", "hidden_dropout")}
    rates["lora_dropout"] = 0.0 if adapted is None else adapted.adapter.dropout
    if drops := [f"{name} {rate}" for name, rate in rates.items() if rate]:
        logger.warning(
            "dropout is on (%s), TRL's trainers disable it; set it to 0 to match them", ", ".join(drops)
        )
    named = [] if adapted is None or not without_adapter else adapted.adapter_parameters()
    if any(bool(factor.any()) for name, factor in named if ".lora_B." in name):
        logger.warning(
            "the adapter is already trained: the reference is the base model without it, not the initial model "
            "(as in TRL); for that, merge the adapter and pass the result as reference model"
        )


class ReferenceModel:
    """Runs a frozen model; collective.

    Args:
        model: Model with the same layout as the trained one.
        loss_chunk_size: As in the run's arguments.
        without_adapter: The model is the trained one; disable its adapter.
        trained: The trained model, whose samples may have routed experts: a reference with the same routers takes
            them too, so that equal weights have equal log-probabilities. None: ``model``.
    """

    def __init__(
        self,
        model: "VirtualModels",
        loss_chunk_size: int | None,
        *,
        without_adapter: bool = False,
        trained: "VirtualModels | None" = None,
    ) -> None:
        self._model, self._chunk_size = model, loss_chunk_size
        shapes = [RoutedExperts.from_config(each.config) for each in (model, trained or model)]
        self._replays = shapes[0] == shapes[1]
        with preserved_output(model.chunks):
            self._set_output()  # raises early if it is not supported
        self._pipeline = Pipeline(list(model.chunks), self._keep)
        self._adapted = cast("PeftModels", model) if without_adapter else None
        self._outputs: list[tuple[Tensor, MicroBatch]] = []

    @classmethod
    def for_trained(
        cls, model: "VirtualModels", reference: "VirtualModels | None", args: TrainingArguments, loss: str
    ) -> "ReferenceModel":
        """Return the reference of ``loss`` for the trained ``model``; None: the model itself without its adapter.

        Raises:
            McaError: The model without its adapter cannot be the reference.
        """
        if reference is None:
            _require_adapter_reference(model, args, loss)
        return cls(reference or model, args.loss_chunk_size, without_adapter=reference is None, trained=model)

    def name(self) -> str:
        """Return `model_fingerprint` of the reference."""
        with self._pipeline.params_gathered():
            return model_fingerprint(self._model, with_adapter=self._adapted is None)

    def log_probs(self, batch: StepBatch) -> list[tuple[Tensor, MicroBatch]]:
        """Return the log-probability of every sequence, ``[sequences]`` per micro-batch; last stage only."""
        self._outputs = []
        batch = batch if self._replays else batch.without_routed_experts()
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
        """Return a dataset's log-probabilities, ``[samples, sequences]`` fp64, on every rank; NaN if in no step.

        Args:
            steps: Steps of the dataset; the only value of each sequence is its number, from 1 on, and 0 for fillers.
            samples: Number of samples in the dataset.
            sequences: Number of sequences per sample.
            ranks: This rank.
        """
        total = torch.zeros(2, 1 + samples * sequences, dtype=torch.float64, device=ranks.device)
        for batch in steps:
            for sums, micro in self.log_probs(batch):
                values = sums.double().where(counted_sequences(micro), 0.0)  # a filler repeats a sequence
                numbers = cast("Tensor", micro.values)[:, 0].long()
                total.index_add_(1, numbers, torch.stack([values, torch.ones_like(values)]))
        log_probs: Tensor
        log_probs, counts = groups.sum_over_replicas(total)[:, 1:]
        return log_probs.where(counts > 0, torch.nan).reshape(samples, sequences)

    def _set_output(self) -> None:
        """Set the plain cross entropy in place of another trainer's output."""
        smooth_labels(self._model.chunks, 0.0, self._model.config.vocab_size)
        chunk_losses(self._model.chunks, self._chunk_size, wants_logits=False)

    def _frozen(self) -> AbstractContextManager[None]:
        return nullcontext() if self._adapted is None else self._adapted.disable_adapter()

    def _keep(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        sums, counts = sequence_logps(output, batch)
        self._outputs.append((sums, batch))
        return sums.sum(), counts.sum()


FOLDER = "reference_log_probs"
_VERSION = 2
"""Incremented with each change of a model's evaluation results."""


def model_fingerprint(model: VirtualModels, *, with_adapter: bool) -> str:
    """Return a hash of the weights and settings of ``model``, the same on every rank; collective.

    Args:
        model: With or without an adapter.
        with_adapter: Include the adapter.
    """
    adapter = cast("PeftModels", model) if with_adapter and hasattr(model, "adapter") else None
    settings, factors = [model.config.to_dict()["model"]], []
    if adapter is not None:
        rules = {param.mca_name(): param for param in adapter.rules.params}
        factors = [(rules[name], tensor) for name, tensor in adapter.adapter_parameters()]
        settings.append(dict(adapter.adapter.document))
    weights = fingerprint(model, factors)
    return hashlib.sha256(f"{weights} {json.dumps(settings, sort_keys=True)}".encode()).hexdigest()


class ReferenceLogProbs:
    """Log-probabilities of one dataset.

    Args:
        output_dir: Of the run.
        name: Of the dataset: ``train``, ``eval`` or ``eval_<name>``.
        dataset: Its samples.
        reference: `model_fingerprint` of the reference.
    """

    def __init__(self, output_dir: Path, name: str, dataset: SampleSource, reference: str) -> None:
        self.path = output_dir / FOLDER / f"{name}.npz"
        self._key = f"{_VERSION} {reference} {_digest(dataset)}"

    def read(self) -> NDArray[np.float64] | None:
        """Return the saved values, NaN where not computed yet; None without a file of these samples and reference."""
        try:
            with np.load(self.path, allow_pickle=False) as file:
                return np.asarray(file["log_probs"], np.float64) if str(file["key"]) == self._key else None
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None

    def write(self, log_probs: NDArray[np.float64]) -> None:
        """Replace the saved values; NaN where not computed yet.

        Raises:
            McaError: They cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path) as temporary, temporary.open("wb") as file:
                np.savez(file, log_probs=log_probs, key=np.array(self._key))
        except OSError as error:
            raise write_error(self.path, error) from error
        known = np.isfinite(log_probs).all(1).sum()
        logger.info(
            "%s: log-probabilities of the reference for %d of %s",
            self.path,
            known,
            counted(len(log_probs), "sample"),
        )


def _digest(dataset: SampleSource) -> str:
    """Return a hash of all tokens, targets and images."""
    digest = hashlib.sha256()
    for index in range(len(dataset)):
        for name, value in sorted(dataset[index].items()):
            images = sorted(value.tensors().items()) if isinstance(value, SampleImages) else [("", value)]
            for part, array in images:
                values = np.ascontiguousarray(array)
                digest.update(f"{name} {part} {values.shape} ".encode() + values.tobytes())
    return digest.hexdigest()
