"""Padded lengths of rows whose log-probabilities are computed, and the sums of a fingerprint."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_models.megatron import forward as model_forward
from mca_models.megatron.log_probs import forward
from mca_models.megatron.log_probs.forward import _Rows
from mca_models.megatron.log_probs.vocabulary import TokenValues
from mca_models.megatron.state import fingerprint
from mca_models.megatron.state.fingerprint import _name_factor, _sum


def test_rows_are_padded_to_the_next_multiple():
    rows: Any = SimpleNamespace(_multiple=8)
    assert [_Rows._padded(rows, tokens) for tokens in (1, 7, 8, 9, 16)] == [8, 8, 8, 16, 16]


def test_the_sum_of_a_parameter_has_64_bits():
    torch.manual_seed(0)
    found = [int(_sum(torch.rand(10))) for _ in range(20)]
    assert max(map(abs, found)) > 2**60
    assert len(set(found)) == 20


def test_a_fingerprint_that_was_stored_stays_the_same():
    """The factor of a name is odd, so that no bit of a sum is lost."""
    assert _name_factor("decoder.layers.0.mlp.linear_fc1.weight") == 80053452171254297
    assert int(_sum(torch.arange(5.0))) == -3719291022427144609


@pytest.mark.parametrize(("rank", "rows"), [(0, 4), (1, 4), (2, 2), (3, 0)])
def test_a_fingerprint_leaves_out_padded_rows_of_the_vocabulary(
    rank: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "shard_rank_and_size", lambda *_: (rank, 4))
    models: Any = SimpleNamespace(
        config=SimpleNamespace(vocab_size=10, layout=None), rank_context=SimpleNamespace(coordinates=None)
    )
    tensor = torch.zeros(4, 2)

    def param(vocab: bool) -> Any:
        return SimpleNamespace(vocab=vocab)

    assert len(fingerprint._true_rows(param(True), tensor, models)) == rows
    assert len(fingerprint._true_rows(param(False), tensor, models)) == 4


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("others", "vpp", "count", "length"),
    [((0, 0), 1, 2, None), ((3, 24), 1, 3, 24), ((3, 0), 2, 4, None), ((9, 0), 2, 12, None)],
)
def test_all_ranks_have_the_rows_of_the_one_with_most(
    packed: bool, others: tuple[int, int], vpp: int, count: int, length: int | None, monkeypatch
) -> None:
    """This rank has three sequences in micro-batches of two; padded to a multiple of 8."""

    def largest(box: torch.Tensor, operation: Any) -> None:
        assert operation == torch.distributed.ReduceOp.MAX
        box.copy_(torch.maximum(box, torch.tensor(others)))

    monkeypatch.setattr(torch.distributed, "all_reduce", largest)

    def multiple(given: Any, sequence_parallel: Any, *, tokens: Any, step: Any) -> int:
        assert (given, sequence_parallel) == (layout, "sequence_parallel")
        assert tokens == ("fp8", "fp8_recipe") and step == ("cpu", "transformer_impl", packed)
        return 8

    monkeypatch.setattr(model_forward, "sequence_multiple", multiple)
    monkeypatch.setattr(model_forward, "fp8_token_multiple", lambda fp8, recipe: (fp8, recipe))
    monkeypatch.setattr(
        model_forward,
        "length_multiple",
        lambda device, implementation, *, packed: (device, implementation, packed),
    )
    names = ("sequence_parallel", "fp8", "fp8_recipe", "transformer_impl")
    megatron = SimpleNamespace(
        **dict(zip(names, names, strict=True)), microbatch_group_size_per_vp_stage=None
    )
    layout = SimpleNamespace(pp=4, vpp=vpp)
    models: Any = SimpleNamespace(rank_context=SimpleNamespace(layout=layout), megatron=megatron)
    sequences = [torch.arange(9), torch.arange(3), torch.arange(5)]
    batch: Any = SimpleNamespace(positions=lambda: sequences, micro_batch_size=2, packed=packed)
    rows = _Rows(models, batch, [])
    assert (rows.count, rows.height, rows._longest) == (count, 1 if packed else 2, 9)
    assert rows.length == (length or (24 if packed else 16))
    batch.positions = list
    empty = _Rows(models, batch, [])
    assert (empty._longest, empty.length) == (0, max(8, others[1]))
    assert empty.count == max(others[0], 1) if vpp == 1 else empty.count == -(-others[0] // 4) * 4


@pytest.mark.parametrize("sections", [None, torch.zeros(3, 3, 6)])
@pytest.mark.parametrize("lengths", [(), (3,), (2, 5, 4)])
def test_ropes_are_as_long_as_the_longest_sequence(lengths, sections, monkeypatch):
    longest: list[int] = []
    monkeypatch.setattr(forward.parallel, "context_group", lambda: SimpleNamespace(rank=int, size=lambda: 1))
    monkeypatch.setattr(forward, "set_longest_sequence", lambda ropes, length: longest.append(length))
    monkeypatch.setattr(forward, "length_dependent_ropes", lambda chunk: [])
    chunk: Any = torch.nn.Linear(1, 1)
    chunk.pre_process = True
    rows: Any = SimpleNamespace(
        _joined_media=lambda number, decodes: SimpleNamespace(keywords=lambda dtype: {}, sections=sections),
        _batch=SimpleNamespace(input_ids=torch.arange(20), packed=False),
        _device=torch.device("cpu"),
        count=1,
        height=3,
        length=6,
        _sequence_rows=lambda number: [(row, 0, torch.arange(n)) for row, n in enumerate(lengths)],
        _lengths=lambda number: None,
        _positions=lambda number, lengths: torch.zeros(3, 6, dtype=torch.int64),
        _rank_tokens=lambda lengths, rank, size: torch.arange(6),
        _replayed_experts=lambda number, own: (number, own.tolist()),
    )
    (inputs,) = _Rows.micro_batches(rows, chunk)
    assert longest == [max(lengths, default=0)] and inputs["routed_experts"] == (0, [*range(6)])
    assert inputs["position_ids"].shape == (3, 6) if sections is None else inputs["position_ids"] is sections
    for row, length in enumerate(lengths):
        assert inputs["input_ids"][row].tolist() == [*range(length), *[0] * (6 - length)]
        assert inputs["labels"][row].tolist() == [*range(1, length), *[0] * (7 - length)]


@pytest.mark.parametrize("temperature", [0, -1.0, float("inf"), float("nan")])
def test_a_temperature_is_a_positive_number(temperature):
    assert TokenValues(temperature=1e-6).temperature == 1e-6
    with pytest.raises(McaError, match=f"^temperature is {temperature}; expected a positive number"):
        TokenValues(temperature=temperature)


@pytest.mark.parametrize(("entropy", "peak"), [(False, 3 * 5 * (2 + 4)), (True, 3 * 5 * (2 + 8))])
def test_the_memory_of_token_values_is_the_logits_and_their_copies(entropy, peak):
    assert TokenValues(entropy=entropy).peak_bytes(3, 5, 2) == peak


def test_a_failed_pass_leaves_no_longest_sequence_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass would take its frequencies of dynamic RoPE."""
    monkeypatch.setattr(model_forward.parallel, "activate_process_groups", lambda chunks: None)
    chunk: Any = torch.nn.Linear(1, 1)
    chunk.mtp_process, chunk.longest_sequence = False, 0
    models: Any = SimpleNamespace(
        chunks=torch.nn.ModuleList([chunk]), megatron=SimpleNamespace(mtp_num_layers=None)
    )
    with pytest.raises(RuntimeError), model_forward.inference(models):
        model_forward.set_longest_sequence(model_forward.length_dependent_ropes(chunk), 7)
        assert chunk.longest_sequence == 7
        raise RuntimeError
    assert chunk.longest_sequence == 0
