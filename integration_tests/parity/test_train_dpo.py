"""DPO trains as plain PyTorch on the Hugging Face model does, on every layout, packed or not, whole or LoRA."""

import contextlib
import math
import os
import shutil
import signal
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from dpo_reference import BETA, PAIRS, RATE, STEPS, hf_model, pairs, train_plain
from harness import run_ranks
from mca_config.errors import McaError
from train_cases import arguments, history, quietly, tiny_checkpoint

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

KEYS = ("loss", "grad_norm", "rewards/accuracies")
RUN = {
    "max_steps": STEPS,
    "learning_rate": RATE,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "lr_scheduler_type": "linear",
    "gradient_accumulation_steps": PAIRS,
    "max_grad_norm": 1e9,
}
LAYOUTS = {
    "single": (1, {}),
    "micro-batch-2": (1, {"per_device_train_batch_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "packed-tp2-sp": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "sequence_packing": True},
    ),
    "packed-cp2": (2, {"context_parallel_size": 2, "sequence_packing": True}),
}
LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(checkpoint):
    return cache(partial(in_plain_torch, checkpoint))


def in_plain_torch(checkpoint: Path, kind: str) -> dict[str, list[float]]:
    frozen = hf_model(checkpoint)
    return train_plain(hf_model(checkpoint), lambda: contextlib.nullcontext(frozen), kind)


def make(checkpoint: Path, output: Path, kind: str, adapter: Path | None = None, **changes: Any) -> Any:
    from mca_models import AutoModel
    from mca_train import DpoTrainer, PreferenceLoss

    args = arguments(output, **(RUN | changes))
    reference = None
    if adapter is None and kind != "orpo":
        reference = AutoModel.from_pretrained(checkpoint, args)
    model: Any = AutoModel.from_pretrained(checkpoint, args)
    if adapter is not None:
        from mca_models.megatron.peft import load_adapter

        model = load_adapter(model, adapter)
    return quietly(
        lambda: DpoTrainer(
            model=model,
            args=args,
            train_dataset=pairs(),
            eval_dataset=pairs(),
            reference=reference,
            preference=PreferenceLoss(kind=kind, beta=BETA),
            pack_length=64,
        )
    )


def with_megatron(checkpoint: Path, output: Path, kind: str, **changes: Any) -> dict[str, list[float]]:
    trainer = make(checkpoint, output, kind, **changes)
    before = quietly(trainer.evaluate)
    quietly(trainer.train)
    after = quietly(trainer.evaluate)
    found = {key: history(trainer, key) for key in (*KEYS, "rewards/margins")}
    return found | {"eval": [before["eval_loss"], after["eval_loss"]], "eval_keys": sorted(after)}


def same(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> None:
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert ours["rewards/accuracies"] == pytest.approx(theirs["rewards/accuracies"])


@pytest.mark.cases(0, always=["sigmoid", "ipo"])
@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "orpo"])
def test_losses_and_gradients_equal_plain_torch(kind, plain, checkpoint, tmp_path):
    ours = run_ranks(1, with_megatron, checkpoint, tmp_path, kind)[0]
    same(ours, plain(kind))
    assert ours["eval"][0] == pytest.approx(ours["loss"][0], rel=1e-5)
    assert ours["eval"][1] < ours["eval"][0]
    assert ours["rewards/margins"][-1] > ours["rewards/margins"][0]
    assert "eval_rewards/margins" in ours["eval_keys"]


@pytest.mark.cases(0, always=["packed-cp2"])
@pytest.mark.parametrize("name", list(LAYOUTS)[1:])
def test_layouts_and_packing_change_nothing(name, plain, checkpoint, tmp_path):
    size, changes = LAYOUTS[name]
    kind = "orpo" if name == "packed-cp2" else "sigmoid"
    for ours in run_ranks(size, with_megatron, checkpoint, tmp_path, kind, **changes):
        same(ours, plain(kind))


def peft_in_plain_torch(checkpoint: Path, folder: Path) -> dict[str, list[float]]:
    import peft
    import torch

    torch.manual_seed(5)
    model = peft.get_peft_model(hf_model(checkpoint), peft.LoraConfig(init_lora_weights=False, **LORA))
    model.save_pretrained(folder)

    @contextlib.contextmanager
    def without_adapter() -> Iterator[Any]:
        with model.disable_adapter():
            yield model

    return train_plain(model, without_adapter, "sigmoid")


def warnings(checkpoint: Path, output: Path, adapter: Path) -> list[list[str]]:
    """Return the warnings about a trained adapter, without and with dropout, and about a new model."""
    from mca_train.trainer import reference

    found = []
    for changes in ({"adapter": adapter}, {"adapter": adapter, "attention_dropout": 0.1}, {}):
        with patch.object(reference.logger, "warning") as warning:
            make(checkpoint, output, "sigmoid", **changes)
        found.append([call.args[0] % call.args[1:] for call in warning.call_args_list])
    return found


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    """The directory of an adapter, and what plain torch logs of its training."""
    folder = tmp_path_factory.mktemp("adapter")
    return folder, peft_in_plain_torch(checkpoint, folder)


@pytest.mark.cases(0, always=["tp2-sp"])
@pytest.mark.parametrize("name", ["tp2-sp", "pp2"])
def test_lora_trains_against_the_model_without_its_adapter(name, adapter, checkpoint, tmp_path):
    (folder, theirs), (size, changes) = adapter, LAYOUTS[name]
    changes = changes | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": PAIRS // 2}
    ours = run_ranks(size, with_megatron, checkpoint, tmp_path, "sigmoid", adapter=folder, **changes)[0]
    same(ours, theirs)


def test_a_trained_adapter_and_dropout_are_warned_of(adapter, checkpoint, tmp_path):
    adapted, dropped, plain = run_ranks(1, warnings, checkpoint, tmp_path, adapter[0])[0]
    assert ["the adapter is already trained" in line for line in adapted] == [True]
    assert dropped[0].startswith("dropout is on (attention_dropout 0.1)") and dropped[1:] == adapted
    assert not plain


def losses_against_trained(checkpoint: Path, output: Path) -> list[float]:
    """Return the losses of a model against itself, after another trainer of the reference has set its options."""
    from mca_models import AutoModel
    from mca_models.megatron.log_probs.vocabulary import TokenValues
    from mca_train import DpoTrainer, McaTrainer

    class OfValues(McaTrainer):
        token_values = TokenValues(temperature=2.0)

    args = arguments(output, **RUN)
    model, reference = (AutoModel.from_pretrained(checkpoint, args) for _ in range(2))
    smoothed = arguments(output, **RUN, label_smoothing_factor=0.5)
    quietly(lambda: McaTrainer(model=reference, args=smoothed))
    given = {"model": model, "args": args, "eval_dataset": pairs()}
    trainer = quietly(lambda: DpoTrainer(reference=reference, **given))
    found = [quietly(trainer.evaluate)["eval_loss"]]
    quietly(lambda: OfValues(model=reference, args=args))
    return [*found, quietly(trainer.evaluate)["eval_loss"]]


def test_what_other_trainers_of_the_reference_compute_does_not_count(checkpoint, tmp_path):
    found = run_ranks(1, losses_against_trained, checkpoint, tmp_path)[0]
    assert found == pytest.approx([math.log(2)] * 2)


def against_its_own(checkpoint: Path, output: Path) -> tuple[dict[str, list[float]], list[str]]:
    """Losses against what the adapter was put on, and against no other model; then what is refused."""
    import torch

    from mca_models import AutoModel
    from mca_models.megatron.peft import get_peft_model
    from mca_models.templates.classification_head import Head
    from mca_train import DpoTrainer, KtoTrainer, McaTrainer

    args = arguments(output, **RUN)
    base, whole = (AutoModel.from_pretrained(checkpoint, args) for _ in range(2))
    head = Head(kind="sequence_classification", labels=("score",))
    scores = AutoModel.from_pretrained(checkpoint, args, head=head)
    larger = AutoModel.from_pretrained(checkpoint, args, vocab_size=140)
    adapted = get_peft_model(base, {"peft_type": "LORA", "init_lora_weights": False, **LORA})
    rows = [torch.arange(first, first + 9) for first in range(8)]
    answers = [{"input_ids": row, "labels": row, "values": row[:1].float() % 2} for row in rows]
    given: dict[Any, Any] = {DpoTrainer: {"eval_dataset": pairs()}, KtoTrainer: {"eval_dataset": answers}}

    def loss(kind: Any, model: Any, reference: Any, **changes: Any) -> float:
        trainer = quietly(lambda: kind(model=model, args=args, reference=reference, **given[kind], **changes))
        return float(quietly(trainer.evaluate)["eval_loss"])

    losses = {kind.__name__: [loss(kind, adapted, each) for each in (None, base)] for kind in given}
    ahead = {"precompute_ref_log_probs": True}
    losses["ahead"] = [loss(DpoTrainer, adapted, base, **ahead), losses["DpoTrainer"][0]]
    reported = []
    for call in (
        lambda: loss(DpoTrainer, whole, whole),
        lambda: loss(KtoTrainer, adapted, adapted),
        lambda: loss(DpoTrainer, whole, scores),
        lambda: loss(DpoTrainer, larger, whole),
        lambda: loss(DpoTrainer, whole, base),
        lambda: McaTrainer(model=base, args=args, train_dataset=answers),
    ):
        with pytest.raises(McaError) as error:
            call()
        reported.append(str(error.value))
    return losses, reported


def test_the_trained_model_is_no_reference_but_without_its_adapter(checkpoint, tmp_path):
    losses, reported = run_ranks(1, against_its_own, checkpoint, tmp_path)[0]
    assert all(ours == pytest.approx(right, rel=1e-6) for right, ours in losses.values())
    assert abs(losses["DpoTrainer"][0] - math.log(2)) > 1e-3  # what it is against the model itself
    assert abs(losses["KtoTrainer"][0] - 0.5) > 1e-3
    assert ["is the trained model itself" in line for line in reported] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert "the reference has a sequence_classification head" in reported[2]
    assert "the reference has a vocabulary of 130, the tokenizer 140 tokens" in reported[3]
    assert all(line.startswith("this model has an adapter; use the") for line in reported[4:])


def kept_in_rounds(checkpoint: Path, output: Path) -> dict[str, int]:
    """Return the reference's steps in successive trainers of one model in one directory."""
    from mca_models import AutoModel
    from mca_train import DpoTrainer
    from mca_train.checkpoint.output_lock import OutputLock
    from mca_train.trainer import dpo
    from mca_train.trainer.reference import FOLDER, ReferenceModel

    args = arguments(output, **RUN, per_device_eval_batch_size=1)
    model = AutoModel.from_pretrained(checkpoint, args)
    plain, calls = ReferenceModel.log_probs, 0

    def train(last: int = 1000, *, reported: int = 1000, parts_of: int = 1, method: str = "train") -> int:
        nonlocal calls
        calls = 0

        def counted(reference: Any, batch: Any) -> Any:
            nonlocal calls
            if calls == last:
                raise RuntimeError("killed")
            calls += 1
            if calls == reported:
                os.kill(os.getpid(), signal.SIGTERM)
            return plain(reference, batch)

        given: Any = {"model": model, "args": args, "train_dataset": pairs(6), "pack_length": 64}
        with patch.object(ReferenceModel, "log_probs", counted), patch.object(dpo, "_STEPS", parts_of):
            trainer = quietly(lambda: DpoTrainer(precompute_ref_log_probs=True, **given))
            with contextlib.suppress(RuntimeError, McaError):
                quietly(getattr(trainer, method))
        assert trainer.watch.stopped is (reported < 1000)
        assert trainer.state.global_step == 0 or not trainer.watch.stopped
        return calls

    lock = OutputLock(output)
    lock.take()
    found = {"next to another run": train()}
    lock.release()
    found |= {"stopped": train(reported=2, parts_of=16), "killed": train(2), "again": train()}
    (other := output / "checkpoint-1").mkdir()
    (other / "trainer_state.json").write_text("{}")
    kept = (output / FOLDER / "train.npz").read_bytes()
    found |= {"an evaluation in its directory": train(method="evaluate")}
    assert (output / FOLDER / "train.npz").read_bytes() == kept
    shutil.rmtree(other)
    found |= {"of the trained model": train()}
    (output / "config.json").write_text("{}")
    (output / "train_log.jsonl").unlink()
    return found | {"where others wrote": train()}


def test_log_probabilities_are_kept_as_they_come_and_for_the_same_weights_alone(checkpoint, tmp_path):
    assert run_ranks(1, kept_in_rounds, checkpoint, tmp_path / "run")[0] == {
        "next to another run": 0,
        "stopped": 2,
        "killed": 2,
        "again": 2,
        "an evaluation in its directory": 0,
        "of the trained model": 6,
        "where others wrote": 0,
    }
