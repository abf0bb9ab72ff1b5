"""One adapter directory made of another: PEFT to MCA, back, or MCA to MCA of another layout.

Merging an adapter into its base model is in `merge`.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mca_config.errors import McaError, raise_problems
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_models.lora.adapter import Adapter
from mca_models.lora.config import AdapterConfig
from mca_models.lora.mca_directory import (
    is_mca_adapter,
    open_mca_adapter,
    stored_names,
    with_layout,
    write_mca_adapter,
)
from mca_models.lora.peft_directory import open_peft, stored_tensors, write_peft
from mca_models.lora.rules import AdapterRules, rules_from_names
from mca_models.storage.dtypes import numpy_dtype
from mca_models.storage.values import cast_into, counts_in, named_counts
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param
from mca_models.weights.arrays import Array

logger = logging.getLogger(__name__)

AdapterKind = Literal["mca", "hf"]
_SAME_MODEL = ("model_type", "num_layers", "hidden_size", "num_attention_heads", "num_moe_experts")


def open_adapter(path: Path, model: McaModelConfig | None = None) -> Adapter:
    """The adapter in ``path``, PEFT's or MCA's.

    Args:
        path: The directory.
        model: The base model, which a PEFT directory does not describe; an MCA adapter must be of its
            architecture and sizes if given.

    Raises:
        McaError: It is damaged, cannot be represented, or belongs to another model.
    """
    if not is_mca_adapter(path):
        if model is None:
            raise McaError(
                f"{path}: a PEFT adapter does not describe its base model; name it too (--checkpoint_path)"
            )
        return open_peft(path, model)
    adapter = open_mca_adapter(path)
    theirs, ours = adapter.model.to_fields(), (model or adapter.model).to_fields()
    for field in _SAME_MODEL:
        if theirs[field] != ours[field]:
            raise McaError(
                f"{path}: {field} of its base model is {theirs[field]}, here {ours[field]}"
                "; name the base model that the adapter was trained on"
            )
    if model is not None:
        raise_problems(list(_shape_mismatches(adapter, model)), path, shown=8)
    return adapter


def adapter_for(path: Path, model: McaModelConfig) -> Adapter:
    """The adapter in ``path`` for live ranks of ``model``, with its layout and its head.

    Raises:
        McaError: As `open_adapter`, or it holds a head for scores that the model does not have.
    """
    adapter = open_adapter(path, model)
    if adapter.model.head.num_labels is not None and model.head.num_labels is None:
        raise McaError(
            f"{path}: its adapter is of a model with a head for {adapter.model.head.head_kind}; open the base model "
            f"with head=Head(kind={adapter.model.head.head_kind!r}, ...)"
        )
    return with_layout(adapter, model.layout)


def load_adapter_rules(path: Path, model: McaModelConfig) -> tuple[AdapterConfig, AdapterRules]:
    """The configuration of the adapter in ``path``, and what ``model`` has of it; no tensor is read.

    Raises:
        McaError: It cannot be represented.
    """
    config = AdapterConfig.load(path)
    names = stored_names(path) if is_mca_adapter(path) else stored_tensors(path)[1].keys()
    return config, rules_from_names(model, config, names)


def _shape_mismatches(adapter: Adapter, model: McaModelConfig) -> Iterator[str]:
    """Yield the weights that ``adapter`` changes and whose shape in ``model`` differs, in words."""
    own = adapter.model  # whose head may be new
    model = model.replace_fields(head_kind=own.head.head_kind, num_labels=own.head.num_labels)
    changed = [*(pair.target.base for pair in adapter.rules.factors), *adapter.rules.full_params]
    for param in {param.mca_name(): param for param in changed}.values():
        its, here = full_shape(param, own), full_shape(param, model)
        if its != here:
            hint = "; resize the base model's vocabulary first" if param.vocab else ""
            yield f"{param.hf_names()[0]} of its base model has shape {list(its)}, here {list(here)}{hint}"


def convert_adapter(
    source: Path,
    destination: Path,
    *,
    model: McaModelConfig | None = None,
    to: AdapterKind | None = None,
    layout: ParallelLayout | None = None,
    cast: str | None = None,
    proceed: Callable[[Path], None] = lambda path: None,
    overwrite: bool = False,
) -> Adapter:
    """Write the adapter in ``source`` to ``destination``, bit for bit unless ``cast``.

    Args:
        source: A PEFT or an MCA adapter directory.
        destination: The new directory; absent or empty before.
        model: The base model (``checkpoint_kinds.load_model_config``); needed for a PEFT source.
        to: ``mca`` or ``hf`` (PEFT); None: the other kind than the source.
        layout: The parallel sizes of an MCA target; None: those of an MCA source, else 1.
        cast: Safetensors code (``BF16``, ``F16``, ``F32``) to cast the tensors to.
        proceed: Called with the written directory before it is put in place; raises to stop.
        overwrite: Replace an existing ``destination``.

    Returns:
        The adapter that was read.
    """
    adapter = open_adapter(source, model)
    written = cast_adapter(adapter, cast) if cast else adapter
    if cast is None and (counts := adapter.not_finite()):
        logger.warning("%s: %s; they are copied as they are", source, named_counts(counts))
    if (to or ("hf" if is_mca_adapter(source) else "mca")) == "hf":
        write_peft(written, destination, side_files=source, overwrite=overwrite, proceed=proceed)
    else:
        own = adapter.model.layout if is_mca_adapter(source) else ParallelLayout()
        write_mca_adapter(
            written, layout or own, destination, side_files=source, overwrite=overwrite, proceed=proceed
        )
    return adapter


def cast_adapter(adapter: Adapter, code: str) -> Adapter:
    """``adapter`` with its tensors in the dtype of code ``code``; reading raises if values are not finite."""
    import numpy as np

    def read(param: Param) -> Array:
        values, name = adapter.read(param), param.hf_names()[0]
        if values.dtype != numpy_dtype(code) and (counts := counts_in([(name, values)])):
            raise McaError(
                f"{named_counts(counts)}; it cannot be cast, so remove the flag or repair the adapter"
            )
        out = np.empty(values.shape, numpy_dtype(code))
        cast_into(values, out, name)
        return out

    return replace(adapter, read=read, saved_parts=None)
