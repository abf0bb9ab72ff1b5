"""Random models of every family, random layouts, random dtypes: HF -> MCA -> another MCA -> HF is bit-exact.

Whatever a layout makes impossible is refused by the plan and by the conversion alike, with nothing written.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny_hf import CASES
from tiny_sizes import MAMBA

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_convert.conversion import plan_to_hf, plan_to_mca
from mca_convert.pool import Limits
from mca_models.checkpoint.hf_directory import ConfigOnlySource, HfSource
from mca_models.checkpoint.hf_writer import METADATA
from mca_models.checkpoint.mca_directory import McaSource, layout_faults
from mca_models.storage.safetensors import plan_file
from mca_models.storage.writer import SafetensorsWriter
from mca_models.templates import FAMILIES

EXAMPLES = int(os.environ.get("MCA_TEST_EXAMPLES", "8"))  # of each family
LIMITS = Limits(workers=2, memory=400_000)
NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v2", "qwen3_next"}
EXPERTS |= {"qwen3_5_moe_text", "olmoe", "gpt_oss"}
PREDICTING = {"glm4_moe", "deepseek_v3"}


def of_states(layers: int, draw: Any) -> dict[str, Any]:
    """Return the fields of a model with state space layers, or those of a model without."""
    kinds = st.sampled_from(["mamba", "moe", "attention", "mlp"])
    kept = draw(st.lists(kinds, min_size=layers, max_size=layers))
    return {**MAMBA, "layers_block_type": kept, "sliding_window": None, "tie_word_embeddings": False}


def config_of(family: str, draw: Any) -> dict[str, Any]:
    """A small random ``config.json`` with the fields of all families; each takes its own."""
    groups = draw(st.sampled_from([1, 2, 4]))
    heads = groups * draw(st.sampled_from([1, 2, 3]))
    head_dim = draw(st.sampled_from([2, 4]))
    experts = draw(st.sampled_from([2, 4, 6]))
    layers = draw(st.integers(2, 6))
    full_width = family in ("olmo2", "olmoe", "phi3", "granite", "smollm3")
    hidden = heads * head_dim if full_width else draw(st.sampled_from([8, 12, 16]))
    latent = family.startswith("deepseek")
    return {
        "model_type": family,
        "vocab_size": draw(st.integers(5, 30)),
        "hidden_size": hidden,
        "intermediate_size": draw(st.sampled_from([8, 12, 24])),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if latent else groups,
        "head_dim": head_dim,
        "partial_rotary_factor": 0.5 if head_dim % 4 == 0 else 1.0,  # dimensions are rotated in pairs
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw(st.booleans()) and family not in ("gpt_oss", "qwen2_moe"),
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": None if family in ("mistral", "exaone4") else 8,
        "query_pre_attn_scalar": 4,
        "num_experts": experts,
        "num_local_experts": experts,
        "n_routed_experts": experts,
        "n_shared_experts": draw(st.sampled_from([1, 2])),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": draw(st.sampled_from([4, 12])),
        "shared_expert_intermediate_size": 12,
        "first_k_dense_replace": draw(st.integers(0, layers - 1)),
        "n_group": 1,
        "topk_group": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0] if draw(st.booleans()) else [],
        "num_nextn_predict_layers": draw(st.integers(0, 1)) if family in PREDICTING else 0,
        "use_qk_norm": True,
        "norm_topk_prob": family != "deepseek_v2",
        "attention_bias": family in ("glm4_moe", "gpt_oss"),
        "q_lora_rank": draw(st.sampled_from([None, 6])),
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 3,
        "linear_conv_kernel_dim": 3,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "moe_shared_expert_intermediate_size": 12,
        **(of_states(layers, draw) if family == "nemotron_h" else {}),
    }


def random_checkpoint(hf: dict[str, Any], dtype: str, directory: Path, seed: int) -> HfSource:
    """Writes random bits for every tensor of the model."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**hf, "torch_dtype": NAMES[dtype]}))
    generator = np.random.default_rng(seed)
    infos = list(ConfigOnlySource(directory).tensors())
    plan = plan_file(directory / "model.safetensors", [(i.name, i.dtype, i.shape) for i in infos], METADATA)
    with SafetensorsWriter(plan) as writer:
        for info in infos:
            writer.write(info.name, generator.bytes(info.nbytes))
    return HfSource(directory)


@st.composite
def layouts(draw: Any, experts: int | None, layers: int) -> ParallelLayout | None:
    """A layout, possible or not; None where it contradicts itself."""
    pp = draw(st.sampled_from([1, 2, 2, 3]))
    split: dict[str, Any] = {}
    way = draw(st.sampled_from(["even", "even", "virtual", "first", "last", "embedding", "string"]))
    if pp > 1 and way == "virtual":
        split["virtual_pipeline_model_parallel_size"] = 2
    elif pp > 1 and way in ("first", "last"):
        split[f"num_layers_in_{way}_pipeline_stage"] = draw(st.integers(1, 2))
    elif way == "embedding":
        split["account_for_embedding_in_pipeline_split"] = True
        split["account_for_loss_in_pipeline_split"] = draw(st.booleans())
    elif way == "string" and pp > 1:
        first = draw(st.integers(0, layers))
        middle = "|" * (pp - 2)
        split["pipeline_model_parallel_layout"] = (
            "E" + "t" * first + "|" + middle + "t" * (layers - first) + "L"
        )
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    ep = draw(st.sampled_from([1, 2, 3])) if experts else 1
    etp = draw(st.sampled_from([None, 1, 2])) if experts else None
    try:
        return ParallelLayout(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            **split,
        )
    except McaError:
        return None


def to_mca(source: Any, layout: ParallelLayout, target: Path) -> McaSource | None:
    """``source`` as an MCA checkpoint; None if both the plan and the conversion refuse it."""
    wholes = {param.mca_name(): source.full_shape(param) for param in source.params}
    faults = layout_faults(source.params, replace(source.config, layout=layout), wholes)
    try:
        plan_to_mca(source, layout).run(target, LIMITS)
    except McaError:
        assert faults and not target.exists()
        return None
    assert not faults
    return McaSource(target)


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    "family", sorted({kind for kind, _ in CASES.values() if FAMILIES[kind].vision is None})
)
def test_round_trips(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp(family)
    done = {"whole": 0, "refused": 0}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        phases=[Phase.generate],
    )
    @given(data=st.data(), dtype=st.sampled_from(sorted(NAMES)), seed=st.integers(0, 99))
    def check(data: Any, dtype: str, seed: int) -> None:
        folder = base / "example"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        hf = config_of(family, data.draw)
        source = random_checkpoint(hf, dtype, folder / "hf", seed)
        size = (source.config.num_experts, hf["num_hidden_layers"])
        last: Any = source
        for number in range(2):
            layout = data.draw(layouts(*size))
            mca = layout and to_mca(last, layout, folder / f"mca{number}")
            done["refused"] += mca is None
            last = mca or last
        plan_to_hf(last, max_shard_bytes=data.draw(st.sampled_from([2_000, 10**9]))).run(
            folder / "back", LIMITS
        )
        back = HfSource(folder / "back")
        ours, theirs = ({i.name: i for i in s.tensors()} for s in (source, back))
        assert ours.keys() == theirs.keys()
        for name, info in ours.items():
            assert (info.dtype, info.shape) == (theirs[name].dtype, theirs[name].shape)
            assert info.array().tobytes() == theirs[name].array().tobytes(), name
        assert json.loads((folder / "back/config.json").read_text()) == json.loads(
            (folder / "hf/config.json").read_text()
        )
        done["whole"] += last is not source

    check()
    assert done["whole"] >= 2
