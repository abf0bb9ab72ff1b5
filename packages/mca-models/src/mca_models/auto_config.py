"""`AutoConfig`: the configuration of a model from its directory."""

from pathlib import Path

from mca_config.model_config import McaModelConfig
from mca_models.hub import resolve_directory
from mca_models.lora.convert import load_model_config


class AutoConfig:
    """Factory of `mca_config.McaModelConfig`; it needs no torch and reads no weights."""

    @staticmethod
    def from_pretrained(path: str | Path) -> McaModelConfig:
        """Return the configuration of a model.

        Args:
            path: A Hugging Face or MCA directory, in which only the configuration must be present, or a model of the
                Hub.

        Raises:
            McaError: There is no configuration, or a model of its type or with its settings is not supported.

        Example:
            ```python
            config = AutoConfig.from_pretrained("Qwen/Qwen3-8B")
            print(config.num_layers, config.hidden_size)
            ```
        """
        return load_model_config(resolve_directory(path, "config"))
