"""Checks of a model on a layout: all problems at once, each with the flag."""

from typing import Any

import pytest

from mca_config import (
    McaError,
    McaModelConfig,
    ParallelLayout,
    check_layout,
)
from mca_config.checks import (
    fp8_token_multiple,
    length_multiple,
    position_problem,
    require_layout,
    sequence_multiple,
)

DENSE: dict[str, Any] = {
    "model_type": "llama",
    "num_layers": 8,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 8,
    "vocab_size": 101,
    "max_position_embeddings": 512,
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 64,
}

LINEAR = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4) | dict.fromkeys(
    ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"), 4
)
MAMBA = {"mamba_head_dim": 4, "mamba_conv_kernel_dim": 4}


def model(**more: Any) -> McaModelConfig:
    return McaModelConfig.from_fields(**(DENSE | more))


def layout(
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    string: str | None = None,
    vpp: int | None = None,
) -> ParallelLayout:
    return ParallelLayout(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        pipeline_model_parallel_layout=string,
        virtual_pipeline_model_parallel_size=vpp,
    )


@pytest.mark.parametrize(
    ("more", "sizes", "world", "seq"),
    [
        ({}, layout(), None, None),
        ({}, layout(tp=2, pp=2, cp=2), 16, 512),
        ({"num_query_groups": 2}, layout(tp=4), None, None),
        (EXPERTS, layout(tp=2, ep=4), 8, 512),
        ({**EXPERTS, "moe_shortcut": True}, layout(pp=4), None, None),
        (EXPERTS, layout(tp=2, ep=8, etp=1), 8, None),
        ({}, layout(tp=2, etp=1), None, None),
        ({}, layout(tp=2, etp=2), None, None),
        ({**EXPERTS, "ffn_hidden_size": 127}, layout(tp=2), None, None),
        ({"vocab_size": 4099}, layout(tp=8), None, None),
        ({"per_layer_input_size": 4, "num_kv_shared_layers": 6}, layout(tp=2), None, None),
        ({"num_kv_shared_layers": 3}, layout(pp=2), None, None),
        (
            {"mtp_num_layers": 1, "mtp_before_final_norm": True, "num_layers": 2},
            layout(pp=2, string="Et|tmL"),
            None,
            None,
        ),
    ],
)
def test_what_fits(more: dict[str, Any], sizes: ParallelLayout, world: int | None, seq: int | None) -> None:
    assert check_layout(model(**more), sizes, world, seq) == []
    require_layout(model(**more), sizes, world, seq)


@pytest.mark.parametrize(
    ("more", "sizes", "words"),
    [
        (
            {"num_layers": 30},
            layout(pp=4),
            ["num_layers 30", "change pipeline_model_parallel_size, for example to 3,"],
        ),
        (
            {"num_layers": 7},
            layout(pp=2),
            ["num_layers 7", "pipeline_model_parallel_size, for example to 1,"],
        ),
        ({}, layout(pp=3, vpp=2), ["num_layers 8", "pipeline_model_parallel_size, for example to 2,"]),
        ({}, layout(tp=16), ["num_attention_heads 8", "tensor_model_parallel_size 16", "for example to 8"]),
        (
            {"num_attention_heads": 12, "num_query_groups": 3},
            layout(tp=2),
            ["num_query_groups 3 is neither a multiple nor a divisor", "for example to 1"],
        ),
        (
            {"num_attention_heads": 3, "num_query_groups": 1, "kv_channels": 8, "ffn_hidden_size": 96},
            layout(tp=3),
            ["keys and values of 1 x 8 rows", "at most 1, or a size that divides 16"],
        ),
        ({"ffn_hidden_size": 127}, layout(tp=2), ["ffn_hidden_size 127", "tensor_model_parallel_size 2"]),
        (
            {"ffn_hidden_size": 127, "hf_config": {"intermediate_size": 127}},
            layout(tp=2),
            ["ffn_hidden_size 127 (intermediate_size) cannot be divided", "for example to 1"],
        ),
        ({}, layout(ep=2), ["no experts", "expert_model_parallel_size to 1"]),
        ({}, layout(tp=2, etp=8), ["no experts", "expert_tensor_parallel_size to 1, not 8"]),
        (EXPERTS, layout(ep=3), ["num_moe_experts 8", "expert_model_parallel_size 3", "for example to 2"]),
        (EXPERTS, layout(etp=5), ["moe_ffn_hidden_size 48", "expert_tensor_parallel_size 5"]),
        (
            {**EXPERTS, "moe_shared_expert_intermediate_size": 63},
            layout(tp=2),
            ["moe_shared_expert_intermediate_size 63"],
        ),
        ({**EXPERTS, "add_bias_linear": True}, layout(tp=2), ["biases", "expert_tensor_parallel_size to 1"]),
        (
            {**EXPERTS, "moe_shortcut": True, "num_layers": 12},
            layout(pp=4),
            [
                "leaves a stage with 3 layers",
                "pairs",
                "pipeline_model_parallel_layout with an even number of t",
            ],
        ),
        ({"mtp_num_layers": 1, "hidden_size": 66}, layout(tp=4), ["hidden_size (of MTP layers) 66"]),
        (
            {"mtp_num_layers": 1, "mtp_before_final_norm": True, "num_layers": 2},
            layout(pp=2, string="Ett|mL"),
            ["without the final norm; move m of pipeline_model_parallel_layout"],
        ),
        ({**LINEAR, "linear_num_key_heads": 2}, layout(tp=4), ["linear_num_key_heads 2"]),
        (
            {**MAMBA, "mamba_num_groups": 3, "mamba_num_heads": 6, "mamba_state_dim": 4},
            layout(tp=2),
            ["mamba_num_groups 3 is neither a multiple nor a divisor"],
        ),
        (
            {**MAMBA, "mamba_num_groups": 1, "mamba_num_heads": 8, "mamba_state_dim": 5},
            layout(tp=2),
            ["mamba_num_groups x mamba_state_dim 5"],
        ),
        (
            {**LINEAR, "linear_num_key_heads": 4, "linear_num_value_heads": 6},
            layout(tp=4),
            ["linear_num_value_heads 6"],
        ),
        (
            {"attention_output_gate": True, "num_query_groups": 1},
            layout(tp=2),
            ["num_query_groups 1", "attention_output_gate", "at most 1"],
        ),
        (
            {"per_layer_input_size": 4},
            layout(pp=2),
            ["hidden_size_per_layer_input", "pipeline_model_parallel_size to 1, not 2"],
        ),
        (
            {"num_kv_shared_layers": 6},
            layout(pp=2),
            ["layer 4 takes the keys and values of layer 1", "num_kv_shared_layers"],
        ),
        (
            {"qk_layernorm_full_width": True, "num_query_groups": 1},
            layout(tp=2),
            ["num_query_groups 1", "qk_layernorm_full_width", "at most 1"],
        ),
    ],
)
def test_what_does_not_fit_names_the_flag(
    more: dict[str, Any], sizes: ParallelLayout, words: list[str]
) -> None:
    problems = check_layout(model(**more), sizes)
    assert len(problems) == 1, problems
    assert all(word in problems[0] for word in words), problems


def test_sequences_and_worlds_are_checked() -> None:
    assert (
        "multiple of 4, which context_parallel_size requires; change it to 104"
        in check_layout(model(), layout(cp=2), None, 101)[0]
    )
    problem = check_layout(model(**EXPERTS), layout(tp=2, ep=2), None, 101)[0]
    assert "multiple of 2, which tensor_model_parallel_size (with sequence_parallel)" in problem
    assert check_layout(model(), layout(tp=2), None, 101) == []
    assert len(check_layout(model(), layout(tp=2), None, 101, sequence_parallel=True)) == 1
    assert "6 ranks" in check_layout(model(), layout(tp=2, pp=2), 6)[0]


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel", "multiple"),
    [
        (layout(), None, 1),
        (layout(tp=4), None, 1),
        (layout(tp=4), True, 4),
        (layout(tp=4, ep=2), None, 4),
        (layout(cp=4), None, 8),
        (layout(tp=2, cp=2), True, 4),
        (layout(tp=3, cp=2), True, 12),
        (layout(tp=4, cp=2), True, 8),
    ],
)
def test_the_multiple_of_a_sequence(
    sizes: ParallelLayout, sequence_parallel: bool | None, multiple: int
) -> None:
    assert sequence_multiple(sizes, sequence_parallel) == multiple


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel", "recipe", "multiple"),
    [
        (layout(), None, "delayed", 16),
        (layout(tp=4), None, None, 16),
        (layout(tp=4), True, "mxfp8", 128),
        (layout(cp=2), None, "tensorwise", 32),
        (layout(tp=2, cp=2), True, "blockwise", 64),
    ],
)
def test_products_in_fp8_want_multiples_of_tokens_on_each_rank(
    sizes: ParallelLayout, sequence_parallel: bool | None, recipe: str | None, multiple: int
) -> None:
    assert (
        sequence_multiple(sizes, sequence_parallel, tokens=fp8_token_multiple("hybrid", recipe)) == multiple
    )
    assert fp8_token_multiple(None, recipe) == 1


def test_padded_rows_of_an_engine_have_few_lengths() -> None:
    cp = layout(cp=3)
    step = length_multiple("cuda", "transformer_engine", packed=False)
    assert (sequence_multiple(cp), sequence_multiple(cp, step=step)) == (6, 192)
    others = [
        ("cpu", "transformer_engine", False),
        ("cuda", "local", False),
        ("cuda", "transformer_engine", True),
    ]
    assert {length_multiple(device, layers, packed=packed) for device, layers, packed in others} == {1}


def test_all_problems_come_at_once() -> None:
    with pytest.raises(McaError) as error:
        require_layout(model(num_layers=30, ffn_hidden_size=127), layout(tp=16, pp=4, ep=2), 7, 101)
    text = str(error.value)
    assert text.startswith("llama cannot be laid out as tp 16 pp 4 ep 2 etp 16: ")
    for words in ("num_layers 30", "num_attention_heads", "ffn_hidden_size", "no experts", "7 ranks"):
        assert words in text


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 512),
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
        ),
    ],
)
def test_positions_that_a_model_does_not_have_are_told(
    scaling: dict[str, Any] | None, positions: int
) -> None:
    scaled = model(rope_scaling=scaling)
    assert position_problem(scaled, positions) is None
    reported = position_problem(scaled, positions + 1)
    assert reported is not None
    assert f"of {positions + 1} tokens are longer than the model's {positions} positions" in reported


def test_dynamic_scaling_has_no_last_position() -> None:
    assert position_problem(model(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), 10**6) is None
