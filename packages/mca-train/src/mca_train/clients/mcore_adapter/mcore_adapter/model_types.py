"""Model types that LLaMA-Factory passes to mca."""

import sys

from mca_models.templates import FAMILIES

_CONSTANTS = "llamafactory.extras.constants"


def accept_model_types() -> None:
    """Add mca's model types to LLaMA-Factory's list, which has those of ROLL's ``mcore_adapter``.

    Its workflow raises an error for others after it has read the dataset.
    """
    if (constants := sys.modules.get(_CONSTANTS)) is not None:
        constants.__dict__["MCA_SUPPORTED_MODELS"].update(FAMILIES)
