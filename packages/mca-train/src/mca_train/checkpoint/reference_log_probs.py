"""Log-probabilities of a reference model, saved in ``output_dir`` for resumed runs.

The file is written several times while they are computed. A file of other samples or another reference is ignored.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, cast
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mca_config.files import atomic_write, write_error
from mca_config.printable import counted
from mca_models.megatron.state.fingerprint import fingerprint
from mca_train.data.sample_images import SampleImages
from mca_train.types import SampleSource, VirtualModels

if TYPE_CHECKING:
    from mca_models.megatron.peft import PeftModels

logger = logging.getLogger(__name__)

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
