"""RoPE that depends on the length takes the longest sequence of the micro-batch, and no padding."""

from pathlib import Path
from typing import Any

import pytest

import reference
from harness import run_ranks
from train_cases import arguments, history, quietly

pytestmark = pytest.mark.ranks

RAGGED, EVEN = (8, 24), (12, 12, 12, 12)
PACKED = {"sequence_packing": True}
AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RUNS: dict[str, tuple[str, tuple[int, ...], int, dict[str, Any]]] = {
    "padded": ("phi3-of-16", RAGGED, 1, {}),
    "filled up": ("phi3-of-16", EVEN, 1, PACKED),
    "dynamic": ("llama-dynamic", RAGGED, 1, {}),
    "computed again on stages": ("minicpm3-of-16", RAGGED, 2, {"pipeline_model_parallel_size": 2, **AGAIN}),
}
"""Model, lengths of samples, ranks, settings; the original context is 16."""


def samples(lengths: tuple[int, ...]) -> Any:
    import numpy as np

    from mca_train import TokenDataset

    draw = np.random.default_rng(3)
    return TokenDataset.from_samples([(draw.integers(0, 64, n), np.ones(n, bool)) for n in lengths])


def one_step(checkpoint: Path, output: Path, lengths: tuple[int, ...], **changes: Any) -> tuple[float, float]:
    """Loss and norm of the gradient of a step of two micro-batches."""
    from mca_models import AutoModel
    from mca_train import McaTrainer

    run = {
        "max_steps": 1,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 1,
        "warmup_steps": 0,
    }
    run |= {"train_sampling_strategy": "sequential", "max_grad_norm": 1e9}
    args = arguments(output, **(run | changes))
    model = AutoModel.from_pretrained(checkpoint, args)
    trainer = quietly(
        lambda: McaTrainer(model=model, args=args, train_dataset=samples(lengths), pack_length=36)
    )
    quietly(trainer.train)
    (loss,), (norm,) = history(trainer, "loss"), history(trainer, "grad_norm")
    return loss, norm


def one_step_of_hugging_face(checkpoint: Path, lengths: tuple[int, ...]) -> tuple[float, float]:
    """The same, each sample by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    data = samples(lengths)
    found = []
    for number in range(len(lengths)):
        ids = torch.as_tensor(data[number]["input_ids"])
        logits = model(ids[None]).logits[0, :-1]
        found.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
    loss = sum(found) / sum(length - 1 for length in lengths)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return float(loss.detach()), float(norm)


@pytest.mark.parametrize("name", RUNS)
def test_a_step_is_that_of_each_sample_by_itself(name: str, tmp_path: Path) -> None:
    case, lengths, size, changes = RUNS[name]
    checkpoint = reference.make_reference(case, tmp_path).path
    theirs = one_step_of_hugging_face(checkpoint, lengths)
    for ours in run_ranks(size, one_step, checkpoint, tmp_path / "run", lengths, **changes):
        assert ours == pytest.approx(theirs, rel=1e-5)  # fp32, summed in another order: 2e-7


def asked(checkpoint: Path, lengths: tuple[int, ...], name: str) -> dict[str, list[float]]:
    """Sums of the samples' log-probabilities, padded and packed, and of the logits of the first sample's."""
    import torch

    from layouts import arguments as layout
    from mca_models import AutoModel

    model = AutoModel.from_pretrained(checkpoint, layout(name))
    rows = [
        torch.as_tensor(sample["input_ids"])
        for sample in map(samples(lengths).__getitem__, range(len(lengths)))
    ]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    found = {
        "padded": model.log_probs(ids, mask=mask, micro_batch_size=1).log_probs.sum(1),
        "packed": model.log_probs(ids, mask=mask, micro_batch_size=1, packed=True).log_probs.sum(1),
        "logits": _summed(torch.cat([model.logits(row[None])[0] for row in rows]), rows),
    }
    return {name: values.tolist() for name, values in found.items()}


def _summed(logits: Any, rows: list[Any]) -> Any:
    import torch

    of_each = zip(logits.split([len(row) for row in rows]), rows, strict=True)
    sums = [own[:-1].float().log_softmax(-1).gather(1, row[1:, None]).sum() for own, row in of_each]
    return torch.stack(sums)


def asked_of_hugging_face(checkpoint: Path, lengths: tuple[int, ...]) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rows = [
        torch.as_tensor(sample["input_ids"])
        for sample in map(samples(lengths).__getitem__, range(len(lengths)))
    ]
    with torch.no_grad():
        logits = torch.cat([model(row[None]).logits[0] for row in rows])
    return _summed(logits, rows).tolist()


def test_what_a_model_is_asked_is_that_of_each_sample_by_itself(tmp_path: Path) -> None:
    """With two tensor ranks rows are filled up from 15 to 16 tokens, beyond the original context of 15."""
    checkpoint = reference.make_reference("phi3-of-15", tmp_path).path
    lengths = (15, 24)
    theirs = asked_of_hugging_face(checkpoint, lengths)
    for size, layout in ((1, "tp1"), (2, "tp2-sp")):
        for ours in run_ranks(size, asked, checkpoint, lengths, layout):
            for name, values in ours.items():
                assert values == pytest.approx(theirs, rel=1e-5), name
