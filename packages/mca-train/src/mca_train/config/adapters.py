"""What stands against the adapter that a run asks for, before there is a model that it could be on."""

from collections.abc import Iterator
from pathlib import Path

from mca_config.errors import McaError, problems_of
from mca_config.model_config import McaModelConfig
from mca_train.config.model import adapter_of
from mca_train.config.parts import trained_parts
from mca_train.config.run_config import Settings


def adapter_problems(settings: Settings, config: McaModelConfig, *, new_head: bool) -> Iterator[str]:
    """What an adapter cannot be on the model, and a new head that one which is continued would leave as it was drawn.

    Args:
        settings: Of the run.
        config: Of the model as it is trained, with its layout.
        new_head: Whether its checkpoint has no head of that kind.
    """
    lora, path = settings.lora, settings.lora.adapter_name_or_path
    if path is not None and not Path(path).is_dir():
        return  # which is told with the other directories
    try:
        adapter = adapter_of(lora, config, trained_parts(settings.training))
    except McaError as error:
        yield from problems_of(error)
        return
    if adapter is None or path is None or not new_head:
        return
    if not any(param.mca.startswith("output_layer.") for param in adapter[1].full_params):
        yield (
            f"adapter_name_or_path: the adapter in {path} does not train the new head, score; merge it into its base "
            "model (mca-convert --merge), name the result in model_name_or_path, and set lora_rank for a new one"
        )
