"""Errors about a case before a rank is started: the only rules that the draw obeys."""

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassClassValidationError

from harness import prepare_parent
from mca_config.checks import require_layout
from mca_config.errors import McaError
from net.case import Case
from net.ours import trainer_settings
from net.truth import model_config
from train_cases import arguments


class NoSuchModel(Exception):
    """transformers cannot make the case's model."""


def require_layable(case: Case) -> tuple[Any, Any]:
    """The arguments and the architecture, which fit each other.

    Raises:
        McaError: The product's line.
        NoSuchModel: There is none.
    """
    args = arguments(Path("unused"), **trainer_settings(case))
    try:
        config = model_config(case)
    except StrictDataclassClassValidationError as error:
        raise NoSuchModel(" ".join(str(error).split())) from error
    require_layout(config, args.layout(), case.ranks)
    return args, config


def is_admitted(case: Case) -> bool:
    """Return True if a case has no error, also from Megatron's configuration."""
    prepare_parent()
    from mca_models.megatron.factory.transformer_config import transformer_config

    try:
        args, config = require_layable(case)
        transformer_config(config, args, args.layout(), "float32")
    except (McaError, NoSuchModel):
        return False
    return True
