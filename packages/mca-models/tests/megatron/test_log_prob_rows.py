"""Ways of tokens into rows and of their values back, on every context rank, in one process."""

from contextlib import nullcontext
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_models.megatron import platform
from mca_models.megatron.features.router_replay import RoutedExperts
from mca_models.megatron.features.sequence_media import MediaArguments
from mca_models.megatron.log_probs import chunks, forward
from mca_models.megatron.log_probs.chunks import ChunkedOutput, token_values
from mca_models.megatron.log_probs.forward import Batch, LogProbs, RoutedLogProbs, _Rows
from mca_models.megatron.log_probs.vocabulary import TokenValues

MASK = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0] * 7, [0, 0, 0, 0, 1, 1, 1]])
IDS = torch.arange(1, 29).view(4, 7)


class Group:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def batch(**changes: Any) -> Batch:
    values: Any = {
        "input_ids": IDS,
        "mask": MASK.bool(),
        "cu_seqlens": None,
        "packed": False,
        "micro_batch_size": 2,
        "chunk_size": 3,
    }
    return Batch(**values | changes)


def on_rank(monkeypatch: pytest.MonkeyPatch, context: int, cp: int, tensor: int = 0, tp: int = 1) -> None:
    monkeypatch.setattr(forward.parallel, "context_group", lambda: Group(context, cp))
    monkeypatch.setattr(forward.parallel, "tensor_group", lambda: Group(tensor, tp))
    monkeypatch.setattr(forward.parallel, "pipeline_group", lambda: Group(0, 1))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)


def models(cp: int = 1, tp: int = 1, *, sequence_parallel: bool = False) -> Any:
    chunk = torch.nn.Linear(1, 1).bfloat16()
    chunk.pre_process = True  # type: ignore[assignment]
    megatron = SimpleNamespace(
        sequence_parallel=sequence_parallel,
        fp8=None,
        fp8_recipe=None,
        transformer_impl="local",
        microbatch_group_size_per_vp_stage=None,
    )
    embedding = SimpleNamespace(learned_positions=False)
    layout = ParallelLayout(tensor_model_parallel_size=tp, context_parallel_size=cp)
    return SimpleNamespace(
        rank_context=SimpleNamespace(layout=layout, coordinates=SimpleNamespace(dp=3)),
        megatron=megatron,
        chunks=[chunk],
        config=SimpleNamespace(embedding=embedding, vocab_size=100, max_position_embeddings=6),
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_value_returns_to_the_token_it_predicts(
    packed: bool, cp: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value of a token is made of it and of the label, so that no other may take its place."""
    made = batch(packed=packed, micro_batch_size=size)
    outputs: list[list[torch.Tensor]] = []
    for rank in range(cp):
        on_rank(monkeypatch, rank, cp)
        rows = _Rows(models(cp), made, [None] * 3)
        monkeypatch.setattr(rows, "_joined_media", lambda number, decodes: MediaArguments())
        monkeypatch.setattr(rows, "_packed", lambda lengths: lengths)
        given = list(rows.micro_batches(models(cp).chunks[0]))
        assert len(given) == rows.count and rows.height == (1 if packed else size)
        for each in given:
            assert each["input_ids"].shape == (rows.height, rows.length // cp)
            assert each["input_ids"].dtype == each["labels"].dtype == torch.int64
            assert (each["packed_seq_params"] is None) != packed and each["routed_experts"] is None
            places = each["position_ids"].expand_as(each["input_ids"])[each["input_ids"] > 0]
            ids = each["input_ids"][each["input_ids"] > 0]
            starts = {2: 2, 3: 2, 4: 2, 5: 2, 6: 2, 7: 2, 8: 8, 9: 8, 10: 8, 26: 26, 27: 26, 28: 26}
            assert [i - starts[i] for i in ids.tolist()] == places.tolist()
        values = [
            torch.stack([each["input_ids"] * 100.0 + each["labels"], each["labels"] + 0.5]) for each in given
        ]
        outputs.append(values)
    monkeypatch.setattr(forward, "gathered", lambda own, group: [every[own] for every in outputs])
    by_row = torch.cat([rows.whole(number) for number in range(rows.count)], 1)  # type: ignore[arg-type]
    found, labels = rows.spread(by_row)
    for start, end in ((1, 7), (7, 10), (25, 28)):
        expected = [0, *(100 * IDS.flatten()[i - 1] + IDS.flatten()[i] for i in range(start + 1, end))]
        assert found.flatten()[start:end].tolist() == expected
        assert labels.flatten()[start + 1 : end].tolist() == [i + 1.5 for i in range(start + 1, end)]
    assert not found[~MASK.bool()].any() and not labels[~MASK.bool()].any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel"),
    [(1, 1, False), (2, 1, False), (1, 2, True), (2, 2, True), (1, 2, False)],
)
def test_experts_go_to_the_routers_of_their_tokens_and_return(
    packed: bool, cp: int, tp: int, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer l of token i has the experts 10 i + l and 10 i + l + 1; a router sees tokens by position, then row."""
    experts = (IDS[..., None, None] * 10 + torch.tensor([[0, 1], [1, 2]])).short()
    made = batch(packed=packed, routed_experts=experts)
    monkeypatch.setattr(forward, "require_experts", lambda config, what: RoutedExperts((0, 1), 2, 2, 300))
    seen: list[torch.Tensor] = []
    for context, tensor in product(range(cp), range(tp)):
        on_rank(monkeypatch, context, cp, tensor, tp)
        rows = _Rows(models(cp, tp, sequence_parallel=sequence_parallel), made, [None] * 3)
        passes = [*enumerate(recorded(rows, context, cp, *((tensor, tp) if sequence_parallel else (0, 1))))]
        monkeypatch.setattr(forward, "recorded_experts", lambda chunk, passes=passes: passes)
        reduced: list[int] = []

        def note(total: torch.Tensor, group: Any, reduced: list[int] = reduced) -> None:
            reduced.append(group.size())
            if len(reduced) == 1:
                seen.append(total.clone())

        monkeypatch.setattr(torch.distributed, "all_reduce", note)
        found = rows.routed_experts()
        assert reduced == [size for size in (cp, tp if sequence_parallel else 1) if size > 1]
    if seen:
        parts = torch.stack(seen)
        assert int((parts != 0).sum(0).max()) == 1, "each token is on one rank"
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda total, group: total.copy_(parts.sum(0)))
        found = rows.routed_experts()
    assert found.dtype == torch.int16
    assert torch.equal(found[MASK.bool()], experts[MASK.bool()])
    assert bool((found[~MASK.bool()] == -1).all())


def recorded(rows: _Rows, context: int, cp: int, tensor: int, tp: int) -> list[list[torch.Tensor]]:
    """Return for each layer the experts of each pass that a router on this rank replays."""
    passes: list[list[torch.Tensor]] = [[], []]
    for number in range(rows.count):
        own = rows._rank_tokens(rows._lengths(number), context, cp)
        given = rows._replayed_experts(number, own)
        assert given is not None and given.shape == (rows.height, len(own), 2, 2)
        for layer, experts in enumerate(passes):
            experts.append(given.chunk(tp, 1)[tensor][:, :, layer].transpose(0, 1).flatten(0, 1))
    return passes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": IDS[0], "mask": None}, r"input_ids has shape \[7\]; expected \[batch, seq\]"),
        ({"mask": MASK[:2].bool()}, r"mask has shape \[2, 7\]; expected \[4, 7\], as input_ids"),
        (
            {"routed_experts": torch.zeros(4, 6, 2, 2)},
            r"routed_experts has shape \[4, 6, 2, 2\]; expected \[4, 7, layers, topk\]",
        ),
        ({"micro_batch_size": 0}, "micro_batch_size and chunk_size must be at least 1"),
        ({"chunk_size": 0}, "micro_batch_size and chunk_size must be at least 1"),
        ({"cu_seqlens": torch.tensor([0, 28])}, "cu_seqlens must increase"),
    ],
)
def test_a_batch_of_other_shapes_is_an_error(changes: dict[str, Any], message: str) -> None:
    batch(micro_batch_size=1, chunk_size=1, routed_experts=torch.zeros(4, 7, 2, 2))
    with pytest.raises(McaError, match=message):
        batch(**changes)


@pytest.mark.parametrize(
    ("ends", "rows", "is_right"),
    [
        ([0, 3, 3, 7], 1, True),
        ([0, 7], 1, True),
        ([0, 7], 2, False),
        ([1, 7], 1, False),
        ([0, 6], 1, False),
        ([0, 5, 3, 7], 1, False),
    ],
)
def test_boundaries_increase_over_the_only_row(ends: list[int], rows: int, is_right: bool) -> None:
    given = {"input_ids": IDS[:rows], "mask": None, "cu_seqlens": torch.tensor(ends)}
    if not is_right:
        with pytest.raises(McaError, match="cu_seqlens must increase from 0 to the length of the only row"):
            batch(**given)
        return
    made = batch(**given)
    lengths = [b - a for a, b in pairwise(ends)]
    assert [len(each) for each in made._all_positions()] == lengths
    assert [each.tolist() for each in made.positions()][-1] == [*range(ends[-2], 7)]
    assert len(made.positions()) == sum(length > 0 for length in lengths)


def test_rows_without_a_mask_are_sequences_and_media_belong_to_those_with_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = batch(mask=None).positions()
    assert [each.tolist() for each in whole] == [[*range(7 * row, 7 * row + 7)] for row in range(4)]
    given: list[Any] = []
    monkeypatch.setattr(
        forward, "located_media", lambda models, ids, media: given.extend(ids) or ["a", "b", "c", "d"]
    )
    assert batch().located_media("models") == ["a", "b", "d"]  # type: ignore[arg-type]
    assert [each.tolist() for each in given] == [[2, 3, 4, 5, 6, 7], [8, 9, 10], [], [26, 27, 28]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decodes", [False, True])
def test_media_are_joined_for_the_rows_of_their_micro_batch(
    packed: bool, decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_rank(monkeypatch, 1, 2)
    rows = _Rows(models(2), batch(packed=packed), ["a", "b", "d"])  # type: ignore[list-item]
    asked: list[Any] = []

    def join(found: Any, lengths: Any, cut: Any, *, packed: bool) -> Any:
        asked.append((found, list(lengths), cut(torch.arange(8)[None], 1).tolist(), packed))
        return SimpleNamespace(to=lambda device: "joined")

    def joiner(config: Any, *, decodes: bool) -> Any:
        asked_to_decode.append(decodes)
        return SimpleNamespace(join=join)

    asked_to_decode: list[bool] = []
    monkeypatch.setattr(forward, "media_joiner", joiner)
    assert rows._joined_media(0, decodes=decodes) == rows._joined_media(1, decodes=decodes) == "joined"
    assert asked_to_decode == [decodes] * 2
    second = [[2, 3, 4, 5]]
    if packed:
        assert rows.length == 12
        assert asked == [(["a", "b"], [8, 4], second, True), (["d"], [4, 8], second, True)]
    else:
        assert asked == [(["a", "b"], [8, 8], second, False), (["d"], [8, 8], second, False)]


def test_a_pack_has_ends_on_the_host_too(monkeypatch: pytest.MonkeyPatch) -> None:
    platform.prepare()
    on_rank(monkeypatch, 0, 1)
    params = _Rows(models(), batch(packed=True), [])._packed((6, 3, 2))
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 6, 9, 11]
    assert (params.max_seqlen_q, params.max_seqlen_kv, params.qkv_format) == (6, 6, "thd")
    assert params.cu_seqlens_q.dtype == torch.int32
    assert getattr(params, forward.set_packed_lengths.__globals__["PACKED_ENDS"]) == [0, 6, 9, 11]


@pytest.mark.parametrize(
    ("packed", "tokens", "lengths", "positions"),
    [
        (False, [3, 1], (5,), [0, 1, 2, 2, 2]),
        (False, [], (2,), [0, 0]),
        (True, [3, 1], (4, 2, 3), [0, 1, 2, 2, 0, 0, 0, 0, 0]),
        (True, [], (2,), [0, 0]),
    ],
)
def test_padding_has_the_position_of_the_last_token(
    packed: bool, tokens: list[int], lengths: tuple[int, ...], positions: list[int]
) -> None:
    sequences = [torch.arange(count) for count in tokens]
    rows: Any = SimpleNamespace(
        _batch=SimpleNamespace(packed=packed),
        _longest=max(tokens, default=0),
        _device="cpu",
        _groups=[sequences],
    )
    rows._padded = lambda count: count
    rows._sequence_rows = lambda number: _Rows._sequence_rows(rows, number)
    assert _Rows._positions(rows, 0, lengths).tolist() == positions
    assert list(_Rows._sequence_rows(rows, 1)) == [], "another replica has more micro-batches"


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("stage", [0, 1])
def test_values_of_the_last_stage_are_sent_to_all(
    entropy: bool, records: bool, stages: int, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.prepare()
    import megatron.core.pipeline_parallel as upstream

    stage %= stages
    calls: list[Any] = []
    each = models()
    made, kinds = batch(return_routed_experts=records), 1 + entropy
    outputs = [torch.full((kinds, 2, 6), 1.0 + number) for number in range(2)]

    def schedule(**options: Any) -> Any:
        calls.append(options)
        return outputs if stage == stages - 1 else []

    def broadcast(values: torch.Tensor, source: int, *, group: Any) -> None:
        assert source == 100 + stages - 1 and values.shape == (kinds, 4, 6)
        if stage < stages - 1:
            values.copy_(torch.cat(outputs, 1))
        calls.append("broadcast")

    on_rank(monkeypatch, 0, 1)
    monkeypatch.setattr(upstream, "get_forward_backward_func", lambda: schedule)
    monkeypatch.setattr(forward, "_checked_batch", lambda models, make: (make(), [None] * 3))
    monkeypatch.setattr(forward, "inference", lambda models: nullcontext())
    monkeypatch.setattr(forward, "_computing", lambda *values: nullcontext(calls.append(values)))
    monkeypatch.setattr(forward, "routed_passes", lambda chunks, record: nullcontext(calls.append(record)))
    monkeypatch.setattr(forward.parallel, "pipeline_group", lambda: Group(stage, stages))
    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, rank: 100 + rank)
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    monkeypatch.setattr(_Rows, "routed_experts", lambda self: "experts")
    values = TokenValues(entropy=entropy)
    found = forward.model_log_probs(each, lambda: made, values)
    computing, record, options, *sent = calls
    assert computing == (each, 3, values) and record is records
    assert sent == ["broadcast"] * (stages > 1)
    sizes = [options[name] for name in ("num_microbatches", "seq_length", "micro_batch_size")]
    assert sizes == [2, 6, 2] and options["forward_only"] and options["collect_non_loss_data"]
    assert options["model"] == each.chunks and len(options["data_iterator"]) == 1
    assert isinstance(found, RoutedLogProbs if records else LogProbs)
    assert not records or found.routed_experts == "experts"  # type: ignore[union-attr]
    assert found.log_probs.shape == (4, 7) and found.log_probs.sum() == 5 + 2 + 2 * 2
    assert (found.entropy is not None) == entropy


def test_a_batch_is_checked_for_what_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    compared: list[Any] = []
    monkeypatch.setattr(Batch, "located_media", lambda self, models: [None])
    monkeypatch.setattr(forward, "_require_packs", lambda models: asked.append("packs"))
    monkeypatch.setattr(forward, "require_learned_positions", lambda *values: asked.append(values))
    monkeypatch.setattr(forward, "require_experts", lambda config, name: asked.append(name))
    monkeypatch.setattr(
        forward, "checked_experts", lambda config, experts, name: asked.append(name) or experts + 1
    )
    monkeypatch.setattr(forward, "media_checksum", lambda media, start: (media, start))
    monkeypatch.setattr(forward, "run_on_all_ranks_unwrapped", lambda check: [check()])
    monkeypatch.setattr(forward, "require_same_inputs", compared.extend)
    each = models()
    forward._checked_batch(each, batch)
    assert asked == [] and compared == [(3, ([None], 0))]
    experts = torch.zeros(4, 7, 1, 1, dtype=torch.int16)
    each.config.embedding.learned_positions = True
    made, media = forward._checked_batch(
        each, lambda: batch(packed=True, return_routed_experts=True, routed_experts=experts)
    )
    assert asked == ["packs", (6, 6), "return_routed_experts", "routed_experts"]
    assert media == [None] and made.routed_experts is not None and bool((made.routed_experts == 1).all())
    assert compared[1] == (3, ([None], forward._checksum(experts + 1)))
    forward._checked_batch(each, lambda: batch(mask=torch.zeros(4, 7, dtype=torch.bool)))
    assert asked[-1] == (0, 6)


def test_the_checksum_of_experts_knows_their_order_and_shape() -> None:
    experts = torch.arange(12, dtype=torch.int16).view(1, 3, 2, 2)
    found = [experts, experts.flip(1), experts.view(1, 6, 1, 2), experts[:, :, :, :1], experts.int()]
    assert len({forward._checksum(each) for each in found} | {0}) == 6 and forward._checksum(None) == 0
    assert forward._checksum(experts.transpose(2, 3)) == forward._checksum(
        experts.transpose(2, 3).contiguous()
    )


@pytest.mark.parametrize("has_hook", [False, True])
def test_the_output_layer_computes_values_within_the_block(
    has_hook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "token_values", lambda values, words: (values, words))

    def plain(**_: Any) -> str:
        return "plain"

    class Chunk:
        post_process = True

        def _postprocess(self) -> None: ...

    class Stage:
        post_process = False

    last: Any = Chunk()
    if has_hook:
        last._postprocess = plain
    each: Any = SimpleNamespace(chunks=[Stage(), last], config=SimpleNamespace(vocab_size=9))
    with pytest.raises(KeyError), forward._computing(each, 5, TokenValues()):
        assert isinstance(last._postprocess, ChunkedOutput) and last._postprocess._tokens == 5
        assert last._postprocess._values == (TokenValues(), 9)
        assert "_postprocess" not in vars(each.chunks[0])
        raise KeyError
    assert vars(last) == ({"_postprocess": plain} if has_hook else {})


@pytest.mark.parametrize(
    ("tokens", "ranks", "chunks"),
    [
        *((1, 1, 6), (4, 1, 3), (5, 1, 3), (8, 1, 2), (1000, 1, 1)),
        *((1, 2, 3), (4, 2, 3), (5, 2, 3), (8, 2, 2), (1000, 2, 1)),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_values_in_chunks_and_their_gradients_are_those_of_full_logits(
    tokens: int, ranks: int, chunks: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences of six tokens; with sequence parallelism the output layer gathers those of both ranks."""
    platform.prepare()
    torch.manual_seed(0)
    hidden = torch.randn(6, 2, 3, dtype=torch.float64)
    weight = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (2, 6))
    widest: list[int] = []
    shared = hidden.clone().requires_grad_()
    parts = shared.chunk(ranks)

    def output_layer(own: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        assert (weight is not None) == tied
        start = next(i for i in range(6) if torch.equal(parts[0][i], own[0]))
        full = torch.cat([part[start : start + len(own)] for part in parts])  # as an all-gather would
        widest.append(full.shape[0] * full.shape[1])
        return full @ table.T, None

    table = weight

    def values(logits: torch.Tensor, tokens: torch.Tensor, vocab: int) -> torch.Tensor:
        assert vocab == 11
        found = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        return torch.stack([found, 2 * found])

    model: Any = SimpleNamespace(
        _postprocess=lambda *, hidden_states, labels, other: ("plain", other),
        output_layer=output_layer,
        share_embeddings_and_output_weights=tied,
        shared_embedding_or_output_weight=lambda: table,
    )
    chunked = ChunkedOutput(model, tokens, token_values(values, 11))
    found = chunked(hidden_states=parts[0], labels=labels, other=1)
    logits = hidden.clone().requires_grad_() @ weight.T
    expected = logits.log_softmax(-1).gather(-1, labels.T[..., None])[..., 0].T
    torch.testing.assert_close(found, torch.stack([expected, 2 * expected]))
    assert max(widest) <= max(tokens, 2 * ranks) and len(widest) == chunks
    (own,) = torch.autograd.grad(found[0].sum(), weight)
    (right,) = torch.autograd.grad(expected.sum(), weight)
    torch.testing.assert_close(own, right)
    assert chunked(hidden_states=parts[0], labels=None, other=7) == ("plain", 7)


def test_random_states_return_after_a_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    platform.prepare()
    import megatron.core.tensor_parallel as upstream

    states = {"now": torch.zeros(1)}
    tracker = SimpleNamespace(get_states=lambda: dict(states), set_states=lambda given: states.update(given))
    monkeypatch.setattr(upstream, "get_cuda_rng_tracker", lambda: tracker)
    first, second = chunks._recompute_contexts()
    states["now"] = torch.ones(1)
    with first:
        assert float(states["now"]) == 1
    with pytest.raises(KeyError), second:
        assert float(states["now"]) == 0
        raise KeyError
    assert float(states["now"]) == 1


def test_one_pass_takes_its_experts_and_returns_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    monkeypatch.setattr(forward, "set_routed_experts", lambda model, experts: order.append(experts))
    monkeypatch.setattr(forward, "require_replayed", lambda model: order.append("replayed"))

    def model(**inputs: Any) -> Any:
        order.append(inputs)
        return "values"

    iterator = iter([{"routed_experts": "experts", "input_ids": "ids"}])
    output, collect = forward._forward_step(iterator, model)  # type: ignore[arg-type]
    assert order == ["experts", {"input_ids": "ids", "attention_mask": None}, "replayed"]
    assert output == "values" and collect("own", True) == "own"  # type: ignore[comparison-overlap,arg-type]
