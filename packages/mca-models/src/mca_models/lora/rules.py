"""The rules of an adapter's tensors, derived from those of the base model.

On a Megatron linear ``L`` that is made of HF modules ``q_proj``, ``k_proj``, ... each targeted one keeps
its own two factors, so that training equals PEFT's on the HF model and conversion loses nothing:

    L.lora_A.q_proj.weight   [rank, in]    cut like the columns of L (row-parallel), else replicated
    L.lora_B.q_proj.weight   [out, rank]   cut like the rows of L (column-parallel), else replicated

with ``out`` the rows of that module alone. Where the rows of one part do not fall evenly on the ranks
(fewer query groups than tp, whose packed rows Megatron cuts anywhere; gated delta net) its lora_B is
replicated, and a rank uses the rows it needs. An expert's factors carry its number at the end
(``.weight17``); those of stacked HF parameters have the parameter's name
(``linear_fc1.lora_A.gate_up_proj.weight17``), one lora_A for gate and up together. What
``modules_to_save`` saved keeps the canonical name of the base parameter.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from mca_config.errors import McaError, raise_problems
from mca_config.model_config import McaModelConfig
from mca_models.lora.config import AdapterConfig
from mca_models.lora.peft_names import ineffective_exclusions, peft_load_warnings, unmatched_entries
from mca_models.lora.targets import UNSAVED, Target, linear_targets, named_params, stacked_targets
from mca_models.templates import get_family
from mca_models.weights import COLUMN, REPLICATED, ROW, Param, Shard, Stage
from mca_models.weights.layouts import SEPARATE, Concat, GroupedHeads

logger = logging.getLogger(__name__)

PREFIX = "base_model.model."
"""Prefix that PEFT adds to every name of the HF model."""


@dataclass(frozen=True)
class LoraFactors:
    """LoRA factors on one target: the rules of both tensors, and their scale."""

    target: Target
    a: Param
    b: Param
    rank: int
    scale: float


@dataclass(frozen=True)
class AdapterRules:
    """Rules of every tensor of one adapter.

    Args:
        factors: By target, in checkpoint order.
        saved: Base parameters that are trained and saved whole; their HF names carry PEFT's prefix.
        kept: The same that PEFT saved without training them: tables that it saw resized or adapted.
    """

    factors: tuple[LoraFactors, ...]
    saved: tuple[Param, ...] = ()
    kept: tuple[Param, ...] = ()

    @property
    def full_params(self) -> tuple[Param, ...]:
        """All base parameters in it."""
        return (*self.saved, *self.kept)

    @property
    def params(self) -> list[Param]:
        """All rules."""
        return [*(param for pair in self.factors for param in (pair.a, pair.b)), *self.full_params]


def rules_for_training(config: McaModelConfig, adapter: AdapterConfig) -> AdapterRules:
    """The tensors of a new adapter: all that its configuration names.

    Raises:
        McaError: It names nothing of the model, or something that cannot carry an adapter.
    """
    factors = (*_linear_factors(config, adapter), *_stacked_factors(config, adapter))
    rules = _checked(config, adapter, AdapterRules(factors, tuple(_saved(config, adapter))))
    adapted = [pair.target for pair in rules.factors]
    problems = unmatched_entries(config, adapter, adapted)
    raise_problems(problems, "LoraConfig", shown=8)
    for warning in (*ineffective_exclusions(config, adapter), *peft_load_warnings(config, adapter, adapted)):
        logger.warning("LoraConfig: %s", warning)
    return rules


def rules_from_names(config: McaModelConfig, adapter: AdapterConfig, names: Collection[str]) -> AdapterRules:
    """Return the tensors of the adapter that holds tensors ``names`` (PEFT's or canonical).

    Names decide what the configuration leaves open: whether ``gate_proj`` meant the routed experts too
    (not with transformers 5), whether the vision model was there, and whether PEFT added embeddings that it saw
    resized.
    """
    linear = _linear_factors(config, adapter, experts=True)
    if not any(_is_in(pair.a, names) for pair in linear if pair.target.base.expert is not None):
        linear = [pair for pair in linear if pair.target.base.expert is None]
    if not any(_is_in(pair.a, names) for pair in linear if pair.target.is_vision):
        linear = [pair for pair in linear if not pair.target.is_vision]
    factors = (*linear, *_stacked_factors(config, adapter))
    saved, kept = tuple(_saved(config, adapter)), tuple(_kept(config, adapter, names))
    return _checked(config, adapter, AdapterRules(factors, saved, kept))


def _is_in(param: Param, names: Collection[str]) -> bool:
    return param.mca_name() in names or param.hf_names()[0] in names


def _linear_factors(
    config: McaModelConfig, adapter: AdapterConfig, *, experts: bool = False
) -> list[LoraFactors]:
    """``experts``: all-linear means the routed ones too, as it does with transformers 4."""
    factors = []
    for target in linear_targets(config):
        parameter = f"{target.module}.weight"
        hf = f"{PREFIX}{target.module}."
        if adapter.targets(
            target.module, linear=target.linear or (experts and target.base.expert is not None)
        ):
            factors.append(_factors(config, adapter, target, hf, target.module))
        elif adapter.targets_parameter(parameter):
            _require_no_dropout(adapter)
            factors.append(_factors(config, adapter, target, hf, parameter))
    return factors


def _require_no_dropout(adapter: AdapterConfig) -> None:
    if adapter.dropout:
        raise McaError("lora_dropout: must be 0 with target_parameters, as in PEFT")


def _stacked_factors(config: McaModelConfig, adapter: AdapterConfig) -> list[LoraFactors]:
    """Return the factors on stacked experts.

    PEFT wraps a module once for each of its parameters, so the first of two is one ``base_layer`` deeper.
    """
    if not adapter.document.get("target_parameters") or not config.num_experts:
        return []
    found = [t for t in stacked_targets(config) if adapter.targets_parameter(t.module)]
    if found:
        _require_no_dropout(adapter)
    parameters: dict[str, list[str]] = {}
    for name in dict.fromkeys(target.module for target in found):
        parameters.setdefault(name.rpartition(".")[0], []).append(name)
    wrapped = {
        name: f"{PREFIX}{module}.{'base_layer.' * deeper}"
        for module, names in parameters.items()
        for deeper, name in enumerate(reversed(names))
    }
    return [_factors(config, adapter, target, wrapped[target.module], target.module) for target in found]


def _factors(
    config: McaModelConfig, adapter: AdapterConfig, target: Target, hf: str, called: str
) -> LoraFactors:
    """``called``: what ``rank_pattern`` and ``alpha_pattern`` match, the module's or the parameter's name."""
    a = _factor(target, "lora_A", hf, _shard_a(target))
    b = _factor(target, "lora_B", hf, _shard_b(target, config))
    if target.is_unfused:
        b = replace(b, layout=target.base.layout, hf_layout=target.row_layout)
    b = replace(b, vocab=target.base.vocab)
    return LoraFactors(target, a, b, adapter.rank(called), adapter.scale(called))


def _factor(target: Target, which: str, hf: str, shard: Shard) -> Param:
    owner, _, leaf = target.base.mca.rpartition(".")
    if not leaf.startswith("weight"):  # a bare parameter, as the shared expert's gate
        owner, leaf = target.base.mca, "weight"
    return replace(
        target.base,
        mca=f"{owner}.{which}.{target.label}.{leaf}",
        hf=(f"{hf}{which}.weight",),
        shard=shard,
        layout=SEPARATE,
        hf_layout=SEPARATE,
        vocab=False,
        stacked=target.stacked,
    )


def _shard_a(target: Target) -> Shard:
    return ROW if target.base.shard.axis == 1 else REPLICATED


def _shard_b(target: Target, config: McaModelConfig) -> Shard:
    base = target.base
    if base.shard.axis != 0:
        return REPLICATED
    if target.is_unfused:
        return base.shard
    if isinstance(base.layout, GroupedHeads) and base.shard == COLUMN:
        return COLUMN if config.attention.num_query_groups % config.layout.tp == 0 else REPLICATED
    if isinstance(base.layout, Concat) and base.shard.segments == base.layout.ratio:
        return COLUMN
    return REPLICATED


def _saved(config: McaModelConfig, adapter: AdapterConfig) -> Iterator[Param]:
    """Base parameters that ``modules_to_save`` names; a fused one must be named in full."""
    if not adapter.modules_to_save:
        return
    for param in _base_params(config):
        found = [adapter.saves(name) for name in param.hf_names()]
        if any(found) and param.expert is not None:
            raise McaError(
                f"modules_to_save: routed experts ({param.hf_names()[0]}) cannot be saved whole"
                "; name them in target_parameters"
            )
        if any(found) and not all(found):
            raise McaError(
                f"modules_to_save: {', '.join(param.hf_names())} make up one Megatron parameter, "
                f"{param.mca_name()}; name all of them or none"
            )
        if all(found):
            yield _with_prefix(param, "")


def _kept(config: McaModelConfig, adapter: AdapterConfig, names: Collection[str]) -> Iterator[Param]:
    """Embedding and output layer that PEFT saved unasked: resized, or themselves targets."""
    for param in _base_params(config):
        module = param.hf_names()[0].rpartition(".")[0]
        if not param.vocab or adapter.saves(param.hf_names()[0]):
            continue
        wrapped = "base_layer." if adapter.targets(module, linear=False) else ""
        found = _with_prefix(param, wrapped)
        if _is_in(found, names):
            yield found


def _with_prefix(param: Param, wrapped: str) -> Param:
    places = (name.rpartition(".") for name in param.hf_names())
    return replace(param, hf=tuple(f"{PREFIX}{owner}{dot}{wrapped}{leaf}" for owner, dot, leaf in places))


def _base_params(config: McaModelConfig) -> Iterator[Param]:
    return (param for param in named_params(config) if not param.alias_of and param.stage not in UNSAVED)


def _checked(config: McaModelConfig, adapter: AdapterConfig, rules: AdapterRules) -> AdapterRules:
    if not rules.factors:
        wanted = adapter.document.get("target_modules") or adapter.document.get("target_parameters")
        raise McaError(
            f"target_modules: {wanted} matches no linear of this {config.model_type} model"
            "; name linears as Hugging Face does (q_proj, ...), or set all-linear"
        )
    kinds = {pair.target.stacked for pair in rules.factors if pair.target.base.expert is not None}
    if len(kinds) > 1:
        raise McaError(
            "target_modules and target_parameters both name the routed experts, once one by one and once stacked; "
            "leave one out"
        )
    family = get_family(config.model_type).text(config)
    for label in sorted({pair.target.label for pair in rules.factors} & family.unadaptable):
        raise McaError(
            f"target_modules: PEFT trains no adapters on {label} of {config.model_type}; name others"
        )
    stacked = sorted({pair.target.label for pair in rules.factors if pair.target.stacked})
    if stacked and family.transposed_experts:
        raise McaError(
            f"target_parameters: PEFT's factors on {stacked[0]} of {config.model_type} have other shapes, as it does "
            "not know that the weights are stored transposed; name others"
        )
    tables = (param for param in _base_params(config) if param.vocab and param.stage is Stage.FIRST)
    embeddings = [param.hf_names()[0].removesuffix(".weight") for param in tables]
    for name in (*embeddings, *(("lm_head",) if config.head.tie_word_embeddings else ())):
        if adapter.targets(name, linear=False):
            raise McaError(f"target_modules: {name} cannot carry an adapter here; use modules_to_save")
    if config.head.tie_word_embeddings and adapter.saves("lm_head.weight"):
        raise McaError("modules_to_save: lm_head is tied to the embedding in this model; name embed_tokens")
    return rules


def factors_by_weight(factors: Sequence[LoraFactors]) -> dict[str, list[LoraFactors]]:
    """Factors by the canonical name of the Megatron weight they change."""
    found: dict[str, list[LoraFactors]] = {}
    for pair in factors:
        found.setdefault(pair.target.base.mca_name(), []).append(pair)
    return found
