"""Checks that an adapter fits a live model; nothing is read or changed here."""

from collections.abc import Mapping
from pathlib import Path

from mca_config.errors import McaError
from mca_models.lora import AdapterRules
from mca_models.megatron.virtual_models import VirtualModels
from mca_models.weights import Param


def require_same(theirs: AdapterRules, mine: AdapterRules, directory: str | Path) -> None:
    """Raise unless the adapter of ``directory`` was trained with the tensors, ranks and scales of the live one.

    Raises:
        McaError: It has other tensors, or some of another rank or scale.
    """
    there, here = ({param.mca_name() for param in rules.params} for rules in (theirs, mine))
    if there != here:
        raise McaError(
            f"{directory}: its adapter has other tensors than this model's ({min(there ^ here)}, ...); load it "
            "with load_adapter onto the base model"
        )
    saved = _scales(theirs)
    for name, (module, rank, scale) in _scales(mine).items():
        if saved[name] != (module, rank, scale):
            _, its_rank, its_scale = saved[name]
            raise McaError(
                f"{directory}: its adapter on {module} has rank {its_rank} and scale {its_scale:g}, this model's "
                f"{rank} and {scale:g}; set lora_rank, lora_alpha and use_rslora (rank_pattern, alpha_pattern) to "
                "those that it was trained with"
            )


def _scales(rules: AdapterRules) -> Mapping[str, tuple[str, int, float]]:
    return {pair.a.mca_name(): (pair.target.module, pair.rank, pair.scale) for pair in rules.factors}


def require_new_params_saved(models: VirtualModels, rules: AdapterRules) -> None:
    """Raise unless the adapter saves the parameters that the base model's files lack, e.g. a new head.

    Raises:
        McaError: A new head, or a vocabulary with new rows, is not among its tensors.
    """
    saved = {param.mca_name() for param in rules.full_params}
    for param in models.new_params:
        if param.mca_name() not in saved:
            raise McaError(f"{_lacking(param)}, which {models.source} does not have either; {_advice(param)}")


def _lacking(param: Param) -> str:
    missing = (
        f"the new rows of {param.hf_names()[0]}" if param.vocab else f"{param.hf_names()[0]}, the new head"
    )
    return f"the adapter does not save {missing}"


def _advice(param: Param) -> str:
    if param.vocab:
        return (
            "write a larger base model first (AutoModel.from_pretrained(..., vocab_size=...).save_pretrained_as_hf), "
            "or name the embedding and the output layer in modules_to_save (lora_modules_to_save of mca-train)"
        )
    return (
        "make a new adapter with score in modules_to_save (lora_rank of mca-train, task_type SEQ_CLS or TOKEN_CLS), on "
        "a base model that the other one is merged into (mca-convert --merge)"
    )
