"""Extra states of a saved checkpoint: those that Megatron's own model of the same modules writes, under its names.

Transformer Engine's modules keep one each (what fp8 learned of ranges). Megatron's own loading asks for every one.
"""

import pickle
from pathlib import Path
from typing import Any

import pytest

from emulated_te import needs_te, run_emulated
from layouts import arguments
from reference import CASES as KINDS
from reference import FAMILY_CASES, SIZE, make_reference

pytestmark = [pytest.mark.ranks, needs_te]

CASES = (("qwen3", "tp2sp"), ("qwen3_moe", "ep2"), ("deepseek_v3", "tp2sp"), ("qwen3", "pp2vpp2"))
ENDING = "_extra_state"


def both(jobs: list[tuple[Path, str]], folder: Path) -> list[tuple[set[str], set[str]]]:
    """Extra states in files that are saved, and those of Megatron's model on this rank. Runs on every rank."""
    from mca_models.megatron import AutoModel

    found = []
    for number, (path, layout) in enumerate(jobs):
        model: Any = AutoModel.from_pretrained(path, arguments(layout))
        model.save_pretrained(folder / str(number), ckpt_format="torch_dist")
        (metadata,) = (folder / str(number)).rglob(".metadata")
        saved = pickle.loads(metadata.read_bytes()).state_dict_metadata
        expected = set().union(*(extra_states(chunk) for chunk in model.chunks))
        found.append(({key for key in saved if ENDING in key}, expected))
    return found


def extra_states(chunk: Any) -> set[str]:
    """The extra states of a model that Megatron builds by itself in the place of ``chunk``, as files name them."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    stage = getattr(chunk, "vp_stage", None)
    spec = get_gpt_decoder_block_spec(chunk.config, use_transformer_engine=True, vp_stage=stage)
    ends = {"pre_process": chunk.pre_process, "post_process": chunk.post_process, "vp_stage": stage}
    bare = GPTModel(chunk.config, spec, 128, 64, position_embedding_type="rope", **ends)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = bare.sharded_state_dict(metadata={"dp_cp_group": group})
    objects = [value for value in state.values() if isinstance(value, ShardedObject) and ENDING in value.key]
    modules = {name for name, _ in bare.named_modules()}
    assert {name.rpartition(f".{ENDING}")[0] for name in state if ENDING in name} <= modules
    assert objects
    return {value.unique_key for value in objects}


def test_extra_states_are_those_of_megatrons_own_model(tmp_path: Path) -> None:
    paths = {case: make_reference(case, tmp_path).path for case, _ in CASES}
    jobs = [(paths[case], layout) for case, layout in CASES]
    ranks = run_emulated(2, both, jobs, tmp_path, timeout=300)
    for number, (case, layout) in enumerate(CASES):
        saved = ranks[0][number][0]
        expected = set().union(*(of_rank[number][1] for of_rank in ranks))
        assert saved == expected, (case, layout)


def with_weights_and_with_states(cases: list[str]) -> dict[str, tuple[set[str], set[str]]]:
    """Modules of Transformer Engine that have weights of their own, and those whose extra states are saved."""
    import transformers
    from megatron.core import parallel_state

    from mca_models.megatron import AutoModel
    from mca_models.templates import config_from_hf

    found = {}
    for case in cases:
        kind, different = KINDS[case]
        config = transformers.AutoConfig.for_model(kind, **{**SIZE, **different})
        (chunk,) = AutoModel.from_config(config_from_hf(config.to_dict()), arguments("tp1")).chunks
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": group})
        saved = {name.rpartition(f".{ENDING}")[0] for name in state if f".{ENDING}" in name}
        made = {name for name, module in chunk.named_modules() if is_engines(module) and has_weights(module)}
        found[case] = made, saved
    return found


def is_engines(module: Any) -> bool:
    return any(base.__module__.startswith("transformer_engine.") for base in type(module).__mro__)


def has_weights(module: Any) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def test_every_module_with_weights_has_its_extra_state_saved() -> None:
    (found,) = run_emulated(1, with_weights_and_with_states, list(FAMILY_CASES), timeout=300)
    for case, (made, saved) in found.items():
        assert made, case
        assert made <= saved, case
        assert all(name.endswith(".core_attention") for name in saved - made), case  # of MTP layers
