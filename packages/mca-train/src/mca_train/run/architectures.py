"""Architectures of a run's models, with the head that the kind of run trains. Nothing here imports torch."""

from pathlib import Path

from mca_config.errors import McaError, UsageError, list_problems
from mca_config.model_config import McaModelConfig
from mca_models.templates.classification_head import with_head
from mca_train.config.model import model_config
from mca_train.config.run_config import Settings
from mca_train.tasks.task import Task

REFERENCE = "reference_model_name_or_path"


def read_architecture(task: Task, settings: Settings) -> tuple[McaModelConfig, McaModelConfig]:
    """Return the architectures of the model's checkpoint and of the trained model.

    Raises:
        McaError: The configuration is missing or not supported, or has a head that ``task`` does not train.
    """
    stored = model_config(settings.data.model_name_or_path)
    return stored, _with_head(task, settings, stored)


def _with_head(task: Task, settings: Settings, model: McaModelConfig) -> McaModelConfig:
    """Return ``model`` with the head that the kind of run trains."""
    if (head := task.head(settings)) is not None:
        return with_head(model, head)
    if model.head.num_labels is not None:
        raise UsageError(
            f"model_name_or_path: the model has a head for {model.head.head_kind}, mca-train {task.name} trains "
            "language models; use mca-train reward or classify, or name another model"
        )
    return model


def read_reference(
    task: Task, settings: Settings, model: McaModelConfig
) -> tuple[McaModelConfig | None, list[str]]:
    """Return the architecture of the reference model, and the problems of reading it."""
    path = task.reference(settings)
    if path is None or path == settings.data.model_name_or_path:
        return None if path is None else model, []
    if not Path(path).is_dir():
        return None, []  # reported with the other directories
    try:
        return model_config(path), []
    except McaError as error:
        return None, [f"{REFERENCE}: {problem}" for problem in list_problems(error)]
