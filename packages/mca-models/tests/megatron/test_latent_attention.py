"""Additions of mca to Megatron's MLA: factors, a gate for each head, and the parameters of its RoPE, by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.mla import (
    _mla_mscale,
    _mla_rope,
    with_latent_head_gate,
    with_mla_multipliers,
    with_plain_query,
)

NOPE, ROTATED, HEADS, HIDDEN = 2, 1, 4, 6
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
SCALED = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}


class Attention(torch.nn.Module):
    """An attention whose output is its queries."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.pg_collection = config, SimpleNamespace(tp="tensor ranks")
        self.linear_proj = torch.nn.Identity()

    def get_query_key_value_tensors(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys, values, and what they are projected from."""
        each = torch.arange(1.0, 1 + HEADS * (NOPE + ROTATED)).view(1, 1, HEADS, -1) + hidden[..., :1, None]
        return each, 2 * each, 3 * each, hidden

    def forward(self, hidden: Tensor) -> Any:
        """Return the output of all heads."""
        return self.linear_proj(self.get_query_key_value_tensors(hidden)[0].flatten(-2))


class Column(torch.nn.Linear):
    """A linear of Megatron's form."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, bias=options["bias"])
        self.options = options

    def forward(self, x: Tensor) -> Any:
        """Return the product and no bias."""
        return super().forward(x), None


def config(**more: Any) -> Any:
    sizes = {"qk_head_dim": NOPE, "qk_pos_emb_head_dim": ROTATED, "num_attention_heads": HEADS}
    return SimpleNamespace(hidden_size=HIDDEN, init_method=None, **sizes, **more)


def hidden_states() -> Tensor:
    return torch.randn(5, 2, HIDDEN, generator=torch.Generator().manual_seed(1))


def test_queries_and_the_compressed_keys_and_values_have_their_factors() -> None:
    hidden = hidden_states()
    query, key, value, _ = Attention(config()).get_query_key_value_tensors(hidden)
    found = with_mla_multipliers(Attention, 5.0, 7.0)(config()).get_query_key_value_tensors(hidden)
    torch.testing.assert_close(found[0][..., :NOPE], query[..., :NOPE] * 35)
    torch.testing.assert_close(found[0][..., NOPE:], query[..., NOPE:] * 5)
    assert torch.equal(found[1], key) and torch.equal(found[2], value * 7) and found[3] is hidden


def test_each_head_has_a_gate_of_the_layers_input() -> None:
    plain, gated = Attention(config()), with_latent_head_gate(Attention, Column)(config())
    linear, hidden = gated.linear_head_gate, hidden_states()
    assert linear.options == {
        "config": gated.config,
        "init_method": None,
        "gather_output": False,
        "bias": False,
        "skip_bias_add": False,
        "is_expert": False,
        "tp_group": "tensor ranks",
    }
    for states in (hidden, hidden + 1):  # a second pass has its own gates
        heads = plain(states).unflatten(-1, (HEADS, -1))
        expected = heads * torch.sigmoid(states @ linear.weight.T).unsqueeze(-1)
        torch.testing.assert_close(gated(states), expected.flatten(-2))
        assert gated.gate is None


@pytest.mark.parametrize("norm", [None, "RMSNorm"])
def test_queries_that_are_not_compressed_have_no_norm(norm: str | None) -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    own = SimpleNamespace(linear_q_proj="q", linear_q_up_proj="up", linear_kv_up_proj="kv", kv_layernorm=norm)
    resolved = with_plain_query(Attention)(config())._resolve_qk_norm_config(own)
    assert resolved == {
        "linear_q_proj": "q",
        "linear_q_up_proj": IdentityOp,
        "linear_kv_up_proj": "kv",
        "q_layernorm": IdentityOp,
        "kv_layernorm": norm or IdentityOp,
    }


@pytest.mark.parametrize("on_rope", [1.0, 0.8, 1.7])
@pytest.mark.parametrize("score_scale", [0.0, 0.7])
@pytest.mark.parametrize("factor", [1.5, 40.0])
def test_megatron_computes_the_factor_on_rotated_channels_from_mscale(
    on_rope: float, score_scale: float, factor: float
) -> None:
    mscale = _mla_mscale(on_rope, factor, score_scale)
    made = (0.1 * mscale * math.log(factor) + 1) / (0.1 * score_scale * math.log(factor) + 1)
    assert made == pytest.approx(on_rope)


def test_a_context_that_is_not_longer_has_no_factor() -> None:
    assert _mla_mscale(1.0, 1.0, 0.7) == 1.0
    with pytest.raises(McaError, match=r"attention_factor 1.2 and factor 1.0 is not supported; .* above 1"):
        _mla_mscale(1.2, 1.0, 0.0)


@pytest.mark.parametrize(
    ("rope", "settings"),
    [
        (None, PLAIN),
        ({"rope_type": "linear", "factor": 2.0}, PLAIN),
        (YARN, SCALED),
        ({**YARN, "factor": None}, {**SCALED, "rotary_scaling_factor": 8.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2},
            {**SCALED, "original_max_position_embeddings": 128, "beta_fast": 16, "beta_slow": 2},
        ),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, {**SCALED, "mscale": 1.0, "mscale_all_dim": 1.0}),
    ],
)
def test_megatrons_settings_of_rope(rope: dict[str, Any] | None, settings: dict[str, Any]) -> None:
    sizes = {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 9}
    heads = {"num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 16, "kv_lora_rank": 16}
    heads |= {"qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    both = {"rotary_base": 500.0, "rotary_percent": 1.0}
    model = McaModelConfig.from_fields(
        model_type="deepseek_v3", max_position_embeddings=128, rope_scaling=rope, **sizes, **heads, **both
    )
    found = _mla_rope(model)
    assert found == pytest.approx(both | settings) if rope is None else found.keys() == {*both, *settings}
    assert {name: found[name] for name in settings} == {
        name: value if isinstance(value, str) else pytest.approx(value) for name, value in settings.items()
    }


def test_scores_of_a_rope_other_than_yarn_are_not_scaled() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}
    own: Any = SimpleNamespace(rope=SimpleNamespace(rope_scaling=rope, rotary_base=1.0, rotary_percent=1.0))
    with pytest.raises(McaError, match="mscale_all_dim with rope_type 'linear' with MLA is not supported"):
        _mla_rope(own)
