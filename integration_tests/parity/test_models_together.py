"""Models that live at the same time, and trainers of one model: none changes what another one computes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch
from torch import Tensor

from harness import run_ranks
from mca_models.megatron.log_probs.vocabulary import TokenValues
from train_cases import arguments, history, make_trainer, quietly, tiny_checkpoint

pytestmark = pytest.mark.ranks

ONE = {"max_steps": 1, "gradient_accumulation_steps": 4, "learning_rate": 1.0, "warmup_steps": 0}
ONE |= {"optimizer": "sgd", "weight_decay": 0.0}


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Clones of this rank's, second copies of tied ones too."""
    return {
        f"{item.param.mca_name()} {item.copy}": tensor.detach().clone()
        for item, tensor in model.local_params()
    }


def beside_scores(checkpoint: Path, folder: Path) -> None:
    """A step of a model with tied weights changes them alike, beside a model without. Runs on both pipeline ranks."""
    from mca_config.errors import McaError
    from mca_models import AutoModel
    from mca_models.templates.classification_head import Head

    changes = ONE | {"pipeline_model_parallel_size": 2}
    found = []
    for alone in (True, False):
        trainer = make_trainer(checkpoint, folder / str(alone), **changes)
        args = trainer.args
        if not alone:
            head = Head(kind="sequence_classification", labels=("score",))
            scores = AutoModel.from_pretrained(checkpoint, args, head=head)
            before = scores.logits(torch.arange(8)[None])
        quietly(trainer.train)
        found.append(weights(trainer.model))
    assert torch.equal(scores.logits(torch.arange(8)[None]), before)
    whole, other = found
    assert all(torch.equal(tensor, other[name]) for name, tensor in whole.items())
    (chunk,) = trainer.model.chunks
    tied = chunk.shared_embedding_or_output_weight()
    both = [torch.empty_like(tied) for _ in range(2)]
    torch.distributed.all_gather(both, tied)
    assert torch.equal(*both)
    AutoModel.from_pretrained(checkpoint, arguments(folder / "tp", tensor_model_parallel_size=2))
    for use in (trainer.evaluate, trainer.model.export_weights, lambda: scores.logits(torch.arange(8)[None])):
        with pytest.raises(McaError, match="need equal parallel sizes"):
            list(quietly(use) or ())


def test_a_model_keeps_its_embedding_group(tmp_path: Path) -> None:
    tied = tiny_checkpoint(tmp_path / "tied", tie_word_embeddings=True, num_hidden_layers=2)
    run_ranks(2, beside_scores, tied, tmp_path)


def another(trainer: Any, folder: Path, kind: Any, **changes: Any) -> Any:
    """A second trainer of the same model."""
    data = {"train_dataset": trainer.train_dataset, "eval_dataset": trainer.eval_dataset}
    return quietly(lambda: kind(model=trainer.model, args=arguments(folder, **changes), **data))


def outputs(checkpoint: Path, folder: Path) -> list[list[float]]:
    """Losses of a trainer of log-probabilities, alone and beside one of smoothed cross entropies."""
    from transformers import TrainerCallback

    from mca_train import McaTrainer

    class OfLogProbs(McaTrainer):
        token_values = TokenValues()

        def compute_loss(self, output: Tensor, batch: Any, **_: object) -> tuple[Tensor, Tensor]:
            return -(output * batch.loss_mask).sum(), batch.loss_mask.sum().int()

    class Evaluates(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            quietly(other.evaluate)

    found = []
    for alone in (True, False):
        trainer = make_trainer(checkpoint, folder / str(alone), kind=OfLogProbs, **ONE | {"max_steps": 2})
        if not alone:
            other = another(trainer, folder / "other", McaTrainer, **ONE, label_smoothing_factor=0.3)
            trainer.add_callback(Evaluates())
        evaluated = quietly(trainer.evaluate)["eval_loss"]
        quietly(trainer.train)
        found.append([evaluated, *history(trainer, "loss"), quietly(trainer.evaluate)["eval_loss"]])
    return found


def turns(checkpoint: Path, folder: Path) -> None:
    """Three trainers of a model, one after the other, train it as three rounds of one do."""
    from mca_config.errors import McaError
    from mca_train import McaTrainer

    base = ONE | {
        "optimizer": "adam",
        "adam_beta1": 0.0,
        "adam_beta2": 0.0,
        "adam_epsilon": 1.0,
    }  # keeps no state
    whole = make_trainer(checkpoint, folder / "whole", **base)
    for _ in range(3):
        quietly(whole.train)
    overlap = {f"overlap_{what}": True for what in ("grad_reduce", "param_gather")}
    overlap |= {"use_distributed_optimizer": True}
    first = make_trainer(checkpoint, folder / "0", **base, **overlap)
    second = another(first, folder / "1", McaTrainer, **base)
    last = another(first, folder / "2", McaTrainer, **base, **overlap)
    for trainer in (first, second, last):
        with pytest.raises(McaError, match=r"once train\(\) has started"):
            _ = trainer.engine
        quietly(trainer.train)
        assert (first.model.megatron.no_sync_func is None) == (trainer is second)
    with last.engine.params_gathered():
        evaluated = quietly(last.evaluate)
        quietly(last.save_model)
    expected = weights(whole.model)
    for name, tensor in weights(last.model).items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name  # a split optimizer rounds otherwise
    for trainer in (first, second):
        for go_on in (trainer.train, lambda: trainer.engine.forward_backward(None)):  # noqa: B023
            with pytest.raises(McaError, match="another trainer has trained this model since"):
                quietly(go_on)
        assert trainer.state.global_step == 1, "its train has begun"
        assert quietly(trainer.evaluate)["eval_loss"] == evaluated["eval_loss"]
        quietly(trainer.save_model)


def evaluations(checkpoint: Path, folder: Path) -> list[float]:
    """Two of a model with dropout, whose trainer asks it for logits at each step."""
    from mca_train import McaTrainer

    class AsksTwice(McaTrainer):
        def before_forward(self, batch: Any) -> None:
            self.model.logits(torch.arange(8)[None])

    trainer = make_trainer(checkpoint, folder / "dropout", kind=AsksTwice, hidden_dropout=0.5)
    found = [quietly(trainer.evaluate)["eval_loss"] for _ in range(2)]
    assert all(chunk.training for chunk in trainer.model.chunks)
    return found


def trained_parts(checkpoint: Path, folder: Path) -> list[set[bool]]:
    """Return True for the language and the vision part if the trainer that was made first trains it."""
    from mca_train import McaTrainer

    first = make_trainer(checkpoint, folder / "first", freeze=["vision", "projector"])
    another(first, folder / "second", McaTrainer, freeze=["language"])
    first.new_engine()
    (chunk,) = first.model.chunks
    return [{p.requires_grad for p in part.parameters()} for part in (chunk.decoder, chunk.vision_model)]


def on_one_rank(checkpoint: Path, folder: Path) -> list[list[float]]:
    assert trained_parts(tiny_vision.save("qwen3_vl", folder / "images"), folder) == [{True}, {False}]
    turns(checkpoint, folder)
    return [*outputs(checkpoint, folder), evaluations(checkpoint, folder)]


def test_trainers_of_one_model_leave_each_other_alone(checkpoint: Path, tmp_path: Path) -> None:
    alone, beside, (first, second) = run_ranks(1, on_one_rank, checkpoint, tmp_path)[0]
    assert len(alone) == 4
    assert beside == alone
    assert first == second


def start_again_in_a_fork() -> int:
    """End the groups and return the exit code of a process, forked afterwards, that starts others."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from mca_config import ParallelLayout
    from mca_models.megatron.distributed import parallel

    parallel.start(ParallelLayout())
    parallel.stop()
    assert (
        not get_cuda_rng_tracker().is_initialized()
    )  # otherwise the next ranks draw what these would have drawn
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a fork that waits for threads it does not have ends, too
        try:
            parallel.start(ParallelLayout())
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_forked_after_the_groups_ended_starts_others() -> None:
    """Megatron kept two groups, and to end them in the fork was a segmentation fault."""
    assert run_ranks(1, start_again_in_a_fork) == [0]
