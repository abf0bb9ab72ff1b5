"""A run says how far it moves biases of experts, where chances are small beside the default."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.model_config import McaModelConfig
from mca_train.trainer.expert_biases import tell_moving_biases

SIZES: dict[str, Any] = {
    **{
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 8,
        "num_attention_heads": 1,
        "num_query_groups": 1,
    },
    **{"kv_channels": 8, "vocab_size": 8, "max_position_embeddings": 8},
}


@pytest.mark.parametrize(
    ("score", "given", "rate", "told"),
    [
        ("softmax", None, 1e-3, 1),
        ("softmax", 1e-3, 1e-3, 0),
        ("softmax", None, 0.0, 0),  # an adapter
        ("sigmoid", None, 1e-3, 0),
    ],
)
def test_the_default_is_told_beside_chances(
    score: Any, given: float | None, rate: float, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = McaModelConfig(
        model_type="longcat_flash",
        num_moe_experts=512,
        moe_identity_experts=256,
        moe_router_score_function=score,
        moe_router_enable_expert_bias=True,
        **SIZES,
    )
    args, megatron = (SimpleNamespace(moe_router_bias_update_rate=each) for each in (given, rate))
    with caplog.at_level(logging.WARNING, logger="mca_train"):
        tell_moving_biases(args, config, megatron)
    assert len(caplog.messages) == told
    assert all("by 0.001" in line and "768 experts is 0.0013" in line for line in caplog.messages)
