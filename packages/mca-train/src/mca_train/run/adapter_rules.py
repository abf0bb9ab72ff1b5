"""Rules of a run about its LoRA adapter and the architecture of the model. They import no torch."""

from collections.abc import Collection, Iterator
from pathlib import Path

from mca_config.errors import McaError, list_problems
from mca_config.model_config import McaModelConfig
from mca_train.config.model import make_adapter
from mca_train.config.run_config import Settings


def adapter_problems(
    settings: Settings, config: McaModelConfig, parts: Collection[str], *, new_head: bool
) -> Iterator[str]:
    """Yield the problems of the adapter with the model, including a new head that a continued adapter does not train.

    Args:
        settings: Settings of the run.
        config: Configuration of the trained model, with its layout.
        parts: Trained parts of a multimodal model.
        new_head: The checkpoint has no head of the trained kind.
    """
    lora, path = settings.lora, settings.lora.adapter_name_or_path
    if path is not None and not Path(path).is_dir():
        return  # reported with the other directories
    try:
        adapter = make_adapter(lora, config, parts)
    except McaError as error:
        yield from list_problems(error)
        return
    if adapter is None or path is None or not new_head:
        return
    if not any(param.mca.startswith("output_layer.") for param in adapter[1].full_params):
        yield (
            f"adapter_name_or_path: the adapter in {path} does not train the new head, score; merge it into its base "
            "model (mca-convert --merge), name the result in model_name_or_path, and set lora_rank for a new one"
        )
