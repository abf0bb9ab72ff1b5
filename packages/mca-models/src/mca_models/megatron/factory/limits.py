"""Limits: what the installed megatron-core, or this machine, computes wrongly or not at all.

Each was measured by comparing losses and gradients over layouts, and has a test. Limits of a feature are in its module.
"""

from collections.abc import Iterator

from mca_config.arguments import transformer_engine_problems
from mca_config.errors import raise_problems
from mca_config.layout import ParallelLayout
from mca_config.pipeline import pipeline_plan
from mca_config.printable import counted
from mca_models.megatron.features.feature import FIXED_IN_0_17, Setup, Version

_ENGINE_WITH_STRIDES: Version = (2, 11)
"""First version of Transformer Engine whose cross entropy accepts non-contiguous gradients."""
_CUDA_ONLY = ("gradient_accumulation_fusion", "fp8", "tp_comm_overlap", "masked_softmax_fusion")
_PACKS_SINCE: dict[str, Version] = {"all_gather": (2, 18), "a2a": (2, 10)}
"""First versions of Transformer Engine whose context-parallel attention takes packed rows, from its sources."""


def require_supported(setup: Setup) -> None:
    """Raise one error with everything in ``setup`` that cannot run."""
    problems = [
        *_pipeline(setup),
        *_sends(setup),
        *_recomputation(setup),
        *_machine(setup),
        *(problem for feature in setup.features for problem in feature.problems(setup)),
        *packed_problems(setup),
        *_cross_entropy(setup),
    ]
    raise_problems(list(dict.fromkeys(problems)), f"{setup.config.model_type} at {setup.layout}")


def _pipeline(setup: Setup) -> Iterator[str]:
    layout, settings = setup.layout, setup.settings
    overlaps, batched = settings.get("overlap_p2p_comm"), settings.get("batch_p2p_comm")
    if layout.pp > 1 and layout.vpp == 1 and overlaps:
        yield (
            "overlap_p2p_comm needs virtual_pipeline_model_parallel_size of at least 2: Megatron's plain schedule "
            "has nothing to overlap with; remove overlap_p2p_comm"
        )
    if layout.vpp > 1 and (not overlaps or batched):
        yield (
            "virtual pipelining computes wrong numbers without overlap_p2p_comm; remove overlap_p2p_comm and "
            "batch_p2p_comm from the arguments"
        )


def _sends(setup: Setup) -> Iterator[str]:
    if not setup.settings.get("deallocate_pipeline_outputs"):
        return
    if setup.device == "cpu":
        yield (
            "deallocate_pipeline_outputs frees what gloo still sends, which changes the numbers silently; remove it"
        )
    elif not waits_for_sends(setup.layout, setup.version):
        yield (
            "deallocate_pipeline_outputs frees what virtual stages still send before megatron-core 0.18, which changes "
            "the numbers silently; remove it"
        )


def waits_for_sends(layout: ParallelLayout, version: tuple[int, ...]) -> bool:
    """Return whether megatron-core of ``version`` waits for the send of an output before it frees the output."""
    return layout.vpp == 1 or version >= (0, 18)


def _recomputation(setup: Setup) -> Iterator[str]:
    config, settings = setup.config, setup.settings
    count = settings.get("recompute_num_layers") or 1
    if settings.get("recompute_method") != "uniform" or count == 1:
        return
    if settings.get("mtp_num_layers"):
        yield (
            f"megatron-core cannot recompute MTP layers {count} layers at a time; change recompute_num_layers "
            "to 1, or use recompute_method block"
        )
    if setup.version >= FIXED_IN_0_17:
        return
    plan = pipeline_plan(setup.layout, config.num_layers, config.mtp_num_layers)
    layers = [len(chunk.layers) for chunk in plan]
    uneven = [number for number in layers if number % count]
    if uneven:
        yield (
            f"megatron-core 0.16 cannot recompute the {counted(max(uneven), 'layer')} of a pipeline stage {count} at a "
            "time; change recompute_num_layers to 1, or use recompute_method block"
        )


def _machine(setup: Setup) -> Iterator[str]:
    settings = setup.settings
    if setup.device != "cuda":
        yield from (f"{name} needs CUDA; remove it" for name in _CUDA_ONLY if settings.get(name))
        if settings.get("moe_token_dispatcher_type") == "flex":
            yield "moe_token_dispatcher_type flex needs CUDA; use alltoall or allgather"
        settings = {name: value for name, value in settings.items() if name not in _CUDA_ONLY}
    elif settings.get("tp_comm_overlap"):
        yield "tp_comm_overlap needs buffers that mca does not create (Transformer Engine's initialize_ub); remove it"
    if settings.get("fp8_param"):
        yield "fp8_param is not supported: gradient buffers and optimizer do not support weights in fp8; remove it"
    if setup.implementation == "local":
        yield from transformer_engine_problems(settings)


def packed_problems(setup: Setup) -> Iterator[str]:
    """Yield why packed rows cannot be computed."""
    engine, kind = setup.engine, str(setup.settings.get("cp_comm_type"))
    if not setup.packed or setup.layout.cp == 1 or engine is None or setup.mca_attention:
        return
    since = _PACKS_SINCE.get(kind, engine)
    if engine < since:
        here, first = (".".join(map(str, version[:2])) for version in (engine, since))
        yield (
            f"Transformer Engine {here} takes no packed rows with cp_comm_type {kind}; install {first} or later, set "
            "attention_backend to local, or turn packing off"
        )


def _cross_entropy(setup: Setup) -> Iterator[str]:
    if setup.settings.get("cross_entropy_fusion_impl") != "te":
        return
    if setup.settings.get("fp16"):
        yield "cross_entropy_fusion_impl te takes logits in bf16 or fp32, not in fp16; set it to native"
    engine = setup.engine
    if engine is not None and engine < _ENGINE_WITH_STRIDES:
        yield (
            f"cross_entropy_fusion_impl te of Transformer Engine {'.'.join(map(str, engine))} gives tokens the "
            "gradients of other tokens; install version 2.11 or later, or set it to native"
        )
