"""A run says how far it moves biases of experts where chances are small beside the default, and what moves none."""

import logging
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config import TrainingArguments
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_models.megatron import platform
from mca_models.megatron.factory.transformer_config import transformer_config
from mca_train.trainer import unused_options
from mca_train.trainer.unused_options import warn_router_bias_step, warn_unused_options

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
    ("score", "given", "rate", "trained", "reported"),
    [
        ("softmax", None, 1e-3, True, 1),
        ("softmax", 1e-3, 1e-3, True, 0),
        ("softmax", None, 0.0, True, 0),  # an adapter
        ("softmax", None, 1e-3, False, 0),
        ("sigmoid", None, 1e-3, True, 0),
    ],
)
def test_the_default_is_told_beside_chances(
    score: Any,
    given: float | None,
    rate: float,
    trained: bool,
    reported: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = McaModelConfig.from_fields(
        model_type="longcat_flash",
        num_moe_experts=512,
        moe_identity_experts=256,
        moe_router_score_function=score,
        moe_router_enable_expert_bias=True,
        **SIZES,
    )
    args, megatron = (SimpleNamespace(moe_router_bias_update_rate=each) for each in (given, rate))
    with caplog.at_level(logging.WARNING, logger="mca_train"):
        warn_router_bias_step(args, config, megatron, trained=trained)
    assert len(caplog.messages) == reported
    assert all("is 0.001" in line and "768 experts is 0.0013" in line for line in caplog.messages)


KIND = {"moe_router_load_balancing_type": "seq_aux_loss"}
MOVING = {"moe_router_bias_update_rate": 0.3}


@pytest.mark.parametrize(
    ("asked", "coefficient", "trained", "reported"),
    [
        (
            KIND,
            0.0,
            True,
            "moe_router_load_balancing_type seq_aux_loss (config.json has no such loss, so its coefficient is 0; "
            "set moe_aux_loss_coeff)",
        ),
        (KIND, 0.1, True, None),
        (KIND | {"moe_aux_loss_coeff": 0.1}, 0.0, True, None),
        (KIND | {"moe_aux_loss_coeff": 0.0}, 0.0, True, None),
        (MOVING, 0.0, True, None),
        (
            MOVING,
            0.0,
            False,
            "moe_router_bias_update_rate (routers are frozen, including expert biases)",
        ),
        ({}, 0.0, False, None),
    ],
)
def test_what_balances_no_experts_is_told(
    asked: dict[str, Any],
    coefficient: float,
    trained: bool,
    reported: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    platform.prepare()
    config = McaModelConfig.from_fields(
        model_type="glm4_moe",
        num_moe_experts=4,
        moe_ffn_hidden_size=8,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_aux_loss_coeff=coefficient,
        **SIZES,
    )
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **asked)
    megatron = transformer_config(config, args, config.layout, "float32")
    with caplog.at_level(logging.WARNING, logger="mca_train"):
        warn_unused_options(args, config, megatron, trains_routers=trained)
    assert caplog.messages == ([] if reported is None else [f"without effect in this run: {reported}"])


def test_saved_activations_are_not_distributed_over_one_tensor_rank() -> None:
    config: Any = SimpleNamespace(moe=None, layout=ParallelLayout(context_parallel_size=2))
    args: Any = SimpleNamespace(transformer_config_overrides=dict)
    megatron: Any = SimpleNamespace(mtp_num_layers=None, sequence_parallel=False)
    groups = islice(unused_options._groups(args, config, megatron), 5)
    reasons = [reason for reason, _ in groups]
    assert reasons[3:] == ["one pipeline stage", "one tensor rank"]
