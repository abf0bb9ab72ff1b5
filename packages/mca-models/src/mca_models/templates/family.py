"""One model family: its config table and its parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mca_config.model_config import McaModelConfig
from mca_models.templates.config_table import ConfigTable
from mca_models.weights import Param

HF_HEAD = "lm_head.weight"


def _none(config: Any) -> frozenset[str]:
    return frozenset()


@dataclass(frozen=True, kw_only=True)
class Family:
    """What mca knows of one HF ``model_type``.

    Args:
        model_type: HF's name of the family.
        architecture: The HF causal-LM class.
        config: Carries ``config.json`` both ways.
        params: Every parameter of a model, in checkpoint order.
        ignored_hf: HF tensors that old checkpoints carry and that hold no weight (computed buffers).
    """

    model_type: str
    architecture: str
    config: ConfigTable
    params: Callable[[Any], list[Param]]
    ignored_hf: Callable[[Any], frozenset[str]] = _none

    def duplicate_hf(self, config: McaModelConfig) -> Mapping[str, str]:
        """HF tensors that may be present and must then equal another one: ``{name: the other}``.

        A tied model's file may hold the output layer again.
        """
        alias = next((param for param in self.params(config) if param.alias_of), None)
        return {HF_HEAD: alias.hf_names()[0]} if alias else {}
