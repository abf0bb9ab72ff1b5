"""Inputs that the pipeline gives a chunk and Megatron's schedule, and the wrappers of its chunks."""

from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_models.megatron import platform
from mca_train.batching.micro_batch import MicroBatch
from mca_train.engine import ddp_wrappers, engine
from mca_train.engine.engine import Pipeline, _packed_params
from mca_train.engine.finite import name_nan_gradient


def micro_batch(**changes: Any) -> MicroBatch:
    shape = torch.zeros(1, 4)
    values: Any = {
        "input_ids": shape.long() + 3,
        "position_ids": torch.arange(4)[None],
        "labels": shape.long() + 5,
        "loss_mask": shape + 1,
        "segments": shape.long(),
        "num_segments": 1,
        "tokens_remaining": torch.arange(3, -1, -1)[None],
        "longest": 4,
    }
    return MicroBatch(**values | changes)


class Model(torch.nn.Module):
    """A chunk that keeps its inputs; its weights are bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        self.inputs: dict[str, Any] = {}

    def forward(self, **inputs: Any) -> Any:
        self.inputs = inputs
        return self.weight * torch.ones(1, 4)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def note(name: str) -> None:
        monkeypatch.setattr(engine, name, lambda *values: found.append((name, *values)))

    for name in ("set_longest_sequence", "set_routed_experts", "require_replayed", "replay_in_backward"):
        note(name)
    monkeypatch.setattr(engine.moe_aux, "pass_sequence_ids", lambda batch, model: "ids")
    return found


def made(model: Model, **more: Any) -> Any:
    values: dict[str, Any] = {
        "chunks": [model],
        "_device": torch.device("cpu"),
        "_wants_logits": False,
        "_micro_batch_sums": [],
        "_length_dependent_ropes": lambda model: ("rope",),
    }
    found: Any = SimpleNamespace(**values | more)
    found._images = lambda batch: Pipeline._images(found, batch)
    return found


def token_sum(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return (output.float() * batch.loss_mask).sum(), batch.loss_mask.sum()


@pytest.mark.parametrize("wants_logits", [False, True])
@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("sections", [None, torch.zeros(3, 1, 4)])
def test_a_chunk_gets_the_inputs_of_its_micro_batch(
    wants_logits: bool, sends: bool, sections: Any, notes: list[Any]
) -> None:
    model, experts = Model(), torch.zeros(1, 4, 1, 1, dtype=torch.int16)
    batch = micro_batch(sections=sections, routed_experts=experts, attention_ends=torch.ones(1, 4))
    runs: list[int] = []
    watch: Any = SimpleNamespace(running=lambda: nullcontext(runs.append(1)))
    each = made(model, _wants_logits=wants_logits)
    output, loss = Pipeline._forward_step(
        each, iter([batch]), model, loss=token_sum, stopwatch=watch, sends_features=sends
    )
    found = model.inputs
    assert torch.equal(found["input_ids"], batch.input_ids) and runs == [1]
    positions = batch.position_ids if sections is None else sections
    assert torch.equal(found["position_ids"], positions)
    assert found["labels"] is None if wants_logits else torch.equal(found["labels"], batch.labels)
    assert torch.equal(found["loss_mask"], batch.loss_mask) and found["attention_mask"] is None
    assert (found["padding_mask"], found["packed_seq_params"]) == ("ids", None)
    assert found.get("sends_features", False) is sends and torch.equal(
        found["attention_ends"], torch.ones(1, 4)
    )
    assert "images" not in found and "feature_rows" not in found
    assert [name for name, *_ in notes] == [
        "set_longest_sequence",
        "set_routed_experts",
        "require_replayed",
        "replay_in_backward",
    ]
    assert notes[0][1:] == (("rope",), 4)
    assert notes[1][1] is model and torch.equal(notes[1][2], experts)
    total, count, both = loss(output)
    assert (float(total.detach()), int(count), count.dtype) == (4, 4, torch.int32)
    assert both.tolist() == [4, 4] and both.dtype == torch.float64
    assert [each.tolist() for each in each._micro_batch_sums] == [[4, 4]]
    notes.clear()
    total.backward()
    assert notes == [("set_longest_sequence", ("rope",), 4)], "again, before layers are recomputed"


def test_a_chunk_without_such_ropes_or_a_stopwatch_runs_alike(notes: list[Any]) -> None:
    model = Model()
    each = made(model, _length_dependent_ropes=lambda model: ())
    output, loss = Pipeline._forward_step(each, iter([micro_batch()]), model, loss=token_sum)
    notes.clear()
    loss(output)[0].backward()
    assert notes == [] and "sends_features" not in model.inputs


def test_pixels_have_the_dtype_of_the_weights(notes: list[Any]) -> None:
    each = made(Model())
    images = {"pixel_values": torch.ones(2, 3), "grid": torch.ones(1, 3, dtype=torch.int64)}
    found = each._images(micro_batch(images=images, feature_rows=torch.ones(1, 4)))
    assert found["images"].keys() == images.keys() and found.keys() == {"images", "feature_rows"}
    dtypes = (found["images"]["pixel_values"].dtype, found["images"]["grid"].dtype)
    assert dtypes == (torch.bfloat16, torch.int64)
    rows = torch.zeros(1, 4)
    assert each._images(micro_batch(feature_rows=rows)) == {"feature_rows": rows}
    assert each._images(micro_batch()) == {}
    ends = torch.ones(1, 4)
    both = each._images(micro_batch(images={}, attention_ends=ends))
    assert both == {"images": {}, "attention_ends": ends}


def test_packed_sequences_keep_their_ends_on_the_host() -> None:
    platform.prepare()
    ends = torch.tensor([0, 4, 10], dtype=torch.int32)
    batch = micro_batch(cu_seqlens=ends, max_seqlen=6)
    params = _packed_params(batch, ends)
    assert (params.qkv_format, params.max_seqlen_q, params.max_seqlen_kv) == ("thd", 6, 6)
    assert params.cu_seqlens_q is ends and params.cu_seqlens_kv is ends
    assert getattr(params, engine.set_packed_lengths.__globals__["PACKED_ENDS"]) == [0, 4, 10]
    assert _packed_params(batch, None) is None and _packed_params(micro_batch(), ends) is None


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("width", "sends"), [(4, False), (12, True)])
@pytest.mark.parametrize("forward_only", [False, True])
def test_the_schedule_runs_all_micro_batches_once_for_each_chunk(
    chunks: int,
    width: int,
    sends: bool,
    forward_only: bool,
    notes: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    platform.prepare()
    import megatron.core.pipeline_parallel as upstream

    calls: list[Any] = []
    monkeypatch.setattr(
        upstream, "get_forward_backward_func", lambda: lambda **options: calls.append(options)
    )
    monkeypatch.setattr(engine.parallel, "activate_process_groups", lambda models: None)
    monkeypatch.setattr(engine, "widened_length", lambda *_, has_media: width if has_media else 0)
    monkeypatch.setattr(engine, "routed_passes", lambda models: nullcontext())
    models = ["a", "b"][:chunks]
    each: Any = SimpleNamespace(
        chunks=models,
        models=models,
        configs=[SimpleNamespace(mtp_num_layers=2, pipeline_model_parallel_size=2)],
        _loss="loss",
        stopwatch="watch",
        _forward_step=lambda *_: None,
        _ropes={1: ("rope",), 2: ("other",)},
        _step_loss=lambda: "sums",
        _micro_batch_sums=["old"],
    )
    batch: Any = SimpleNamespace(
        micro_batches=("x", "y", "z"), seq_length=4, micro_batch_size=5, has_media=True
    )
    assert Pipeline.run(each, batch, forward_only=forward_only) == "sums"
    assert each._micro_batch_sums == []
    (options,) = calls
    step = options["forward_step_func"].keywords
    watch = None if forward_only else "watch"
    assert step == {"loss": "loss", "stopwatch": watch, "sends_features": sends}
    iterators = options["data_iterator"] if chunks > 1 else [options["data_iterator"]]
    assert [list(each) for each in iterators] == [["x", "y", "z"]] * chunks
    assert options["model"] == (models if chunks > 1 else "a")
    lengths = (options["seq_length"], options["decoder_seq_length"])
    assert lengths == (width, width)
    counts = (options["num_microbatches"], options["micro_batch_size"], options["forward_only"])
    assert counts == (3, 5, forward_only)
    assert notes == [("set_longest_sequence", ("rope",), 0), ("set_longest_sequence", ("other",), 0)]
    Pipeline.run(each, batch, forward_only=True, loss="own")  # type: ignore[arg-type]
    assert calls[1]["forward_step_func"].keywords["loss"] == "own"


def test_a_pipeline_installs_losses_once_for_each_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[Any] = []
    monkeypatch.setattr(engine.moe_aux, "install_aux_losses", installed.append)
    monkeypatch.setattr(engine.mtp, "install_mtp_loss", installed.append)
    shared, own = SimpleNamespace(), SimpleNamespace()
    chunks: Any = [SimpleNamespace(config=config) for config in (shared, shared, own)]
    made = Pipeline(chunks, token_sum, wants_logits=True)
    assert made.configs == [shared, own] and shared.calculate_per_token_loss and own.calculate_per_token_loss
    assert installed == [chunks, chunks] and made.models == chunks
    assert made._wants_logits and not Pipeline(chunks, token_sum)._wants_logits
    asked: list[Any] = []
    monkeypatch.setattr(engine, "length_dependent_ropes", lambda model: asked.append(model) or (len(asked),))
    for _ in range(2):
        assert [made._length_dependent_ropes(each) for each in chunks] == [(1,), (2,), (3,)]
    assert asked == chunks
    seen: list[Any] = []
    monkeypatch.setattr(
        Pipeline, "run", lambda self, batch, **options: seen.append((batch, options, torch.is_grad_enabled()))
    )
    made.evaluate("step")  # type: ignore[arg-type]
    assert seen == [("step", {"forward_only": True}, False)]


def test_dropout_is_off_while_parameters_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "gathered_params", lambda models: nullcontext())
    chunks = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).eval()]
    each: Any = SimpleNamespace(chunks=chunks, models=chunks)
    with pytest.raises(KeyError), Pipeline.params_gathered(each):
        assert not chunks[0].training and not chunks[1].training
        raise KeyError
    assert [chunk.training for chunk in chunks] == [True, False]


class Wrapped(SimpleNamespace):
    """Weak references to it are possible."""


def wrapper(*, overlaps: bool, notes: list[str]) -> Any:
    return Wrapped(
        remove_forward_pre_hook_handles={"hook": 1} if overlaps else {},
        disable_forward_pre_hook=lambda: notes.append("disable"),
        enable_forward_pre_hook=lambda: notes.append("enable"),
        param_to_bucket_group={"weight": "group"},
        grad_accs=["hook"],
    )


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_older_wrapper_of_a_chunk_is_disabled(overlaps: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    calls: list[str] = []
    chunk, other = Model(), Model()
    for each in (chunk, other):
        each.config = SimpleNamespace(**dict.fromkeys(ddp_wrappers._CALLED, "call"))  # type: ignore[assignment]
    wrapped = wrapper(overlaps=overlaps, notes=calls)
    ddp_wrappers.register_wrapper(chunk, wrapped)
    assert ddp_wrappers.ddp_wrapper(chunk) is wrapped and ddp_wrappers.ddp_wrapper(other) is None
    with ddp_wrappers.gathered_params([chunk, other]):
        assert calls == ["disable"] * overlaps
    assert calls == ["disable", "enable"] * overlaps
    calls.clear()
    ddp_wrappers.unwrap([other])
    assert not caplog.messages
    ddp_wrappers.unwrap([other, chunk])
    assert caplog.messages == ["another trainer has trained this model; its optimizer state is discarded"]
    assert calls == ["disable"] * overlaps
    assert (wrapped.param_to_bucket_group, wrapped.grad_accs) == ({}, [])
    assert {*vars(chunk.config).values()} == {None} and {*vars(other.config).values()} == {"call"}


def test_buckets_with_vision_parameters_wait_for_the_end_of_each_step() -> None:
    resets: list[str] = []
    chunk, text = Model(), torch.nn.Parameter(torch.zeros(1))
    chunk.vision_model = torch.nn.Linear(1, 1)

    def group(name: str, *params: Any) -> Any:
        return SimpleNamespace(
            params={*params},
            reset=lambda: resets.append(name),
            is_first_batch=False,
            golden_per_param_grad_ready_counts={"old": 1},
        )

    both, other = group("both", text, chunk.vision_model.bias), group("text", text)
    ddp_wrappers.defer_vision_grad_sync(SimpleNamespace(bucket_groups=[both, other]), chunk)
    for each in (both, other):
        each.reset()
    assert resets == ["both", "text"]
    assert (both.is_first_batch, both.golden_per_param_grad_ready_counts) == (True, {})
    assert (other.is_first_batch, other.golden_per_param_grad_ready_counts) == (False, {"old": 1})
    ddp_wrappers.defer_vision_grad_sync(SimpleNamespace(), Model())


def test_megatrons_error_of_a_gradient_is_one_line() -> None:
    with (
        pytest.raises(McaError, match=r"^check_for_nan_in_grad: found NaN in local grad norm here\. Resume"),
        name_nan_gradient(),
    ):
        raise RuntimeError("('error', message='found NaN in local grad norm here', rank='1')")
    with (
        pytest.raises(McaError, match=r"^check_for_nan_in_grad: in local grad norm\. Resume"),
        name_nan_gradient(),
    ):
        raise RuntimeError("NaN in local grad norm")
    with pytest.raises(RuntimeError, match="another"), name_nan_gradient():
        raise RuntimeError("another message='x'")


def test_every_tensor_of_a_micro_batch_goes_to_the_device() -> None:
    tensors = {each.name: torch.zeros(1) for each in fields(MicroBatch) if "Tensor" in str(each.type)}
    numbers = {each.name: 7 for each in fields(MicroBatch) if each.name not in tensors}
    values: Any = tensors | numbers | {"images": {"pixels": torch.zeros(1)}}
    moved = MicroBatch(**values).to(torch.device("meta"))
    assert {tensor.device.type for tensor in moved.tensors()} == {"meta"}
    assert len([*moved.tensors()]) == len(tensors)
    assert {getattr(moved, name) for name in numbers if name != "images"} == {7}
