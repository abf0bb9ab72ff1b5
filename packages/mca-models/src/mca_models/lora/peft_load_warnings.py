"""Warnings about factors of single routed experts, which PEFT does not load as they are on transformers 5.

There the weights of all experts are one parameter, and gate and up are one more. In models of some types PEFT makes
the factors of these parameters out of those of each expert, with a single scale; in others it passes over them in
silence.
"""

from collections.abc import Iterator, Sequence

from mca_config.model_config import McaModelConfig
from mca_models.lora.config import AdapterConfig
from mca_models.lora.targets import Target, linear_targets, stacked_targets
from mca_models.templates import get_family

FUSING_MODEL_TYPES = frozenset(
    "afmoe cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe "
    "glm4_moe_lite glm4v_moe glm_moe_dsa hunyuan_v1_moe longcat_flash mellum minimax_m2 mixtral olmoe qwen3_moe "
    "qwen3_next qwen3_omni_moe qwen3_omni_moe_thinker solar_open".split()
)
"""Types of models in which PEFT does so."""
EXPERT_LINEARS = frozenset("gate gate_proj up_proj down_proj w1 w2 w3".split())
"""Names of linears that PEFT takes for the router and the stacked weights of routed experts there."""
_DOWN = frozenset({"down_proj", "w2"})


def peft_load_warnings(
    config: McaModelConfig, adapter: AdapterConfig, adapted: Sequence[Target]
) -> Iterator[str]:
    """Yield a message for each kind of factors that PEFT would leave out, scale differently or not load.

    Args:
        config: The model.
        adapter: The adapter's configuration.
        adapted: What of the model has factors.
    """
    if not get_family(config.model_type).in_transformers:
        return
    yield from _undropped(config, adapter, adapted)
    own = [each for each in adapted if each.base.expert is not None and not each.stacked]
    if not own or _is_joined(config, adapter, own):
        return
    named = {each.label for each in own}
    stacks = dict.fromkeys(".".join(each.module.split(".")[-3:]) for each in stacked_targets(config))
    yield (
        f"target_modules: each routed expert has its own factors for {', '.join(sorted(named))}, which PEFT on "
        f"transformers 5 leaves out or scales otherwise in this {config.model_type} model; to load the adapter "
        f"there, name {', '.join(stacks)} in target_parameters instead"
    )


def _undropped(config: McaModelConfig, adapter: AdapterConfig, adapted: Sequence[Target]) -> Iterator[str]:
    """Yield what PEFT takes for parameters, which it does not adapt with dropout."""
    turned = EXPERT_LINEARS if config.model_type in FUSING_MODEL_TYPES else ()
    found = dict.fromkeys(
        each.label for each in adapted if not each.stacked and (each.is_router or each.label in turned)
    )
    if adapter.dropout and config.num_experts and found:
        yield (
            f"lora_dropout: PEFT on transformers 5 adapts {', '.join(found)} of this {config.model_type} model as "
            "parameters, without dropout, and refuses to load the adapter; set lora_dropout to 0, or name them in "
            "exclude_modules"
        )


def _is_joined(config: McaModelConfig, adapter: AdapterConfig, own: Sequence[Target]) -> bool:
    """Return whether PEFT makes factors of stacked weights out of all factors of single experts, ``own``."""
    if config.model_type not in FUSING_MODEL_TYPES:
        return False
    every = [each for each in linear_targets(config) if each.base.expert is not None]
    labels = {each.label for each in own}
    complete = len(own) == sum(each.label in labels for each in every)
    known = labels == {each.label for each in every} or labels <= _DOWN
    return complete and known and not _scaled(adapter, [each for each in own if each.label not in _DOWN])


def _scaled(adapter: AdapterConfig, joined: Sequence[Target]) -> bool:
    """Return whether PEFT scales the joined factors differently: it doubles rank and alpha of the whole adapter."""
    usual = adapter.document.get("r", 8), adapter.document.get("lora_alpha", 8)
    sizes = {(adapter.rank(each.module), adapter.alpha(each.module)) for each in joined}
    return bool(sizes) and (bool(adapter.document.get("use_rslora")) or sizes != {usual})
