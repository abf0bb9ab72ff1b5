"""Sizes of one rank's micro-batch from arguments, and the memory of logits, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_train.plan.chunks import PassMemory, _chunked, _whole_logits
from mca_train.plan.sizes import Sizes

DENSE: dict[str, Any] = {
    **{"model_type": "llama", "num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 16, "vocab_size": 9},
    **{"num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 2, "max_position_embeddings": 64},
}
LATENT = {"kv_lora_rank": 4, "qk_head_dim": 2, "qk_pos_emb_head_dim": 2, "v_head_dim": 2}
SPLIT = {"tensor_model_parallel_size": 2}


def sizes_of(config: dict[str, Any] | None = None, layout: Any = None, **more: Any) -> Sizes:
    """Return the sizes of 3 samples of 16 tokens in bf16."""
    arguments = {"bf16": True, "fp8": None, "fp8_recipe": None, "per_device_train_batch_size": 3}
    arguments |= {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": None}
    arguments |= {"attention_backend": None, "bias_activation_fusion": None, "sequence_parallel": None}
    arguments |= {name: more.pop(name) for name in [*more] if name in arguments}
    model = McaModelConfig.from_fields(**DENSE | (config or {}), layout=ParallelLayout(**layout or {}))
    return Sizes.for_training(model, SimpleNamespace(**arguments), 16, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({}, {"sequences": 3, "length": 16, "tokens": 48, "split": 48, "frozen": False}),
        ({"micro_batch": 2}, {"sequences": 2, "tokens": 32}),
        ({"micro_batch": 2, "sequences": 2}, {"sequences": 4, "tokens": 64}),
        ({"layout": {"context_parallel_size": 2}}, {"length": 8, "tokens": 24}),
        ({"layout": SPLIT}, {"tokens": 48, "split": 48}),
        ({"layout": SPLIT, "sequence_parallel": True}, {"tokens": 48, "split": 24, "is_split": True}),
        ({"layout": SPLIT, "config": LATENT}, {"split": 24}),
        ({"layout": SPLIT, "config": LATENT, "sequence_parallel": False}, {"split": 48, "is_split": False}),
        ({"sequence_parallel": True}, {"split": 48, "is_split": False}),
        ({}, {"width": 2, "gemm_input_width": 2, "projection_input_width": 2}),
        ({"bf16": False}, {"width": 4, "gemm_input_width": 4, "projection_input_width": 4}),
        ({"fp8": "hybrid"}, {"width": 2, "gemm_input_width": 1, "projection_input_width": 1}),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, {"gemm_input_width": 1, "projection_input_width": 1}),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, {"gemm_input_width": 1, "projection_input_width": 2}),
        (
            {"fp8": "hybrid", "frozen": True},
            {"gemm_input_width": 2, "projection_input_width": 2, "frozen": True},
        ),
        ({"config": {"attention_dropout": 0.25}}, {"has_attention_matrix": True}),
        ({"config": {"attention_dropout": 0.25}, "on_gpu": True}, {"has_attention_matrix": False}),
        (
            {},
            {
                "has_attention_matrix": False,
                "mca_attention": False,
                "fused_activation": True,
                "padded": False,
            },
        ),
        ({"attention_backend": "local"}, {"mca_attention": True}),
        ({"attention_backend": "flash"}, {"mca_attention": False}),
        ({"config": {"attn_logit_softcapping": 3.0}}, {"mca_attention": True}),
        ({"bias_activation_fusion": False}, {"fused_activation": False}),
        ({"bias_activation_fusion": True}, {"fused_activation": True}),
        ({"config": {"hidden_act": "gelu"}}, {"fused_activation": False}),
        ({"moe_expert_capacity_factor": 1.5}, {"capacity": 1.5, "padded": False, "moe": None}),
        ({"moe_pad_expert_input_to_capacity": True}, {"padded": True}),
        ({}, {"rms": True}),
        ({"config": {"normalization": "LayerNorm"}}, {"rms": False}),
    ],
)
def test_sizes_follow_from_the_arguments(case: dict[str, Any], expected: dict[str, Any]) -> None:
    found = sizes_of(**case)
    assert {name: getattr(found, name) for name in expected} == expected


def logits(
    width: int = 2, *, tokens: int = 7, frozen: bool = False, cap: float | None = None, **more: Any
) -> Any:
    """Return a model with 11 rows of the vocabulary on this rank, and 5 hidden channels."""
    training = {
        "cross_entropy_loss_fusion": False,
        "cross_entropy_fusion_impl": "te",
        "loss_chunk_size": None,
    }
    head = SimpleNamespace(num_labels=None, final_logit_softcapping=cap)
    layout = SimpleNamespace(tp=2)
    return SimpleNamespace(
        config=SimpleNamespace(head=head, padded_vocab_size=22, hidden_size=5),
        sizes=SimpleNamespace(tokens=tokens, width=width, frozen=frozen, layout=layout),
        training=SimpleNamespace(**training | more),
    )


FUSED = {"cross_entropy_loss_fusion": True}


@pytest.mark.parametrize(
    ("case", "kept", "forward", "backward"),
    [
        ({"width": 4}, 7 * 11 * 4, 0, (11 + 7) * 5 * 4),
        ({"width": 4, "frozen": True}, 7 * 11 * 4, 0, 7 * 5 * 4),
        ({"width": 4, "cap": 3.0}, 2 * 7 * 11 * 4, 0, (11 + 7) * 5 * 4),
        ({}, 7 * 11 * 4, 7 * 11 * 2, 7 * 11 * 2),
        ({"cap": 3.0}, 7 * 11 * (4 + 2), 7 * 11 * 2, 7 * 11 * 2),
        ({"tokens": 1}, 11 * 4, 11 * 2, (11 + 1) * 5 * 2 - 11 * 2),  # gradients, when the softmax is freed
        ({"tokens": 1, "frozen": True}, 11 * 4, 11 * 2, 11 * 2),
        (FUSED, 7 * 11 * 2, 0, (11 + 7) * 5 * 2),
        ({**FUSED, "cap": 3.0, "frozen": True}, 2 * 7 * 11 * 2, 0, 7 * 5 * 2),
        ({**FUSED, "cross_entropy_fusion_impl": "native"}, 7 * 11 * 4, 7 * 11 * 2, 7 * 11 * 2),
    ],
)
def test_whole_logits_and_their_softmax(case: dict[str, Any], kept: int, forward: int, backward: int) -> None:
    assert _whole_logits(logits(**case)) == PassMemory(kept, forward, backward)


@pytest.mark.parametrize(
    ("case", "forward", "matrices"),
    [
        ({"loss_chunk_size": 4}, 4 * 11 * 6, None),
        ({"loss_chunk_size": 2}, 2 * 11 * 6, 3),  # one for all chunks, one of this chunk, and their sum
        ({"loss_chunk_size": 7}, 7 * 11 * 6, None),
        ({"loss_chunk_size": 9}, 7 * 11 * 6, None),
        ({"loss_chunk_size": 1, "tokens": 1}, 11 * 6, None),
        ({"loss_chunk_size": 4, "frozen": True}, 4 * 11 * 6, 0),
        ({"loss_chunk_size": 4, "cap": 3.0}, 4 * 11 * 8, None),
        ({"loss_chunk_size": 4, "width": 4}, 4 * 11 * 4, 3),
        ({"loss_chunk_size": 4, "width": 4, "cap": 3.0}, 4 * 11 * 8, 3),
    ],
)
def test_chunked_logits(case: dict[str, Any], forward: int, matrices: int | None) -> None:
    """The peak is the gradient of the matrix next to a chunk's logits, or three such gradients."""
    matrix = 11 * 5 * case.get("width", 2)
    backward = forward + matrix if matrices is None else matrices * matrix or forward
    assert _chunked(logits(**case)) == PassMemory(0, forward, backward)
