"""Changes to attention, MLPs, experts and residual streams, on stand-ins for Megatron's modules, by hand."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mca_models.megatron.features.attention import with_clipped_qkv
from mca_models.megatron.features.block import (
    SharedNorm,
    _scale_output,
    connect_parallel_blocks,
    connect_residuals,
    second_norm,
)
from mca_models.megatron.features.identity_experts import (
    router_with_identity_experts,
    with_identity_experts,
)
from mca_models.megatron.features.mlp import scaled_activation
from mca_models.megatron.features.moe import _add_post_norms, latent_projections
from mca_models.megatron.features.moe_with_dense_mlp import with_dense_mlp
from mca_models.megatron.features.norms import (
    PerHeadKeyNorm,
    PerHeadNorm,
    PostRopeNorm,
    PostRopeNormWithoutWeight,
    normalise_after_rope,
)
from mca_models.megatron.features.routers import unnormalized_sigmoid_router, with_shared_expert_mean
from mca_models.megatron.features.shared_kv import ContextSlice, _share
from mca_models.megatron.features.shortcut_moe import with_separate_experts, with_shortcut
from mca_models.megatron.layers.norm import Norm
from mca_models.megatron.layers.sharded import ReplicatedLinear

HIDDEN, EPSILON = 4, 1e-5


def megatron(**more: Any) -> Any:
    plain = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "sequence_parallel": False}
    plain |= {"params_dtype": torch.float32, "layernorm_epsilon": EPSILON, "hidden_size": HIDDEN}
    return SimpleNamespace(**plain | {"tensor_model_parallel_size": 1} | more)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def normal(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)


def test_queries_keys_and_values_are_clipped_and_a_gate_is_not() -> None:
    class Attention:
        """Attention with four tensors."""

        def get_query_key_value_tensors(self) -> tuple[Tensor, ...]:
            """Return them."""
            return tuple(torch.tensor([-9.0, factor, 9.0]) for factor in range(4))

    found = with_clipped_qkv(Attention, 2.0)().get_query_key_value_tensors()
    assert [x.tolist() for x in found] == [[-2, 0, 2], [-2, 1, 2], [-2, 2, 2], [-9, 3, 9]]


@pytest.mark.parametrize("two_norms", [False, True])
def test_an_mlp_parallel_to_attention_reads_its_input_once(two_norms: bool) -> None:
    first = Norm(megatron(), HIDDEN, EPSILON)
    second: Any = (
        second_norm(Norm)(megatron(), HIDDEN, EPSILON) if two_norms else SharedNorm(megatron(), HIDDEN)
    )
    torch.nn.init.constant_(first.weight, 3.0)
    layer = SimpleNamespace(input_layernorm=first, pre_mlp_layernorm=second)
    connect_parallel_blocks(SimpleNamespace(decoder=SimpleNamespace(layers=[layer])))  # type: ignore[arg-type]
    x, after = drawn(3, HIDDEN), drawn(3, 1, HIDDEN)
    output = first(x)
    torch.testing.assert_close(second(after), normal(x) if two_norms else output)
    torch.testing.assert_close(second(after), normal(after) if two_norms else after)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_residual_stream_through_norms_has_the_factors_of_its_layer(has_bias: bool) -> None:
    def add(training: bool, fused: bool) -> Any:
        assert (training, fused) == (True, False)
        return lambda pair, residual, dropout: (
            pair[0] + (0 if pair[1] is None else pair[1]) + residual + dropout
        )

    def layer(number: int) -> Any:
        norms = {name: torch.nn.Hardtanh(-9, 9) for name in ("input_layernorm", "pre_mlp_layernorm")}
        return SimpleNamespace(layer_number=number, self_attn_bda=add, mlp_bda=add, **norms)

    layers = [layer(1), layer(2)]
    block = {"attention_residual_factors": (2.0, 3.0), "attention_output_factors": (5.0, 7.0)}
    block |= {"mlp_residual_factor": 11.0, "mlp_output_factor": 13.0}  # type: ignore[dict-item]
    config: Any = SimpleNamespace(block=SimpleNamespace(**block))
    connect_residuals(SimpleNamespace(decoder=SimpleNamespace(layers=layers)), config)  # type: ignore[arg-type]
    bias = torch.tensor(0.5) if has_bias else None
    for each, (kept, added) in zip(layers, ((2, 5), (3, 7)), strict=True):
        for norm, bda, pair in (
            (each.input_layernorm, each.self_attn_bda, (kept, added)),
            (each.pre_mlp_layernorm, each.mlp_bda, (11, 13)),
        ):
            norm(torch.tensor(100.0))  # gives 9
            out = bda(True, False)((torch.tensor(4.0), bias), torch.tensor(1000.0), 0.25)
            assert out == pair[0] * 9 + pair[1] * (4.5 if has_bias else 4) + 0.25


class Experts(torch.nn.Module):
    """An MoE layer whose experts give a tenth, and whose shared expert gives a hundredfold."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config, self.sent = config, ()
        self.token_dispatcher: Any = SimpleNamespace()

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the router's input as weights."""
        return hidden, torch.ones(1)

    def preprocess(self, hidden: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        """Return what is sent."""
        self.sent = args  # type: ignore[assignment]
        return hidden, *args

    def shared_experts_compute(self, hidden: Tensor) -> Tensor:
        """Return the shared expert's output."""
        return hidden * 100

    def postprocess(self, output: Tensor, shared: Tensor | None) -> Tensor:
        """Return the sum."""
        return output if shared is None else output + shared

    def forward(self, hidden: Tensor) -> Any:
        """Return the output of experts, and of the shared expert if it is computed here."""
        return self.postprocess(hidden / 10, self.shared_experts_compute(hidden)), None


def test_identity_experts_return_a_tokens_share_on_its_rank() -> None:
    layer = with_identity_experts(Experts, 2)()
    hidden, weights = drawn(3, 1, HIDDEN), drawn(3, 5).abs()
    routes = weights > 0.5
    sent = layer.preprocess(hidden, weights, routes)
    assert torch.equal(sent[0], hidden) and torch.equal(sent[1], weights[:, :3])
    assert torch.equal(sent[2], routes[:, :3]) and sent[1].is_contiguous() and sent[2].is_contiguous()
    share = (weights[:, 3] + weights[:, 4]).view(3, 1, 1)
    torch.testing.assert_close(layer.postprocess(hidden * 10, None), hidden * 10 + hidden * share)
    torch.testing.assert_close(layer.postprocess(hidden, hidden), hidden * 2)  # a pass without a choice
    half = layer.preprocess(hidden.bfloat16(), weights, routes)[0]
    assert half.dtype == layer.identity.dtype == torch.bfloat16


def test_a_router_chooses_among_identity_experts_too() -> None:
    class Router:
        """Router that keeps its configuration."""

        def __init__(self, config: Any) -> None:
            self.config = config

    config = SimpleNamespace(num_moe_experts=3)
    assert router_with_identity_experts(Router, 2)(config).config.num_moe_experts == 5
    assert config.num_moe_experts == 3


def test_tokens_for_identity_experts_are_not_counted_as_sent() -> None:
    class Dispatching(Experts):
        """Experts with an all-to-all dispatcher."""

        def __init__(self) -> None:
            super().__init__()
            self.token_dispatcher = SimpleNamespace(preprocess=lambda routes: routes.sum(0), num_out_tokens=6)

    dispatcher = with_identity_experts(Dispatching, 2)().token_dispatcher
    routes = torch.tensor([[True, True], [False, True], [False, False]])
    assert dispatcher.preprocess(routes).tolist() == [1, 2] and dispatcher.num_out_tokens == 3


def test_experts_parallel_to_an_mlp_have_norms_and_scales_of_their_own() -> None:
    layer = with_dense_mlp(Experts)(megatron(num_moe_experts=3))
    names = ("dense_layernorm", "dense_post_layernorm", "experts_layernorm", "experts_post_layernorm")
    for name, factor in zip(names, (2.0, 3.0, 5.0, 7.0), strict=True):
        torch.nn.init.constant_(getattr(layer, name).weight, factor)
    x = drawn(3, 1, HIDDEN)
    torch.testing.assert_close(layer.shared_experts_compute(x), 3 * normal(200 * normal(x)))
    torch.testing.assert_close(layer.preprocess(x)[0], 5 * normal(x))
    torch.testing.assert_close(layer.postprocess(x, x + 1), 7 * normal(x) + x + 1)
    assert layer.router_scale.tolist() == [1] * HIDDEN and layer.expert_scale.tolist() == [1] * 3
    layer.router_scale, layer.expert_scale = (torch.nn.Parameter(drawn(HIDDEN)) for _ in range(2))
    weights, mask = layer.route(x)
    torch.testing.assert_close(weights, normal(x) * layer.router_scale * HIDDEN**-0.5 * layer.expert_scale)
    assert mask.tolist() == [1]
    assert not with_dense_mlp(Experts)(megatron(num_moe_experts=3)).router_scale.sequence_parallel
    assert with_dense_mlp(Experts)(
        megatron(num_moe_experts=3, sequence_parallel=True)
    ).expert_scale.sequence_parallel


def test_an_mlp_and_its_experts_can_be_added_apart() -> None:
    x = drawn(3, 1, HIDDEN)
    dense, routed = with_separate_experts(Experts)()(x)
    torch.testing.assert_close(dense, 100 * x)
    torch.testing.assert_close(routed, x / 10)


@pytest.mark.parametrize("training", [False, True])
def test_the_second_layer_of_a_pair_adds_the_experts_of_the_first(training: bool) -> None:
    class Layer(torch.nn.Module):
        """Layer with an MLP and experts, or an MLP alone."""

        hidden_dropout = 1.0
        routed_output: Tensor | None = None

        def forward(self, x: Tensor) -> Any:
            """Return the output, and nothing else."""
            return self._forward_post_mlp((x * 2, self.routed_output), x), None

        def _forward_post_mlp(self, outputs: Any, residual: Tensor) -> Tensor:
            assert outputs[1] is None
            return outputs[0] + residual

    first, second = (with_shortcut(Layer)().train(training) for _ in range(2))
    x = drawn(2, HIDDEN)
    first.routed_output = x * 10
    hidden, waiting = first(x)
    torch.testing.assert_close(hidden, x * 3)
    torch.testing.assert_close(waiting, x * (0 if training else 10))
    assert first.routed is None
    added, nothing = second(hidden, context=waiting)
    torch.testing.assert_close(added, x * 9 + waiting)
    assert nothing is None


def test_shared_and_routed_experts_are_averaged() -> None:
    x = drawn(2, HIDDEN)
    torch.testing.assert_close(with_shared_expert_mean(Experts)().postprocess(x, x * 3), x * 2)


def test_a_sigmoid_router_weighs_experts_by_their_scores() -> None:
    class Router:
        """Router that divides scores by their sum."""

        router_replay: Any = None

        def routing(self, scores: Tensor, *, choose: bool = True) -> tuple[Tensor, Tensor]:
            """Return weights and numbers of the chosen experts."""
            if not choose:
                return scores, scores
            values, chosen = self.router_replay.get_replay_topk(scores, 2)
            return values / values.sum(-1, keepdim=True), chosen

    router, scores = unnormalized_sigmoid_router(Router)(), torch.tensor([[0.1, 0.9, 0.5], [0.2, 0.3, 0.1]])
    weights, chosen = router.routing(scores)
    torch.testing.assert_close(weights, torch.tensor([[0.9, 0.5], [0.3, 0.2]]))
    assert chosen.tolist() == [[1, 2], [1, 0]]
    with pytest.raises(RuntimeError, match="weighed without being chosen"):
        router.routing(scores, choose=False)


@pytest.mark.parametrize(("norm", "heads"), [(PerHeadNorm, 4), (PerHeadKeyNorm, 2)])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_each_head_of_a_rank_has_weights_of_its_own(norm: Any, heads: int, normalization: str) -> None:
    sizes = {"num_attention_heads": 4, "num_query_groups": 2, "normalization": normalization}
    assert norm(megatron(**sizes, tensor_model_parallel_size=2), 3).weight.shape == (heads * 3 // 2,)
    made, x = norm(megatron(**sizes), 3, EPSILON), drawn(5, 1, heads, 3)
    weight = drawn(heads * 3)
    made.weight = torch.nn.Parameter(weight)
    centred = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
    torch.testing.assert_close(made(x), normal(centred) * weight.view(heads, 3))
    assert made(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("skips", [None, (0, 1)])
@pytest.mark.parametrize("has_weight", [False, True])
def test_queries_and_keys_are_normalized_behind_rope_in_layers_that_have_it(
    skips: Any, has_weight: bool
) -> None:
    class Core(torch.nn.Module):
        """Attention that returns what it gets."""

        def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
            """Return it."""
            return args

    def attention() -> Any:
        norms = [
            (PostRopeNorm if has_weight else PostRopeNormWithoutWeight)(megatron(), HIDDEN, EPSILON)
            for _ in "qk"
        ]
        for factor, each in enumerate(norms, 2):
            if has_weight:
                torch.nn.init.constant_(each.weight, float(factor))
        return SimpleNamespace(core_attention=Core(), q_layernorm=norms[0], k_layernorm=norms[1])

    layers = [SimpleNamespace(layer_number=n, self_attention=attention()) for n in (1, 2)]
    normalise_after_rope(SimpleNamespace(decoder=SimpleNamespace(layers=layers)), skips)  # type: ignore[arg-type]
    query, key, value = (drawn(3, 1, HIDDEN) + n for n in range(3))
    assert layers[0].self_attention.q_layernorm(query) is query
    for layer, changed in zip(layers, (True, skips is None), strict=True):
        found = layer.self_attention.core_attention(query, key, value)
        factors = (2, 3) if has_weight else (1, 1)
        expected = (factors[0] * normal(query), factors[1] * normal(key)) if changed else (query, key)
        torch.testing.assert_close(found, (*expected, value))


def test_moe_layers_alone_have_a_norm_behind_them() -> None:
    layers = [SimpleNamespace(layer_number=n, mlp=Experts()) for n in (1, 2)]
    config: Any = SimpleNamespace(is_moe_layer=lambda layer: layer == 1)
    _add_post_norms(SimpleNamespace(decoder=SimpleNamespace(layers=layers), config=megatron()), config)  # type: ignore[arg-type]
    x = drawn(3, 1, HIDDEN)
    torch.testing.assert_close(layers[0].mlp(x)[0], 100.1 * x)
    torch.testing.assert_close(layers[1].mlp(x)[0], normal(100.1 * x))


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("before", [{}, {"HAVE_TE": False, "TELinear": None}])
def test_local_experts_with_latent_projections_are_built_as_transformer_engines(
    implementation: Any, before: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.moe import moe_layer

    module, names = sys.modules[moe_layer.__name__], ("HAVE_TE", "TELinear")
    for name in names:
        monkeypatch.delattr(module, name, raising=False)
        if name in before:
            monkeypatch.setattr(module, name, before[name], raising=False)
    during = {"HAVE_TE": True, "TELinear": ReplicatedLinear} if implementation == "local" else before
    context: Any = SimpleNamespace(implementation=implementation)
    with pytest.raises(KeyError), latent_projections(context, megatron()):
        assert {name: getattr(module, name) for name in names if hasattr(module, name)} == during
        raise KeyError
    assert {name: getattr(module, name) for name in names if hasattr(module, name)} == before


def test_an_activation_has_factors_on_its_gate_and_its_output() -> None:
    assert scaled_activation(torch.exp, None) is torch.exp
    torch.testing.assert_close(
        scaled_activation(torch.exp, (2.0, 3.0))(torch.tensor(1.5)), 3 * torch.tensor(3.0).exp()
    )


def test_a_layers_output_has_its_factor() -> None:
    layer: Any = SimpleNamespace(layer_scalar=torch.tensor([3.0]))
    hidden, context = _scale_output(layer, (), (torch.ones(2), torch.ones(1)))
    assert hidden.tolist() == [3, 3] and context is not None and context.tolist() == [1]


def test_keys_and_values_of_layers_are_passed_on_one_behind_the_other() -> None:
    def layer(first: float) -> Any:
        shared = (
            torch.arange(first, first + 4).view(1, 1, 2, 2),
            torch.arange(first + 4, first + 6).view(1, 1, 2, 1),
        )
        return SimpleNamespace(self_attention=SimpleNamespace(shared_kv=shared))

    one, other, hidden = layer(0), layer(10), torch.ones(1)
    output, context = _share(one, (), (hidden, None))
    assert output is hidden and context.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    _, context = _share(other, (), (hidden, context))
    assert context.flatten().tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    assert one.self_attention.shared_kv is None
    key, value = ContextSlice(start=6, keys=4, values=2, groups=2).read(context)
    assert (key.tolist(), value.tolist()) == ([[[[10, 11], [12, 13]]]], [[[[14], [15]]]])
