"""State of training in a checkpoint: what is written is what a resumed run gets, in one process with stand-ins."""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mca_config.errors import McaError, UsageError
from mca_config.layout import ParallelLayout
from mca_train.batching.position import RunPosition
from mca_train.checkpoint import model, optimizer_state, training_state
from mca_train.checkpoint.optimizer_state import Numbers, copy_into_weights, copy_te_main_params, fill_missing
from mca_train.checkpoint.training_state import LoopState, TrainingState
from mca_train.engine import rng


class Tracker:
    """Stand-in for Megatron's tracker of random states."""

    def __init__(self) -> None:
        self.states = {"model-parallel-rng": torch.arange(4, dtype=torch.uint8)}

    def get_states(self) -> dict[str, torch.Tensor]:
        return self.states

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states


def ranks_of(rank: int = 3, world: int = 8, **sizes: int) -> Any:
    return SimpleNamespace(rank=rank, world_size=world, layout=ParallelLayout(**sizes))


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    made = Tracker()
    monkeypatch.setattr("megatron.core.tensor_parallel.get_cuda_rng_tracker", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return made


def draws() -> list[Any]:
    """Return the next numbers of each generator, the second of a pair of Gaussian numbers among them."""
    return [torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1), random.random()]


def test_every_generator_continues_as_it_was_saved(tmp_path: Path, tracker: Tracker) -> None:
    np.random.seed(5)
    np.random.randn(), random.gauss(0, 1)
    rng.save_rng(tmp_path / "new", ranks_of())
    expected = draws()
    tracker.states = {"model-parallel-rng": torch.zeros(4, dtype=torch.uint8)}
    assert draws() != expected
    rng.load_rng(tmp_path / "new", ranks_of())
    assert draws() == expected
    assert tracker.states.keys() == {"model-parallel-rng"}
    assert tracker.states["model-parallel-rng"].tolist() == [0, 1, 2, 3]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rng_3.safetensors"]


def test_a_checkpoint_without_tracked_states_leaves_the_tracker(tmp_path: Path, tracker: Tracker) -> None:
    tracker.states = {}
    rng.save_rng(tmp_path, ranks_of())
    tracker.states = {"kept": torch.ones(1)}
    rng.load_rng(tmp_path, ranks_of())
    assert tracker.states.keys() == {"kept"}


def test_the_layout_of_random_states_is_that_of_the_ranks(tmp_path: Path, tracker: Tracker) -> None:
    rng.save_rng(tmp_path, ranks_of(tensor_model_parallel_size=2))
    assert rng.matches_layout(tmp_path, ranks_of(tensor_model_parallel_size=2))
    assert not rng.matches_layout(tmp_path, ranks_of(rank=2, tensor_model_parallel_size=2))
    assert not rng.matches_layout(tmp_path, ranks_of(tensor_model_parallel_size=4))
    assert not rng.matches_layout(tmp_path, ranks_of(world=16, tensor_model_parallel_size=2))


@pytest.mark.parametrize("lost", ["torch", "numpy", "python"])
def test_a_file_without_a_state_is_damaged(lost: str, tmp_path: Path, tracker: Tracker) -> None:
    rng.save_rng(tmp_path, ranks_of())
    file = tmp_path / "rng_3.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != lost}
    header = rng.read_header(file).metadata
    save_file(tensors, file, metadata={key: text for key, text in header.items() if key != lost})
    with pytest.raises(McaError, match=r"rng_3.safetensors: holds no random states"):
        rng.load_rng(tmp_path, ranks_of())


@pytest.mark.parametrize("fails", [False, True])
def test_generators_are_restored_after_a_block(fails: bool, tracker: Tracker) -> None:
    state = torch.get_rng_state()
    try:
        with rng.preserved_rng():
            torch.rand(3)
            tracker.states["model-parallel-rng"].add_(1)
            tracker.states = {}
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert torch.equal(torch.get_rng_state(), state)
    assert tracker.states["model-parallel-rng"].tolist() == [0, 1, 2, 3]


class Schedule:
    """Stand-in for a learning-rate schedule, with values that are no JSON."""

    def __init__(self) -> None:
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"last": np.float64(0.5), "rates": (torch.tensor(2), 3), 4: {"more": [True, None]}}

    def load_state_dict(self, state: dict[str, Any], done: int, /) -> None:
        self.loaded = (state, done)


POSITION = RunPosition(schedule_steps=7)
NUMBERS = Numbers(step=3, grad_scaler={"scale": 2.0}, optimizer="unnamed")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace what other modules write and read, and return the list of calls."""
    made: list[Any] = []

    def record(name: str, result: Any = None) -> Any:
        return lambda *args, **kwargs: (made.append((name, *args, *kwargs.items())), result)[1]

    monkeypatch.setattr(training_state, "run_on_first_rank", lambda work: work())
    for name in ("run_on_all_ranks", "run_on_all_ranks_unwrapped"):
        monkeypatch.setattr(training_state, name, lambda work: [work()])
    monkeypatch.setattr(training_state, "save_rng", record("rng"))
    monkeypatch.setattr(training_state.fp8_scales, "collect", record("collect", "ranges"))
    monkeypatch.setattr(training_state.fp8_scales, "save", record("ranges"))
    monkeypatch.setattr(training_state.fp8_scales, "load", record("load ranges"))
    monkeypatch.setattr(training_state.optimizer_state, "save", record("optimizer", (NUMBERS, "writing")))
    monkeypatch.setattr(training_state.optimizer_state, "load", record("load optimizer"))
    return made


def state_of(calls: list[Any], optimizer: str = "adam") -> tuple[TrainingState, Schedule]:
    chunks = [SimpleNamespace(module="first"), SimpleNamespace(module="second")]
    engine: Any = SimpleNamespace(
        chunks=chunks,
        optimizer="optimizer",
        optimizer_name=optimizer,
        sync_params=lambda: calls.append("sync"),
    )
    schedule = Schedule()
    return TrainingState(engine, schedule, ranks_of(), POSITION), schedule


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_gets_what_was_saved(background: bool, tmp_path: Path, calls: list[Any]) -> None:
    folder, modules = tmp_path / "training", ["first", "second"]
    state, schedule = state_of(calls)
    loop_state = LoopState()
    assert state.begin_save(tmp_path, loop_state, background=background) == "writing"
    assert calls[0][:2] == ("rng", folder) and calls[0][2].rank == 3
    assert calls[1:] == [
        ("collect", modules),
        ("ranges", folder, 3, "ranges"),
        ("optimizer", "optimizer", modules, folder / "optimizer", ("background", background)),
    ]
    assert (folder / "optimizer").is_dir()
    documents = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    saved = {"last": 0.5, "rates": [2, 3], "4": {"more": [True, None]}}
    assert documents.keys() == {"scheduler", "optimizer", "position", "loop_state"}
    assert documents["scheduler"] == saved
    assert Numbers(**documents["optimizer"]) == replace(NUMBERS, optimizer="adam")
    assert RunPosition(**documents["position"]) == POSITION
    assert documents["loop_state"] == json.loads(json.dumps(loop_state.to_dict()))
    calls.clear()
    reader: Any = "reader"
    state.load(tmp_path, reader)
    numbers = replace(NUMBERS, optimizer="adam")
    assert calls == [
        ("load optimizer", "optimizer", modules, folder / "optimizer", numbers, "reader"),
        "sync",
        ("load ranges", folder, modules),
    ]
    assert schedule.loaded == (saved, 7)


def test_the_state_of_another_optimizer_is_an_error(tmp_path: Path, calls: list[Any]) -> None:
    state_of(calls)[0].begin_save(tmp_path, LoopState(), background=False)
    calls.clear()
    reader: Any = None
    with pytest.raises(McaError, match="was written by optimizer adam, this run's is muon"):
        state_of(calls, "muon")[0].load(tmp_path, reader)
    assert calls == []


@pytest.mark.parametrize("matches", [[True, True], [True, False]])
def test_random_states_are_loaded_on_all_ranks_or_none(
    matches: list[bool], tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(training_state, "run_on_all_ranks_unwrapped", lambda work: [work(), matches[1]])
    asked: list[Any] = []
    monkeypatch.setattr(training_state, "matches_layout", lambda *args: (asked.append(args), matches[0])[1])
    monkeypatch.setattr(training_state, "load_rng", lambda folder, ranks: loaded.append((folder, ranks.rank)))
    state_of(calls)[0].load_rng(tmp_path, drops=False)
    assert loaded == ([(tmp_path / "training", 3)] if all(matches) else [])
    assert [(folder, ranks.rank) for folder, ranks in asked] == [(tmp_path / "training", 3)]


def parameter(value: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.full((2,), value, dtype=dtype))


def read_fp32(param: nn.Parameter) -> torch.Tensor:
    assert param.dtype != torch.float32, "its own values are as precise"
    return param.detach().float() + 0.5


def test_missing_main_parameters_are_the_weights() -> None:
    """A distributed optimizer with two buffers, a plain one of half-precision weights, and one without either."""
    params = [parameter(1.0), parameter(2.0, torch.bfloat16), parameter(3.0, torch.bfloat16)]
    buffers = [SimpleNamespace(param_index_map={p: None}) for p in params[:2]]
    kept = torch.tensor([9.0, 9.0])
    zero = {"param_state": {0: {"param": "absent", "exp_avg": kept}, 1: {"param": None, "exp_avg": kept}}}
    plain = {"fp32_from_fp16_params": [[kept, "absent"], ["absent"]]}
    singles = [
        SimpleNamespace(buffers=buffers),
        SimpleNamespace(float16_groups=[[params[0], params[1]], [params[2]]]),
        SimpleNamespace(),
    ]
    optimizer: Any = SimpleNamespace(chained_optimizers=singles)
    parts: list[Any] = [zero, plain, {}]
    fill_missing(optimizer, parts, read_fp32)
    assert [state["param"].tolist() for state in zero["param_state"].values()] == [[1.0, 1.0], [2.5, 2.5]]  # type: ignore[union-attr]
    assert all(state["exp_avg"] is kept for state in zero["param_state"].values())
    assert zero["param_state"][0]["param"].data_ptr() != params[0].data_ptr()  # type: ignore[union-attr]
    assert plain["fp32_from_fp16_params"][0][0] is kept
    found = [value.tolist() for group in plain["fp32_from_fp16_params"] for value in group]  # type: ignore[attr-defined]
    assert found == [[9.0, 9.0], [2.5, 2.5], [3.5, 3.5]]


def test_loaded_main_parameters_become_the_weights_of_fp32_optimizers() -> None:
    """Only a plain optimizer without main parameters takes them; a missing one leaves the weight."""
    weights = [parameter(1.0), parameter(2.0), parameter(3.0)]
    groups = [{"params": weights[:1]}, {"params": weights[1:]}]
    inner = SimpleNamespace(param_groups=groups)
    singles = [
        SimpleNamespace(optimizer=inner, gbuf_ranges=[]),
        SimpleNamespace(optimizer=inner, float16_groups=[]),
        SimpleNamespace(optimizer=inner),
        SimpleNamespace(optimizer=None),
    ]
    optimizer: Any = SimpleNamespace(chained_optimizers=singles)
    loaded = {0: torch.tensor([7.0, 7.0]), 2: torch.tensor([8.0, 8.0]), 1: "absent"}
    parts: list[Any] = [{}, {}, {optimizer_state._WEIGHTS: loaded}, {optimizer_state._WEIGHTS: {}}]
    copy_into_weights(optimizer, parts)
    assert [weight.tolist() for weight in weights] == [[7.0, 7.0], [2.0, 2.0], [8.0, 8.0]]
    assert parts == [{}, {}, {}, {}]


@pytest.mark.parametrize("chained", [False, True])
def test_weights_are_requested_from_fp32_optimizers(chained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.dist_checkpointing import optimizer as sharding

    weights = [parameter(1.0), parameter(2.0)]

    def by_number(state: Any, params: Any) -> dict[int, Any]:
        assert state == "model"
        return {number: f"leaf {number}" for number, _ in enumerate(params)}

    monkeypatch.setattr(sharding, "get_param_id_to_sharded_param_map", by_number)
    monkeypatch.setattr(
        sharding,
        "make_sharded_optimizer_tensor",
        lambda leaf, param, prefix: (leaf, param.tolist(), param.requires_grad, prefix),
    )
    single = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"params": weights}]))
    empty = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[]))
    optimizer: Any = SimpleNamespace(chained_optimizers=[single, empty]) if chained else single
    parts: list[Any] = [{}, {}] if chained else [{}]
    sharded: Any = "model"
    optimizer_state.request_weights(optimizer, parts, sharded)
    prefix = "optimizer.state.fp32_param"
    expected = {0: ("leaf 0", [1.0, 1.0], False, prefix), 1: ("leaf 1", [2.0, 2.0], False, prefix)}
    assert [part[optimizer_state._WEIGHTS] for part in parts] == ([expected, {}] if chained else [expected])


def test_main_parameters_of_transformer_engine_become_its_fp32_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [parameter(1.0), parameter(2.0, torch.bfloat16), parameter(3.0)]
    state = {weight: {optimizer_state.MASTER: torch.tensor([5.0, 6.0])} for weight in weights[:2]}
    inner = SimpleNamespace(param_groups=[{"params": weights[:1]}, {"params": weights[1:]}], state=state)
    aware, other = SimpleNamespace(optimizer=inner), SimpleNamespace()
    monkeypatch.setattr(optimizer_state, "is_precision_aware", lambda single: single is aware)
    optimizer: Any = SimpleNamespace(chained_optimizers=[other, aware])
    copy_te_main_params(optimizer)
    assert [weight.tolist() for weight in weights] == [[5.0, 6.0], [2.0, 2.0], [3.0, 3.0]]


class Model:
    """Stand-in for ``VirtualModels``, which writes one file."""

    def __init__(self, pending: Any = None) -> None:
        self.saved: list[Any] = []
        self.pending = pending

    def save_pretrained(self, folder: Path, **settings: Any) -> Any:
        self.saved.append(("mca", folder.name, settings))
        folder.mkdir()
        (folder / "weights").write_text("new")
        return self.pending

    def save_pretrained_as_hf(self, folder: Path, *, overwrite: bool) -> None:
        self.saved.append(("hf", folder.name, {"overwrite": overwrite}))
        folder.mkdir()
        (folder / "config.json").write_text("new")


class Pending:
    def __init__(self, written: bool) -> None:
        self.written, self.finished = written, 0

    def done(self) -> bool:
        return self.written

    def finish(self) -> None:
        self.finished += 1


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("tokens")


@pytest.mark.parametrize("hf", [False, True])
@pytest.mark.parametrize("pending", [None, Pending(True), Pending(False)])
@pytest.mark.parametrize("tokenizer", [None, Tokenizer()])
def test_a_model_is_staged_and_moved_into_its_directory(
    hf: bool, pending: Pending | None, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "run_on_first_rank", lambda work: work())
    saved: Any = Model(pending)
    writer = model.ModelWriter(saved, tmp_path, tokenizer, hf=hf, ckpt_format="mca")
    expected: list[Any] = [("mca", ".model", {"overwrite": True, "ckpt_format": "mca"})]
    assert saved.saved == [("hf", ".hf", {"overwrite": True})] * hf + expected
    assert writer.done() is (pending is None or pending.written)
    assert not (tmp_path / "weights").exists()
    before = pending.finished if pending else 0
    writer.finish()
    assert pending is None or pending.finished == before + 1
    own = {"weights"} | ({"tokenizer.json"} if tokenizer else set())
    assert {path.name for path in tmp_path.iterdir()} == own | ({"hf"} if hf else set())
    if hf:
        names = {path.name for path in (tmp_path / "hf").iterdir()}
        assert names == {"config.json"} | ({"tokenizer.json"} if tokenizer else set())


@pytest.mark.parametrize(
    ("different", "message"),
    [
        ({}, None),
        ({"dtype": "other", "layout": 2, "attention_dropout": 0.5}, None),
        ({"hidden_size": 3}, "hidden_size is 3 there, 2 here"),
        ({"extra_field": 3}, "extra_field is 3 there, None here"),
        (
            {"model_type": "b", "hidden_size": 3},
            "model_type is b there, a here; hidden_size is 3 there, 2 here;",
        ),
        (
            {"model_type": "b", "w": 1, "x": 1, "y": 1},
            r"w is 1 there, None here; x is 1 there, None here; set",
        ),
    ],
)
def test_weights_of_another_model_are_an_error(
    different: dict[str, Any], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"model_type": "a", "hidden_size": 2, "dtype": "float32"}
    config = SimpleNamespace(to_fields=lambda: fields)
    source = SimpleNamespace(config=SimpleNamespace(to_fields=lambda: fields | different))
    made: list[Any] = []
    monkeypatch.setattr(model, "open_checkpoint", lambda directory: source)
    monkeypatch.setattr(model.fill, "require_same_names", lambda *args: made.append(args))
    monkeypatch.setattr(model.fill, "from_source", lambda *args: made.append(args))
    context = SimpleNamespace(layout="layout", coordinates="here")
    live: Any = SimpleNamespace(config=config, rank_context=context, local_params=lambda: "params")
    if message is None:
        model.load_weights(live, tmp_path)
        assert made == [(source, config, str(tmp_path)), (source, "params", "layout", "here")]
        return
    with pytest.raises(UsageError, match=message):
        model.load_weights(live, tmp_path)
    assert made == []


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_state_of_a_gpu_is_restored_where_there_is_one(
    has_gpu: bool, tmp_path: Path, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [torch.arange(3, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", states.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for _ in range(2):  # the folder may exist
        rng.save_rng(tmp_path / "new", ranks_of())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    rng.load_rng(tmp_path / "new", ranks_of())
    assert [state.tolist() for state in states] == [[0, 1, 2]] * (1 + has_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rng.save_rng(tmp_path / "new", ranks_of())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    rng.load_rng(tmp_path / "new", ranks_of())
    assert len(states) == 1 + has_gpu, "the file has no state of a GPU"


def test_states_without_a_layout_are_states(tmp_path: Path, tracker: Tracker) -> None:
    rng.save_rng(tmp_path, ranks_of())
    file = tmp_path / "rng_3.safetensors"
    metadata = {key: text for key, text in rng.read_header(file).metadata.items() if key != "layout"}
    save_file(load_file(file), file, metadata=metadata)
    expected = draws()
    rng.load_rng(tmp_path, ranks_of())
    assert draws() == expected
    assert not rng.matches_layout(tmp_path, ranks_of())


@pytest.mark.parametrize("drops", [False, True])
def test_ranks_are_seeded_again_only_for_dropout(drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[Any] = []
    monkeypatch.setattr(rng, "has_dropout", lambda model: drops)
    monkeypatch.setattr(rng.parallel, "seed_device", lambda *args: seeds.append(args))
    live: Any = SimpleNamespace(rank_context="context")
    rng.seed_dropout(live, 5)
    assert seeds == ([(5, "context")] if drops else [])


@pytest.mark.parametrize("described", [None, "same", "other"])
def test_an_adapter_is_loaded_onto_the_model_that_it_names(
    described: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of PEFT's does not describe its model."""
    loaded: list[Path] = []
    config = SimpleNamespace(to_fields=lambda: {"hidden_size": 2})

    class Adapted:
        load_pretrained = staticmethod(loaded.append)

    def from_json(text: str, where: str) -> Any:
        assert where == str(tmp_path / model.FILE_NAME)
        return SimpleNamespace(to_fields=lambda: {"hidden_size": 2 if text == "same" else 3})

    live: Any = Adapted()
    live.config = config
    monkeypatch.setattr(model, "PeftModels", Adapted)
    monkeypatch.setattr(model, "McaModelConfig", SimpleNamespace(from_json=from_json))
    if described is not None:
        (tmp_path / model.FILE_NAME).write_text(described)
    if described == "other":
        with pytest.raises(UsageError, match="hidden_size is 3 there, 2 here"):
            model.load_weights(live, tmp_path)
        assert loaded == []
        return
    model.load_weights(live, tmp_path)
    assert loaded == [tmp_path]
