"""Errors about configurations that would be computed wrongly, on the affected versions and devices."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.arguments import DistributingParallelArguments, MegatronArguments
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_models.megatron import platform
from mca_models.megatron.factory.limits import require_supported
from mca_models.megatron.factory.transformer_config import (
    Target,
    layout_settings,
    pipeline_settings,
    transformer_config,
)
from mca_models.megatron.features.feature import Setup
from mca_models.megatron.features.features import active_features
from mca_models.megatron.log_probs.forward import _require_packs
from mca_models.megatron.names import Implementation

V16, V17, V18, V19 = (0, 16, 1), (0, 17), (0, 18), (0, 19, 2)
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
DENSE = McaModelConfig.from_fields(model_type="llama", **SIZES)
MOE = McaModelConfig.from_fields(model_type="qwen3_moe", num_moe_experts=4, **SIZES)
MLA = McaModelConfig.from_fields(
    model_type="deepseek_v3",
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
    **SIZES,
)
GROUPED = MOE.replace_fields(
    model_type="deepseek_v3",
    moe_router_score_function="sigmoid",
    moe_router_num_groups=2,
    moe_router_group_topk=1,
    moe_router_topk=3,
)
SHORTCUT = MOE.replace_fields(
    moe_shortcut=True,
    moe_identity_experts=2,
    moe_router_enable_expert_bias=True,
    moe_router_pre_softmax=True,
)
WITH_DENSE_MLP = MOE.replace_fields(moe_parallel_dense_mlp=True)
CHANCES = MOE.replace_fields(moe_router_pre_softmax=True)
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}
INDEXED = MLA.replace_fields(q_lora_rank=8, index_topk=4, index_num_heads=2, index_head_dim=8)
PARALLEL = DENSE.replace_fields(parallel_block="one_norm")
NORMED = DENSE.replace_fields(
    normed_residual=True, attention_residual_factors=(1.0,) * 4, attention_output_factors=(1.0,) * 4
)
WINDOWED = DENSE.replace_fields(window_size=8)
YARN = DENSE.replace_fields(
    rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
)
INTERLEAVED = DENSE.replace_fields(rotary_interleaved=True)
CAPPED = DENSE.replace_fields(attn_logit_softcapping=2.0)
FUSED = {"bias_activation_fusion": True}
GELU = DENSE.replace_fields(hidden_act="gelu", gated_linear_unit=False)
CLAMPED = DENSE.replace_fields(activation_func_clamp_value=7.0)
SHARED = MOE.replace_fields(
    hidden_act="quick_gelu", glu_linear_offset=1.0, moe_shared_expert_intermediate_size=64
)
SINKS = DENSE.replace_fields(softmax_type="learnable")
TIED_PREDICTION = DENSE.replace_fields(mtp_num_layers=1, tie_word_embeddings=True)
BETWEEN = ParallelLayout(
    pipeline_model_parallel_size=3,
    virtual_pipeline_model_parallel_size=2,
    pipeline_model_parallel_layout="Et|t|t|t|m|L",
)
ENGINE: dict[str, Any] = {"implementation": "transformer_engine", "device": "cuda"}
HALF = ENGINE | {"bf16": True}
PACKED = HALF | {"packed": True}
CUDA = {"device": "cuda"}
FREEING = CUDA | {"overlap_p2p_comm": True, "deallocate_pipeline_outputs": True}
TE_ACTIVATION = ENGINE | {"use_te_activation_func": True}
OP_FUSER = ENGINE | {"use_transformer_engine_op_fuser": True}
TE_LOSS = HALF | {"cross_entropy_fusion_impl": "te"}
TP2 = ParallelLayout(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
VPP = ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
PP2 = ParallelLayout(pipeline_model_parallel_size=2)
UNEVEN = ParallelLayout(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=1)
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
CP2 = ParallelLayout(context_parallel_size=2)
CP4 = ParallelLayout(context_parallel_size=4)


def check(
    config: McaModelConfig,
    layout: ParallelLayout,
    *,
    device: str = "cpu",
    version: tuple[int, ...] = V16,
    implementation: Implementation = "local",
    engine: tuple[int, ...] | None = (2, 20, 2),
    packed: bool = False,
    **settings: Any,
) -> None:
    require_supported(
        Setup(
            config=config,
            features=active_features(config),
            layout=layout,
            settings=settings,
            implementation=implementation,
            device=device,
            version=version,
            engine=engine,
            packed=packed,
        )
    )


REFUSED: list[tuple[McaModelConfig, ParallelLayout, dict[str, Any], str]] = [
    (DENSE, VPP, {"batch_p2p_comm": True}, "virtual pipelining.*overlap_p2p_comm"),
    (
        DENSE,
        VPP,
        {"overlap_p2p_comm": True, "deallocate_pipeline_outputs": True},
        "deallocate_pipeline_outputs",
    ),
    (
        INDEXED,
        PP2,
        {"recompute_granularity": "selective"},
        "remove core_attn from recompute_modules",
    ),
    (
        INDEXED.replace_fields(rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
        PP2,
        {},
        "top-k attention with rope_type dynamic",
    ),
    (
        PARALLEL,
        PP2,
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        "remove layernorm from recompute_modules",
    ),
    (
        NORMED,
        PP2,
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        "remove layernorm from recompute_modules",
    ),
    (
        SHORTCUT,
        PP2,
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        "remove layernorm from recompute_modules",
    ),
    (SHORTCUT, TP2, {"moe_shared_expert_overlap": True}, "remove moe_shared_expert_overlap"),
    (DENSE.replace_fields(hidden_act="gelu"), TP2, FUSED, "no kernel for the MLPs"),
    (DENSE.replace_fields(hidden_act="quick_gelu"), TP2, FUSED, "no kernel for the MLPs"),
    (
        MOE.replace_fields(hidden_act="quick_gelu", moe_layer_freq=(0, 1, 1, 1)),
        TP2,
        FUSED,
        "no kernel for the MLPs",
    ),
    (DENSE.replace_fields(mlp_multipliers=(2.0, 1.0)), TP2, FUSED, "no kernel for the MLPs"),
    (SHORTCUT, TP2, {"moe_expert_capacity_factor": 1.0}, "remove moe_expert_capacity_factor"),
    (SHORTCUT, TP2, ENGINE | {"moe_token_dispatcher_type": "flex"}, "same number of experts"),
    (
        WITH_DENSE_MLP,
        TP2,
        ENGINE | {"moe_token_dispatcher_type": "flex"},
        "may be negative; use alltoall or allgather",
    ),
    (DENSE, VPP, {"overlap_p2p_comm": True, "batch_p2p_comm": True}, "remove overlap_p2p_comm and batch_p2p"),
    (DENSE, PP2, {"overlap_p2p_comm": True}, "virtual_pipeline_model_parallel_size of at least 2"),
    (DENSE, TP2, {"cpu_offloading": True}, "cpu_offloading needs transformer_impl transformer_engine"),
    (MOE, ParallelLayout(), {"moe_permute_fusion": True}, "moe_permute_fusion needs transformer_impl"),
    (DENSE, TP2, {"use_te_activation_func": True}, "use_te_activation_func needs transformer_impl"),
    (MOE, ParallelLayout(), {"moe_apply_probs_on_input": True}, "needs num_experts_per_tok 1"),
    (DENSE, TP2, {"attention_backend": "flash"}, "attention_backend flash needs transformer_impl"),
    *(
        (MLA, TP2, {"sequence_parallel": False, "version": version}, "set sequence_parallel")
        for version in (V16, V17, V18, V19)
    ),
    (
        GROUPED,
        ParallelLayout(),
        ENGINE | {"moe_router_fusion": True},
        "topk_group 1; remove moe_router_fusion",
    ),
    (
        SHORTCUT,
        ParallelLayout(),
        ENGINE | {"moe_router_fusion": True},
        "than qwen3_moe; remove moe_router_fusion",
    ),
    (CHANCES, ParallelLayout(), SINKHORN | {"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff to 0"),
    (MOE, ParallelLayout(), SINKHORN, "and qwen3_moe otherwise"),
    (GROUPED, ParallelLayout(), SINKHORN, "and deepseek_v3 otherwise"),
    (CHANCES.replace_fields(sparse_mixer_jitter=0.01), ParallelLayout(), SINKHORN, "and qwen3_moe otherwise"),
    (SHORTCUT, ParallelLayout(), SINKHORN, "and qwen3_moe otherwise"),
    (
        MOE,
        ParallelLayout(),
        {"moe_expert_capacity_factor": 2.5, "moe_pad_expert_input_to_capacity": True},
        "lower it to 2, or remove moe_pad_expert_input_to_capacity",
    ),
    (TIED_PREDICTION, BETWEEN, {"overlap_p2p_comm": True}, "into the stage of L"),
    (
        DENSE,
        ParallelLayout(),
        UNIFORM | {"mtp_num_layers": 1},
        "cannot recompute MTP layers 2 layers at",
    ),
    (DENSE, UNEVEN, UNIFORM, "cannot recompute the 3 layers of a pipeline stage 2 at a time"),
    (DENSE, TP2, {"gradient_accumulation_fusion": True}, "gradient_accumulation_fusion needs CUDA"),
    (DENSE, TP2, {"fp8": "hybrid"}, "fp8 needs CUDA"),
    (DENSE, TP2, ENGINE | {"tp_comm_overlap": True}, "tp_comm_overlap needs buffers"),
    (MOE, ParallelLayout(), {"moe_token_dispatcher_type": "flex"}, "use alltoall or allgather"),
    (DENSE, CP2, {"cp_comm_type": "p2p"}, "all_gather"),
    (CAPPED, CP2, {**HALF, "cp_comm_type": "p2p"}, "always mca's and"),
    (WINDOWED, CP2, HALF, "no sliding window"),
    (SINKS, CP2, {**HALF, "cp_comm_type": "a2a"}, "attention sinks"),
    (DENSE, CP4, {**HALF, "cp_comm_type": "a2a"}, "its 2 of keys and values"),
    (MLA, CP2, {**HALF, "cp_comm_type": "a2a"}, "not support MLA"),
    (DENSE, CP2, {**PACKED, "cp_comm_type": "all_gather", "engine": (2, 12, 0)}, "install 2.18 or later"),
    (DENSE, CP2, {**PACKED, "cp_comm_type": "a2a", "engine": (2, 8)}, "install 2.10 or later"),
    (DENSE, CP2, ENGINE, "no context parallelism in fp32"),
    (DENSE, TP2, ENGINE | {"fp8": "hybrid", "fp8_param": True}, "fp8_param is not supported"),
    (YARN, TP2, ENGINE | {"apply_rope_fusion": True}, "factor of rope_type yarn on packed rows"),
    (INTERLEAVED, TP2, ENGINE | {"apply_rope_fusion": True}, "does not interleave"),
    (DENSE, VPP, FREEING, "before megatron-core 0.18"),
    (DENSE, VPP, FREEING | {"version": V17}, "before megatron-core 0.18"),
    *(
        (model, TP2, TE_ACTIVATION, "use_te_activation_func computes another activation")
        for model in (
            GELU,
            CLAMPED,
            GELU.replace_fields(hidden_act="relu"),
            GELU.replace_fields(hidden_act="silu"),
        )
    ),
    (GELU, TP2, OP_FUSER, "use_transformer_engine_op_fuser computes another activation"),
    (PARALLEL, TP2, OP_FUSER, "needs Transformer Engine's norm before each MLP"),
    (
        DENSE.replace_fields(norm_placement="post"),
        TP2,
        OP_FUSER,
        "needs Transformer Engine's norm before each",
    ),
    (SHARED, ParallelLayout(), {"moe_shared_expert_overlap": True}, "shared experts that overlap omit"),
    (DENSE, ParallelLayout(), TE_LOSS | {"bf16": False, "fp16": True}, "not in fp16"),
    (DENSE, ParallelLayout(), TE_LOSS | {"engine": (2, 10, 0)}, "gradients of other tokens"),
]


@pytest.mark.parametrize("config,layout,settings,message", REFUSED)
def test_refused(
    config: McaModelConfig, layout: ParallelLayout, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(McaError, match=message):
        check(config, layout, **settings)


ACCEPTED: list[tuple[McaModelConfig, ParallelLayout, dict[str, Any]]] = [
    (DENSE, VPP, {"overlap_p2p_comm": True}),
    (MOE, TP2, {}),
    (DENSE, UNEVEN, UNIFORM | {"recompute_num_layers": 1}),
    (DENSE, UNEVEN, UNIFORM | {"version": V19}),
    (MLA, TP2, {"sequence_parallel": True}),
    (DENSE, CP2, {"mtp_num_layers": 1}),
    (DENSE, CP2, {"mtp_num_layers": 1, "version": V19}),
    (CHANCES, ParallelLayout(), SINKHORN),
    (MOE.replace_fields(moe_router_topk=1, moe_router_score_function="sigmoid"), ParallelLayout(), SINKHORN),
    (
        MOE,
        ParallelLayout(),
        {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True},
    ),
    (TIED_PREDICTION.replace_fields(tie_word_embeddings=False), BETWEEN, {"overlap_p2p_comm": True}),
    (DENSE, TP2, FUSED),
    (MOE.replace_fields(hidden_act="quick_gelu"), TP2, FUSED),
    (DENSE, TP2, {"gradient_accumulation_fusion": True, "device": "cuda"}),
    (DENSE, CP2, {"cp_comm_type": "p2p", **HALF}),
    (WINDOWED, ParallelLayout(), ENGINE),
    (WINDOWED, CP2, {"cp_comm_type": "a2a", **HALF}),
    (DENSE, CP2, {"cp_comm_type": "a2a", **HALF}),
    (DENSE, CP2, {"cp_comm_type": "a2a", **PACKED, "engine": (2, 10, 0)}),
    (DENSE, CP2, {"cp_comm_type": "p2p", **PACKED, "engine": (2, 8, 0)}),
    (DENSE, CP2, {"cp_comm_type": "all_gather", **PACKED, "engine": (2, 8, 0), "attention_backend": "local"}),
    (MLA, CP2, HALF),
    (DENSE, TP2, ENGINE | {"apply_rope_fusion": True}),
    (INTERLEAVED, TP2, ENGINE | {"apply_rope_fusion": True, "version": V19}),
    *((model, CP2, {"attention_backend": "local", **ENGINE}) for model in (WINDOWED, SINKS, MLA)),
    (DENSE, VPP, FREEING | {"version": V18}),
    (DENSE, PP2, CUDA | {"deallocate_pipeline_outputs": True}),
    (DENSE, TP2, TE_ACTIVATION),
    (DENSE, TP2, OP_FUSER),
    (
        SHARED.replace_fields(hidden_act="silu", glu_linear_offset=0.0),
        TP2,
        {"moe_shared_expert_overlap": True},
    ),
    *((DENSE, TP2, TE_LOSS | {"engine": engine}) for engine in (None, (2, 11, 0))),
]


@pytest.mark.parametrize(
    "device,layout,version,frees",
    [
        ("cuda", PP2, V16, True),
        ("cuda", VPP, V16, False),
        ("cuda", VPP, V17, False),
        ("cuda", VPP, V18, True),
        ("cuda", ParallelLayout(), V19, False),
        ("cpu", PP2, V19, False),
    ],
)
def test_outputs_are_freed_where_they_are_sent_first(
    device: str,
    layout: ParallelLayout,
    version: tuple[int, ...],
    frees: bool,
) -> None:
    settings = pipeline_settings(layout, version, device)
    assert settings["deallocate_pipeline_outputs"] is frees
    check(DENSE, layout, device=device, version=version, **settings)


@pytest.mark.parametrize("config,layout,settings", ACCEPTED)
def test_accepted(config: McaModelConfig, layout: ParallelLayout, settings: dict[str, Any]) -> None:
    check(config, layout, **settings)


def test_accumulation_in_products_needs_a_kernel_for_the_output_layer() -> None:
    args = MegatronArguments(gradient_accumulation_fusion=True)
    here = Target(device="cuda", implementation="transformer_engine", is_here=True)
    with pytest.raises(McaError, match="gradient_accumulation_fusion needs NVIDIA Apex"):
        transformer_config(DENSE, args, ParallelLayout(), "bfloat16", here)


def test_packs_are_refused_by_models_and_by_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "engine_version", lambda: (2, 12, 0))
    args = MegatronArguments(context_parallel_size=2, cp_comm_type="all_gather")
    target = Target.planned("transformer_engine")
    megatron = transformer_config(DENSE, args, CP2, "bfloat16", target)
    models: Any = SimpleNamespace(config=DENSE, rank_context=SimpleNamespace(layout=CP2), megatron=megatron)
    with pytest.raises(McaError, match=r"packed log_probs: Transformer Engine .* takes no packed rows"):
        _require_packs(models)
    with pytest.raises(McaError, match=r"install .* or later"):
        transformer_config(DENSE, replace(args, sequence_packing=True), CP2, "bfloat16", target)
    megatron.attention_backend = "local"
    _require_packs(models)


@pytest.mark.parametrize("config,layout,settings", [case[:3] for case in REFUSED])
def test_the_documentation_says_why(
    config: McaModelConfig, layout: ParallelLayout, settings: dict[str, Any]
) -> None:
    page = Path(__file__).parents[4] / "docs" / "reference" / "combinations.md"
    with pytest.raises(McaError) as error:
        check(config, layout, **settings)
    (sentence,) = str(error.value).split(": ", 1)[1:]
    assert " ".join(sentence.split()) in " ".join(page.read_text().split())


@pytest.mark.parametrize(
    ("config", "trained", "expected"),
    [(DENSE, True, False), (MLA, False, True), (MOE, False, False), (MOE, True, True)],
)
def test_sequence_parallelism_is_on_where_the_model_needs_it(
    config: McaModelConfig, trained: bool, expected: bool
) -> None:
    args = (MegatronArguments if trained else DistributingParallelArguments)(tensor_model_parallel_size=2)
    assert layout_settings(config, args, TP2)["sequence_parallel"] is expected
    assert not layout_settings(config, args, ParallelLayout())["sequence_parallel"]


def test_experts_are_not_trained_on_tensor_ranks_without_sequence_parallelism() -> None:
    args = MegatronArguments(tensor_model_parallel_size=2, sequence_parallel=False)
    with pytest.raises(McaError, match="training a model with experts on several tensor ranks needs it"):
        layout_settings(MOE, args, TP2)
