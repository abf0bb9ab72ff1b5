"""Changes to embeddings, positions, logits, MTP layers and towers, on stand-ins for Megatron's modules, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_models.megatron import platform
from mca_models.megatron.features.embedding import (
    add_embedding_norm,
    normalise_embedding,
    set_learned_positions,
)
from mca_models.megatron.features.head import _scale_logits
from mca_models.megatron.features.mrope import MRope
from mca_models.megatron.features.mtp import _reject_megatron_loss, predict_before_norm
from mca_models.megatron.features.per_layer_embedding import _add_input, _PerLayerInputs
from mca_models.megatron.features.shared_kv import ContextSlice, _slices
from mca_models.megatron.features.vision_tower import _fuse_qkv
from mca_models.megatron.layers import attention, spec

HIDDEN, EPSILON = 4, 1e-5


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def normal(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)


def megatron(**more: Any) -> Any:
    plain = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "sequence_parallel": False}
    plain |= {"params_dtype": torch.bfloat16, "layernorm_epsilon": EPSILON, "hidden_size": HIDDEN}
    return SimpleNamespace(**plain | more)


class Giving(torch.nn.Module):
    """Module that returns what it was made with."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return it."""
        return self.output


def test_embeddings_are_normalized_with_or_without_weights() -> None:
    embedded = drawn(3, 1, HIDDEN)
    model: Any = SimpleNamespace(embedding=Giving(embedded))
    normalise_embedding(model, EPSILON)
    torch.testing.assert_close(model.embedding(), normal(embedded))
    model = SimpleNamespace(embedding=Giving(embedded), config=megatron())
    add_embedding_norm(model)
    assert model.embedding.layernorm.weight.dtype == torch.bfloat16
    torch.nn.init.constant_(model.embedding.layernorm.weight, 2.0)
    torch.testing.assert_close(model.embedding(), 2 * normal(embedded))
    for nothing in (SimpleNamespace(), SimpleNamespace(config=megatron())):  # chunks without an embedding
        normalise_embedding(nothing, EPSILON)  # type: ignore[arg-type]
        add_embedding_norm(nothing)  # type: ignore[arg-type]


def test_learned_positions_have_the_models_dtype_and_begin_at_a_row() -> None:
    table = torch.nn.Embedding(8, HIDDEN)
    embedding = SimpleNamespace(position_embeddings=table)
    sizes = SimpleNamespace(position_offset=2)
    config: Any = SimpleNamespace(max_position_embeddings=6, embedding=sizes)
    set_learned_positions(SimpleNamespace(embedding=embedding, config=megatron()), config)  # type: ignore[arg-type]
    assert table.weight.dtype == torch.bfloat16
    assert torch.equal(table(torch.tensor([0, 5])), table.weight[[2, 7]])
    assert table(torch.zeros(0, dtype=torch.long)).shape == (0, HIDDEN)
    with pytest.raises(McaError, match="7"):
        table(torch.tensor([6]))


@pytest.mark.parametrize("cap", [None, 2.0])
def test_logits_are_divided_and_then_capped(cap: float | None) -> None:
    logits = drawn(3, 1, 9) * 10
    model: Any = SimpleNamespace(output_layer=Giving((logits, "bias")))
    config: Any = SimpleNamespace(head=SimpleNamespace(logits_scaling=4.0, final_logit_softcapping=cap))
    _scale_logits(model, config)
    found, bias = model.output_layer()
    expected = logits / 4
    torch.testing.assert_close(found, expected if cap is None else 2 * torch.tanh(expected / 2))
    assert bias == "bias"
    _scale_logits(SimpleNamespace(), config)  # type: ignore[arg-type]


def test_mtp_layers_predict_from_states_before_the_final_norm() -> None:
    class Predicting(torch.nn.Module):
        """Two MTP layers, which multiply states by 10 and by 100."""

        layers = (1, 2)

        def forward(self, *, hidden_states: Tensor) -> Tensor:
            """Return the states and both predictions."""
            return torch.cat([hidden_states, hidden_states * 10, hidden_states * 100])

    class Model(torch.nn.Module):
        """Chunk with a final norm that doubles."""

        mtp_process = True

        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.mtp = torch.nn.Module(), Predicting()
            self.decoder.final_layernorm = torch.nn.Softplus(1e-9)

        def forward(self, states: Tensor) -> Tensor:
            """Return all states."""
            predicted: Tensor = self.mtp(hidden_states=self.decoder.final_layernorm(states) * 2)
            return predicted

    model: Any = Model()
    predict_before_norm(model)
    for states in (drawn(2, HIDDEN).abs() + 1, drawn(2, HIDDEN).abs() + 3):
        normed = model.decoder.final_layernorm(states) * 2
        torch.testing.assert_close(model(states), torch.cat([normed, states * 10, states * 100]))
    predict_before_norm(SimpleNamespace(mtp_process=False))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "rejected"),
    [
        ({}, True),
        ({"version": (0, 16, 1)}, True),
        ({"version": (0, 16, 1), "per_token": True}, False),
        ({"version": (0, 17), "per_token": True}, True),
        ({"layers": None}, False),
        ({"own_loss": True}, False),
        ({"labels": None}, False),
        ({"grad": False}, False),
    ],
)
def test_megatrons_loss_of_mtp_layers_is_rejected_where_it_is_wrong(
    changes: dict[str, Any], rejected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"version": (0, 18), "per_token": False, "layers": 1, "own_loss": False, "labels": 1, "grad": True}
    case |= changes
    monkeypatch.setattr(platform, "megatron_version", lambda: case["version"])
    config = SimpleNamespace(calculate_per_token_loss=case["per_token"], mtp_num_layers=case["layers"])
    model: Any = SimpleNamespace(config=config)
    if case["own_loss"]:
        model.mca_mtp_loss = None
    with torch.set_grad_enabled(bool(case["grad"])):
        if not rejected:
            return _reject_megatron_loss(model, (), {"labels": case["labels"]})
        with pytest.raises(McaError, match="MTP loss is wrong with context_parallel_size above 1"):
            _reject_megatron_loss(model, (), {"labels": case["labels"]})


def test_a_layer_adds_the_gated_embedding_of_its_number() -> None:
    def linear(weight: Tensor) -> Any:
        return lambda x: (x @ weight.T, None)

    gate, up, hidden, inputs = drawn(3, HIDDEN), drawn(HIDDEN, 3), drawn(5, 1, HIDDEN), drawn(5, 1, 2, 3)
    layer: Any = SimpleNamespace(layer_number=2, per_layer_gate=linear(gate), per_layer_projection=linear(up))
    layer.per_layer_layernorm, layer.config = normal, SimpleNamespace(activation_func=torch.tanh)
    found, context = _add_input(layer, (), {"context_mask": inputs}, (hidden, None))
    added = (torch.tanh(hidden @ gate.T) * inputs[:, :, 1]) @ up.T
    torch.testing.assert_close(found, hidden + normal(added))
    assert context is None


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_embeddings_of_all_layers_come_from_tokens_and_their_embeddings(
    scattered: bool, by_name: bool
) -> None:
    """Token 7 is the placeholder of images, which has the embedding of padding, 0."""
    made: Any = object.__new__(_PerLayerInputs)
    made._size, made._padding, made._placeholders, made._embeddings = 3, 0, frozenset({7}), None
    table, projection, tokens = drawn(9, 6), drawn(6, HIDDEN), torch.tensor([[1, 7, 8]])
    output = drawn(3, 1, HIDDEN)

    class Table(torch.nn.Module):
        """Table of two layers with three channels each, whose rows come by token or by sequence."""

        weight, reduce_scatter_embeddings = table, scattered

        def forward(self, ids: Tensor) -> Tensor:
            """Return the rows."""
            return table[ids].transpose(0, 1) if scattered else table[ids]

    embedding: Any = SimpleNamespace(
        per_layer_embeddings=Table(),
        per_layer_projection=lambda x: (x @ projection.T, None),
        per_layer_layernorm=normal,
    )
    args, kwargs = ((), {"input_ids": tokens}) if by_name else ((tokens,), {})
    made.after_embedding(embedding, args, kwargs, output)
    rows = table[[1, 0, 8]].view(3, 1, 2, 3) * 3**0.5
    expected = (normal((output @ projection.T * HIDDEN**-0.5).view(3, 1, 2, 3)) + rows) * 0.5**0.5
    given = made.before_block(None, (1,), {"more": 2})
    torch.testing.assert_close(given[1].pop("context_mask"), expected)
    assert given == ((1,), {"more": 2}) and made._embeddings is None
    made._padding = None
    assert made._without_placeholders(tokens) is tokens


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_a_fused_projection_gives_queries_keys_and_values(biased: bool, turned: bool) -> None:
    """Two heads of four channels; RoPE pairs are neighbours in the checkpoint, and halves of a head here."""
    parts = [torch.nn.Linear(HIDDEN, 8, bias=biased) for _ in range(3)]
    made: Any = torch.nn.Module()
    made.head_dim, x = 4, drawn(5, HIDDEN)
    made.q_proj, made.k_proj, made.v_proj = parts
    before = [part(x) for part in parts]
    _fuse_qkv(made, turned=turned)
    assert {*dict(made.named_parameters())} == {f"wqkv.{leaf}" for leaf in ("weight", "bias")[: 1 + biased]}
    halves = [0, 2, 1, 3, 4, 6, 5, 7] if turned else [*range(8)]
    for part, expected, order in zip((made.q_proj, made.k_proj), before, (halves, halves), strict=False):
        torch.testing.assert_close(part(x), expected[:, order])
    torch.testing.assert_close(made.v_proj(x), before[2])


def test_a_tensor_rank_has_the_slopes_of_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    config: Any = SimpleNamespace(num_attention_heads=8, tensor_model_parallel_size=2)
    assert attention._slopes(config).tolist() == [2**-5, 2**-6, 2**-7, 2**-8]


@pytest.mark.parametrize(("backend", "replaced"), [(None, False), ("flash", False), ("local", True)])
def test_mcas_attention_is_in_transformer_engines_layers_where_it_is_chosen(
    backend: str | None, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine:
        """Transformer Engine's attention."""

    monkeypatch.setattr(spec, "engine_attention", lambda: Engine)
    config: Any = SimpleNamespace(attention_backend=backend and SimpleNamespace(name=backend))
    found = spec._with_local_attention({"core_attention": Engine, "other": dict}, config)
    assert found == {"core_attention": attention.CoreAttention if replaced else Engine, "other": dict}


@pytest.mark.parametrize("pairs", [False, True])
def test_each_channel_turns_with_the_position_on_its_axis(pairs: bool) -> None:
    """Five tokens in two rows; four pairs of channels on the axes of time, height, width, and time again."""
    made: Any = object.__new__(MRope)
    torch.nn.Module.__init__(made)
    made.inverse, made.axes = torch.tensor([1.0, 0.5, 0.25, 0.125]), torch.tensor([0, 1, 2, 0])
    made.pairs, made.plain = pairs, lambda length: length
    made.positions = torch.arange(30).view(3, 2, 5)
    angles = made(7)
    assert angles.shape == (5, 2, 1, 8)
    expected = [[10 * axis + 5 * 1 + 3 for axis in (0, 1, 2, 0)][i] / 2**i for i in range(4)]
    order = [0, 0, 1, 1, 2, 2, 3, 3] if pairs else [0, 1, 2, 3] * 2
    assert angles[3, 1, 0].tolist() == [expected[i] for i in order]
    assert made(7) == 7, "without positions Megatron's own"


def test_layers_that_share_keys_have_slices_one_behind_the_other() -> None:
    """Layer 1 has two groups of 3 and 2 channels on a rank, layer 2 one of 5 and 4."""
    sizes = {1: (4, 3, 2), 2: (2, 5, 4)}
    sources = {4: 1, 5: 2, 6: 1}

    def of_layer(layer: int) -> Any:
        groups, keys, values = sizes[layer]
        attention = SimpleNamespace(num_query_groups=groups, kv_channels=keys, value_width=values)
        return SimpleNamespace(attention=attention)

    config: Any = SimpleNamespace(num_layers=7, layout=SimpleNamespace(tp=2), layer_config=of_layer)
    config.kv_source_layer = sources.get
    assert _slices(config) == {1: ContextSlice(0, 6, 4, 2), 2: ContextSlice(10, 5, 4, 1)}
