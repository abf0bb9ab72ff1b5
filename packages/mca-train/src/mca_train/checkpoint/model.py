"""The model to and from directories that also hold other things (checkpoints, logs)."""

import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from mca_config.errors import McaError, UsageError
from mca_config.model_config import FILE_NAME, McaModelConfig
from mca_config.types import Typed
from mca_models.lora.config import FILE_NAME as ADAPTER
from mca_models.megatron.distributed.collectives import run_on_first_rank
from mca_train.checkpoint.main_params import SavedWeights, Unrounded
from mca_train.types import PreTrainedTokenizerBase, VirtualModels

if TYPE_CHECKING:
    from mca_models.megatron.peft import PeftModels

_LATEST = "latest_checkpointed_iteration.txt"  # readers begin here, so it comes last and goes first
HF_FOLDER = "hf"

_MAY_DIFFER = {
    "attention_dropout",
    "dtype",
    "extra",
    "hidden_dropout",
    "init_method_std",
    "max_position_embeddings",
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
}
"""Fields of a model that change neither its weights nor what it computes when nothing is trained."""


class ModelWriting:
    """A model on its way into a directory that also holds other things; every method is collective.

    Args:
        model: `VirtualModels`.
        folder: Made if missing; an older model in it is replaced.
        processing_class: Tokenizer to save with it, or None.
        hf: Also write ``folder/hf``, the same as a Hugging Face checkpoint, before anything else.
        settings: Of ``save_pretrained``: format, in the background or not.
    """

    def __init__(
        self,
        model: VirtualModels,
        folder: Path,
        processing_class: PreTrainedTokenizerBase,
        *,
        hf: bool = False,
        **settings: Typed,
    ) -> None:
        self._folder, self._processing_class = folder, processing_class
        self._staged = folder / ".model"
        if hf:
            staged = folder / f".{HF_FOLDER}"
            model.save_pretrained_as_hf(staged, overwrite=True)
            run_on_first_rank(lambda: self._save_tokenizer(staged))
            run_on_first_rank(lambda: _put_hf_in_place(staged, folder))
        self._pending = model.save_pretrained(self._staged, overwrite=True, **settings)

    def done(self) -> bool:
        """Whether all ranks have written their parts."""
        return self._pending is None or bool(self._pending.done())

    def finish(self) -> None:
        """Waits for them and puts the model in place."""
        if self._pending is not None:
            self._pending.finish()
        run_on_first_rank(self._put_in_place)

    def _put_in_place(self) -> None:
        self._save_tokenizer(self._staged)
        _move_up(self._staged, self._folder)

    def _save_tokenizer(self, folder: Path) -> None:
        if self._processing_class is not None:
            self._processing_class.save_pretrained(folder)


def require_format(model: VirtualModels, ckpt_format: str) -> None:
    """Raises if checkpoints of ``model`` cannot be written in ``ckpt_format``."""
    from mca_models.megatron.peft import PeftModels

    if ckpt_format != "mca" and isinstance(model, PeftModels):
        raise McaError(f"an adapter is not written as {ckpt_format}; remove ckpt_format and async_save")


def _move_up(staged: Path, folder: Path) -> None:
    """Replaces what ``staged`` has of a model; everything else in ``folder`` stays.

    The mark of an adapter does not: readers would take the new model for one.
    """
    (folder / _LATEST).unlink(missing_ok=True)
    if not (staged / ADAPTER).exists():
        (folder / ADAPTER).unlink(missing_ok=True)
    for entry in sorted(staged.iterdir(), key=lambda path: path.name == _LATEST):
        target = folder / entry.name
        if target.is_dir():
            shutil.rmtree(target)
        entry.replace(target)
    staged.rmdir()


def _put_hf_in_place(staged: Path, folder: Path) -> None:
    """Replaces the older model; files beside it that are no model's go on standing there."""
    target, older = folder / HF_FOLDER, folder / f".{HF_FOLDER}-older"
    if target.exists():
        _rescue(older, target)
        target.rename(older)
    staged.rename(target)
    _rescue(older, target)


def _rescue(older: Path, target: Path) -> None:
    """Removes ``older``, but what is no weights and not in ``target`` goes there."""
    if not older.is_dir():
        return
    for entry in older.iterdir():
        weights = entry.name.endswith((".safetensors", ".safetensors.index.json"))
        if not weights and entry.name != ADAPTER and not (target / entry.name).exists():
            entry.rename(target / entry.name)
    shutil.rmtree(older)


def load_weights(model: VirtualModels, directory: Path) -> None:
    """Fills ``model`` in place from an MCA (or Hugging Face) directory; every rank reads its own slices.

    Raises:
        McaError: Another model is there.
    """
    from mca_models.checkpoint_kinds import open_checkpoint
    from mca_models.megatron.factory import fill
    from mca_models.megatron.peft import PeftModels

    if isinstance(model, PeftModels):
        if (directory / FILE_NAME).is_file():
            text = (directory / FILE_NAME).read_text(encoding="utf-8")
            _require_same(McaModelConfig.from_json(text, str(directory / FILE_NAME)), model.config, directory)
        model.load_pretrained(directory)
        return
    source = open_checkpoint(directory)
    _require_same(source.config, model.config, directory)
    fill.require_same_names(source, model.config, str(directory))
    fill.from_source(source, model.local_params(), model.rank_context.layout, model.rank_context.coordinates)


def saved_weights(model: VirtualModels, directory: Path) -> SavedWeights:
    """What `load_weights` took; ``directory`` is opened when one is read."""
    from mca_models.megatron.peft import PeftModels

    @cache
    def reader() -> Unrounded:
        if isinstance(model, PeftModels):
            return _of_adapter(model, directory)
        return _of_model(model, directory)

    path = directory / FILE_NAME
    known = path.is_file()
    dtype = McaModelConfig.from_json(path.read_text(encoding="utf-8"), str(path)).dtype if known else None
    return SavedWeights(lambda param: reader()(param), in_fp32=dtype == "float32")


def _of_model(model: VirtualModels, directory: Path) -> Unrounded:
    from mca_models.checkpoint_kinds import open_checkpoint
    from mca_models.megatron.factory import fill

    source = open_checkpoint(directory)
    params = {id(tensor): item.param for item, tensor in model.local_params()}
    stored, place = fill.stored_in(source), model.rank_context

    def read(param: nn.Parameter) -> Tensor:
        found = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
        known = params[id(param)]
        fill.read_into(
            found, source, stored(known), fill.shard_rank_and_size(known, place.layout, place.coordinates)
        )
        return found

    return read


def _of_adapter(model: "PeftModels", directory: Path) -> Unrounded:
    from mca_models.lora import Adapter, open_adapter, with_layout
    from mca_models.megatron.factory.fill import shard_rank_and_size
    from mca_models.megatron.tensors import to_torch

    layout, at = model.config.layout, model.rank_context.coordinates
    found = with_layout(open_adapter(directory, model.config), layout)
    source = Adapter(model.config, model.adapter, model.rules, found.read)
    rules = {rule.mca_name(): rule for rule in model.rules.params}
    names = {id(tensor): name for name, tensor in model.trained_parameters()}

    def read(param: nn.Parameter) -> Tensor:
        rule = rules[names[id(param)]]
        piece = np.array(source.piece(rule, *shard_rank_and_size(rule, layout, at)))
        return to_torch(piece).to(param.device, torch.float32)

    return read


def _require_same(theirs: McaModelConfig, mine: McaModelConfig, directory: Path) -> None:
    """Raises if the two compute otherwise, or have weights of other shapes."""
    there, here = theirs.to_dict()["model"], mine.to_dict()["model"]
    different = [
        f"{name} is {there.get(name)} there, {here.get(name)} here"
        for name in sorted(there.keys() | here.keys(), key=lambda name: (name != "model_type", name))
        if name not in _MAY_DIFFER and there.get(name) != here.get(name)
    ]
    if different:
        raise UsageError(
            f"{directory}: holds another model than this run's: {'; '.join(different[:3])}; set model_name_or_path "
            "to the model that it was trained from"
        )
