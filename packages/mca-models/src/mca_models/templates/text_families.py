"""Configuration tables of families whose text part may be of several families.

`vision_tower` knows how such a file is nested.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_models.templates.config_table import ConfigTable, Field, HfConfig


@dataclass(frozen=True)
class TextFamilyTable:
    """``ConfigTable`` whose text part may be of several families.

    Args:
        tables: By HF's ``model_type`` of that part.
        assumed: A part without a type is of the first.
    """

    tables: Mapping[str, ConfigTable]
    assumed: bool = False

    @cached_property
    def _first(self) -> ConfigTable:
        return next(iter(self.tables.values()))

    @property
    def fields(self) -> tuple[Field, ...]:
        """Return the fields of the first text family."""
        return self._first.fields

    def to_mca(self, hf: HfConfig) -> McaModelConfig:
        """Return the model that ``hf`` describes."""
        return self._table(hf).to_mca(hf)

    def to_hf(self, config: McaModelConfig, architecture: str) -> HfConfig:
        """Return ``config.json`` for ``config``."""
        return self.tables[config.text_model_type or ""].to_hf(config, architecture)

    def _table(self, hf: HfConfig) -> ConfigTable:
        text = hf.get("text_config")
        if self.assumed and not (isinstance(text, dict) and text.get("model_type")):
            return self._first
        kind = str(text.get("model_type") if isinstance(text, dict) else None)
        if kind not in self.tables:
            raise HfConfigError(
                f"config.json: text_config is of model_type {kind!r:.80}; supported in a {hf['model_type']} model: "
                f"{', '.join(self.tables)}"
            )
        return self.tables[kind]
