"""Settings that a block changes are restored at its end, also after an error."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from mca_config import TrainingArguments
from mca_config.layout import ParallelLayout
from mca_models.megatron import platform
from mca_train.batching.collate import PadCollator
from mca_train.engine.ddp_wrappers import register_wrapper
from mca_train.engine.engine import Pipeline
from mca_train.engine.offload import as_adam
from mca_train.engine.rng import preserved_rng
from mca_train.trainer.evaluator import Evaluator
from mca_train.trainer.loaders import Loaders, StepLoaders
from mca_train.trainer.logger import Logger


@pytest.fixture(scope="module", autouse=True)
def patched() -> None:
    """Other tests of the process patch Megatron, which nobody may have imported before."""
    platform.prepare()


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
        register_wrapper(chunk, chunk)
    with pytest.raises(RuntimeError), pipeline.params_gathered():
        with pipeline.params_gathered():
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
    with pytest.raises(RuntimeError), preserved_rng():
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
    monkeypatch.setattr(offload, "_group_tensors", lambda single, hybrid: None)
    monkeypatch.setattr(offload, "_build_adam", plain)
    with pytest.raises(RuntimeError), as_adam(None, loading=False):
        pass
    assert [single.optimizer for single in singles] == ["a", "b"]
    assert all(getattr(single.config, offload._PRECISION_AWARE) for single in singles)


def test_a_failed_evaluation_leaves_the_metrics_of_training() -> None:
    plain = SimpleNamespace(num_moe_experts=None, mtp_num_layers=None)
    nothing: Any = SimpleNamespace(chunks=[SimpleNamespace(config=plain)], evaluation=lambda dataset: [])
    hf: Any = SimpleNamespace(
        ranks=SimpleNamespace(device=torch.device("cpu"), context_parallel_rank=0),
        train_dataset=None,
        metric_names=("accuracy",),
        metric_differences={},
        metric_extremes={},
        token_values=None,
        watch=SimpleNamespace(restore=lambda state: None),
        model=nothing,
    )
    metrics = Logger(hf, nothing, nothing)
    of_training, metrics._sources = metrics.metrics, (sources := SimpleNamespace())

    class Failing:
        @contextmanager
        def evaluating(self) -> Iterator[None]:
            assert metrics.metrics is not of_training and metrics._sources is None
            raise RuntimeError
            yield

    hf.callback_handler = SimpleNamespace()
    with pytest.raises(RuntimeError):
        Evaluator(hf, Failing(), nothing, metrics).evaluate(None, "eval")
    assert (metrics.metrics, metrics._sources) == (of_training, sources)


MEGATRON = SimpleNamespace(
    sequence_parallel=False,
    moe_token_dispatcher_type="alltoall",
    fp8=None,
    fp8_recipe="delayed",
    transformer_impl="local",
)


class Rollouts(list[dict[str, torch.Tensor]]):
    """Samples that can be looked after."""


def test_what_was_made_of_a_dataset_goes_when_the_trainer_has_another(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), sequence_packing=True, use_cpu=True, max_steps=1, report_to="none"
    )
    ranks = SimpleNamespace(
        layout=ParallelLayout(),
        device=torch.device("cpu"),
        data_parallel_size=1,
        data_parallel_rank=0,
        context_parallel_rank=0,
    )
    loaders = Loaders(args=args, ranks=ranks, megatron=MEGATRON, collate=PadCollator(0), pad_token_id=0)

    def new() -> Rollouts:
        return Rollouts([{"input_ids": torch.arange(4)}])

    hf: Any = SimpleNamespace(train_dataset=new(), eval_dataset={"a": new()}, watch=None)
    nothing: Any = None
    hf.data_collator = loaders.collate
    data, other = StepLoaders(hf, loaders, nothing), new()
    first, evaluated = ref(hf.train_dataset), ref(other)
    for dataset in (None, hf.eval_dataset["a"], other):
        data.train() if dataset is None else data.evaluation(dataset)
    packs = dict(loaders._packs)
    data.train()
    assert packs.items() > loaders._packs.items(), "what the trainer still has is not packed again"
    del other, packs, dataset
    hf.train_dataset = new()
    data.train()
    assert (first(), evaluated()) == (None, None)


def test_a_step_leaves_no_length_to_ropes(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import pipeline_parallel

    from mca_train.engine import engine as module

    rope = SimpleNamespace(longest_sequence=0)

    def schedule(**options: Any) -> None:
        rope.longest_sequence = 7

    monkeypatch.setattr(pipeline_parallel, "get_forward_backward_func", lambda: schedule)
    monkeypatch.setattr(module, "routed_passes", lambda models: nullcontext())
    monkeypatch.setattr(module.parallel, "activate_process_groups", lambda models: None)
    monkeypatch.setattr(Pipeline, "_step_loss", lambda self: self._micro_batch_sums)
    pipeline: Any = object.__new__(Pipeline)
    pipeline._ropes, pipeline.chunks, pipeline.models, pipeline.stopwatch = {0: (rope,)}, [None], [], None
    pipeline._loss = None
    pipeline.configs = [SimpleNamespace(mtp_num_layers=None, pipeline_model_parallel_size=1)]
    batch: Any = SimpleNamespace(micro_batches=[1], seq_length=8, micro_batch_size=1, has_media=False)
    assert pipeline.run(batch, forward_only=True) == []
    assert rope.longest_sequence == 0
