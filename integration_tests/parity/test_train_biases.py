"""Updates of expert biases do not depend on how samples are padded, those of MTP layers included.

Padding is one token many times, and the last tokens of a sample have nothing that an MTP layer could look at: if
they counted, they would decide where many of the biases go.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cases import needed
from checkpoint_files import read
from harness import run_ranks
from prediction import SCALE, WithPrediction
from reference import hf_model
from train_cases import arguments, history, quietly

pytestmark = pytest.mark.ranks

Settings = dict[str, Any]
STEPS, RATE = 3, 0.05
LENGTHS = (4, 20, 3, 5, 2, 22, 4, 4)  # of a step: two micro-batches of 32 tokens, padded to 80 and 88
SEED = 1  # with others, what does not count pulls every bias of the MTP layer where the rest does
PADDED = {"per_device_train_batch_size": 4}
PACKED = {"sequence_packing": True, "per_device_train_batch_size": 1}
LAYOUTS: dict[str, tuple[int, Settings]] = {
    "packed": (1, PACKED),
    "padded": (1, PADDED),
    "tp4": (4, PADDED | {"tensor_model_parallel_size": 4, "sequence_parallel": True}),
}


def rows() -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(SEED)
    return [(draw.integers(1, 64, length), np.ones(length, bool)) for length in LENGTHS * STEPS]


def run(checkpoint: Path, output: Path, settings: Settings) -> list[float]:
    """Return the losses of its steps; the trained model is in ``output / "hf"``."""
    from mca_models import AutoModel
    from mca_train import McaTrainer, TokenDataset

    fixed = {"max_steps": STEPS, "learning_rate": 1e-3, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    fixed |= {"gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"}
    fixed |= {
        "moe_router_bias_update_rate": RATE,
        "moe_aux_loss_coeff": 0.0,
        "mtp_loss_scaling_factor": SCALE,
    }
    args = arguments(output, adam_epsilon=1e-3, **(fixed | settings))  # keeps noise from being a step
    model = AutoModel.from_pretrained(checkpoint, args)
    data = TokenDataset.from_samples(rows())
    trainer = quietly(lambda: McaTrainer(model=model, args=args, train_dataset=data, pack_length=32))
    quietly(trainer.train)
    model.save_pretrained_as_hf(output / "hf")
    return history(trainer, "loss")


def run_all(checkpoint: Path, folder: Path, layouts: dict[str, Settings]) -> dict[str, list[float]]:
    return {name: run(checkpoint, folder / name, settings) for name, settings in layouts.items()}


@dataclass(frozen=True)
class Trained:
    """The runs by their names.

    Args:
        losses: Of the steps.
        folder: Has the checkpoint that they begin with, ``model``, and what each has trained.
    """

    losses: dict[str, list[float]]
    folder: Path

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return read(self.folder / name / "hf")


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder, losses = tmp_path_factory.mktemp("biases"), {}
    checkpoint = WithPrediction(copy.deepcopy(hf_model("glm4_moe"))).save(folder / "model")
    wanted = {"packed", *needed(request, "name")}
    for size in (1, 4):
        some = {
            name: settings for name, (ranks, settings) in LAYOUTS.items() if ranks == size and name in wanted
        }
        losses |= run_ranks(size, run_all, checkpoint, folder, some, timeout=400)[0] if some else {}
    return Trained(losses, folder)


@pytest.mark.cases(0, always=["padded"])
@pytest.mark.parametrize("name", ["padded", "tp4"])
def test_expert_biases_do_not_depend_on_padding(name: str, trained: Trained) -> None:
    start, right, found = read(trained.folder / "model"), trained.weights("packed"), trained.weights(name)
    biases = [tensor for tensor in right if "e_score_correction_bias" in tensor]
    assert len(biases) == 4
    for tensor in biases:
        assert float((right[tensor] - start[tensor]).abs().max()) >= RATE / 2, (
            "some go one way more than the other"
        )
        assert float((right[tensor] - found[tensor]).abs().max()) < RATE / 10, tensor
    assert trained.losses[name] == pytest.approx(trained.losses["packed"], rel=1e-5)  # sums of fp32
    moved = max(
        float((right[tensor] - start[tensor]).abs().max()) for tensor in right if tensor not in biases
    )
    for tensor in {*right} - {*biases}:
        assert float((right[tensor] - found[tensor]).abs().max()) < 1e-3 * moved, tensor
