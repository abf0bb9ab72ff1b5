"""What a block changes for its time is as before once it has ended, with an error too."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_train.engine.offload import as_plain
from mca_train.engine.pipeline import Pipeline
from mca_train.engine.rng import kept_rng
from mca_train.engine.wrapping import remember
from mca_train.trainer.trainer import McaTrainer


class Chunk(torch.nn.Linear):
    """A chunk that is its own wrapper; it has a hook, which gathers parameters."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.enable_forward_pre_hook()

    def disable_forward_pre_hook(self) -> None:
        del self.remove_forward_pre_hook_handles["hook"]

    def enable_forward_pre_hook(self) -> None:
        self.remove_forward_pre_hook_handles = {"hook": True}


def test_chunks_train_again_after_an_error_at_rest() -> None:
    pipeline: Any = object.__new__(Pipeline)
    pipeline.chunks = pipeline.models = [Chunk(), Chunk().eval()]
    for chunk in pipeline.chunks:
        remember(chunk, chunk)
    with pytest.raises(RuntimeError), pipeline.at_rest():
        with pipeline.at_rest():
            assert not any(chunk.training for chunk in pipeline.chunks)
        assert not any(chunk.training or chunk.remove_forward_pre_hook_handles for chunk in pipeline.chunks)
        raise RuntimeError
    assert [chunk.training for chunk in pipeline.chunks] == [True, False]
    assert all(chunk.remove_forward_pre_hook_handles for chunk in pipeline.chunks)


def test_generators_are_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.random.CudaRNGStatesTracker()
    tracker.states_ = {"dropout": torch.zeros(3)}
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    drawn = torch.get_rng_state()
    with pytest.raises(RuntimeError), kept_rng():
        torch.rand(1)
        tracker.states_["dropout"].add_(1)
        raise RuntimeError
    assert not tracker.states_["dropout"].any() and torch.equal(torch.get_rng_state(), drawn)


def test_hybrids_stay_what_they_are_if_one_cannot_become_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    singles = [SimpleNamespace(optimizer=name, config=SimpleNamespace()) for name in "ab"]
    from mca_train.engine import offload

    for single in singles:
        setattr(single.config, offload._PRECISION_AWARE, True)

    def plain(hybrid: Any, held: Any) -> Any:
        if hybrid == "b":
            raise RuntimeError
        return "plain"

    monkeypatch.setattr(offload, "_hybrids", lambda optimizer: singles)
    monkeypatch.setattr(offload, "_held", lambda single, hybrid: None)
    monkeypatch.setattr(offload, "_plain", plain)
    with pytest.raises(RuntimeError), as_plain(None, loading=False):
        pass
    assert [single.optimizer for single in singles] == ["a", "b"]
    assert all(getattr(single.config, offload._PRECISION_AWARE) for single in singles)


def test_a_failed_evaluation_leaves_the_signals_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = object.__new__(McaTrainer)
    trainer.eval_dataset, trainer.signals, trainer._sources = [1], "of training", "of its sources"
    trainer.ranks = SimpleNamespace(device=torch.device("cpu"))
    trainer._loaders = SimpleNamespace(evaluation=lambda dataset: ([], None))
    monkeypatch.setattr(McaTrainer, "_eval_dataset", lambda self, dataset: dataset)

    def fail(self: Any, loader: Any) -> float:
        assert self.signals != "of training"
        raise RuntimeError

    monkeypatch.setattr(McaTrainer, "_evaluate_loss", fail)
    with pytest.raises(RuntimeError):
        trainer.evaluate()
    assert (trainer.signals, trainer._sources) == ("of training", "of its sources")
