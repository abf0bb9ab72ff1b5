"""A language model as the model with a head for scores that an adapter was trained on, which holds that head itself.

``mca-train reward`` and ``classify`` train such adapters, and PEFT's ``SEQ_CLS`` and ``TOKEN_CLS`` are.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mca_config.errors import McaError
from mca_config.model.head import HeadKind
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.checkpoint.placement import stored_params
from mca_models.lora.adapter import Adapter
from mca_models.storage.byte_ranges import Gather, Shape
from mca_models.storage.copy_plan import HF, Side
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import ComputedTensor, ModelSource, Part, plan_gathers
from mca_models.templates import get_family
from mca_models.templates.classification_head import SCORE, Head, label_names, with_head
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param

_TASKS: dict[str, HeadKind] = {"SEQ_CLS": "sequence_classification", "TOKEN_CLS": "token_classification"}


def model_with_head(model: McaModelConfig, adapter: Values, tensors: Values) -> McaModelConfig:
    """``model``, or that with the head which a PEFT adapter holds.

    Args:
        model: The base model.
        adapter: PEFT's configuration.
        tensors: What is stored, by name.
    """
    kind = _TASKS.get(str(adapter.get("task_type")))
    own = next((info for name, info in tensors.items() if name.endswith(f".{SCORE}.weight")), None)
    if kind is None or own is None or model.head.num_labels is not None:
        return model
    labels = tuple(f"LABEL_{number}" for number in range(own.shape[0]))
    return with_head(model, Head(kind=kind, labels=labels))


def with_adapter_head(base: ModelSource, adapter: Adapter) -> ModelSource:
    """``base``, or that with the head of the model that ``adapter`` was trained on, if only this one scores.

    Raises:
        McaError: The adapter does not hold it.
    """
    model = adapter.model
    if model.head.num_labels is None or base.config.head.num_labels is not None:
        return base
    source = ScoredSource(base, with_head(base.config, _head_config(model, model.head.head_kind)))
    for param in filter(_is_head, source.params):
        if param.mca_name() not in adapter.saved_by_name:
            raise McaError(
                f"the adapter was trained on a model with {param.hf[0]}, which neither it nor {base.path} has; "
                "name the model that it was trained on"
            )
    return source


def _head_config(model: McaModelConfig, kind: HeadKind) -> Head:
    hf = model.hf_config
    return Head(
        kind=kind,
        labels=label_names(model),
        problem_type=hf.get("problem_type"),
        pad_token_id=hf.get("pad_token_id"),
    )


class ScoredSource:
    """A ``ModelSource`` whose head has a place, but no values: whoever merges an adapter has these.

    Args:
        base: A language model, opened.
        config: The same with a head for scores.
    """

    def __init__(self, base: ModelSource, config: McaModelConfig) -> None:
        self._base, self.config = base, config
        self.path: Path = base.path
        self.params: Sequence[Param] = stored_params(get_family(config.model_type).params(config))

    def side(self, param: Param) -> Side:
        """Return the side of ``param``'s rule that its parts are on."""
        return HF if _is_head(param) else self._base.side(param)

    def parts(self, param: Param) -> tuple[Part, ...]:
        """Return the parts of ``param``; those of the head have the dtype of the embedding."""
        if not _is_head(param):
            return self._base.parts(param)
        like, shape = self._base.parts(self._base.params[0])[0].info, self.full_shape(param)
        return (Part(TensorInfo(param.hf[0], like.dtype, shape, 0, 0, like.file), shape),)

    def full_shape(self, param: Param) -> Shape:
        """Return the full shape of ``param``, without vocabulary padding."""
        return full_shape(param, self.config) if _is_head(param) else self._base.full_shape(param)

    def gathers(self, param: Param, side: Side) -> tuple[Gather, ...]:
        """Plan how to fill the tensors of ``side`` that hold ``param``."""
        if _is_head(param):
            return plan_gathers(param, self.full_shape(param), HF, side)
        return self._base.gathers(param, side)

    def check_duplicates(self) -> None:
        """Check that tensors stored several times are equal."""
        self._base.check_duplicates()

    def checksums(self) -> Mapping[Path, int]:
        """Return the CRC-32 of each file, where known."""
        return self._base.checksums()

    def tensors(self) -> "Iterable[TensorInfo | ComputedTensor]":
        """Return the stored tensors of the language model."""
        return self._base.tensors()


def _is_head(param: Param) -> bool:
    return param.hf[0].startswith(f"{SCORE}.")
