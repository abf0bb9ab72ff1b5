"""Save and load the model in directories that also hold other files (checkpoints, logs)."""

import shutil
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mca_config.errors import McaError, UsageError
from mca_config.model_config import FILE_NAME, McaModelConfig
from mca_config.types import Typed
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.lora import Adapter, open_adapter, with_layout
from mca_models.lora.config import FILE_NAME as ADAPTER
from mca_models.megatron.distributed.collectives import run_on_first_rank
from mca_models.megatron.factory import fill
from mca_models.megatron.factory.fill import shard_rank_and_size
from mca_models.megatron.peft import PeftModels
from mca_models.megatron.tensors import to_torch
from mca_train.checkpoint.optimizer_state import ReadFp32
from mca_train.checkpoint.output_files import HF_FOLDER
from mca_train.types import PreTrainedTokenizerBase, VirtualModels

_LATEST = "latest_checkpointed_iteration.txt"  # readers start here, so it is written last and deleted first

_MAY_DIFFER = {
    "attention_dropout",
    "dtype",
    "extra",
    "hf_config",
    "hidden_dropout",
    "init_method_std",
    "layout",
    "max_position_embeddings",
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
}
"""Fields that change neither the weights nor the forward pass in evaluation."""


class ModelWriter:
    """Writes a model into a directory that also holds other files; every method is collective.

    Args:
        model: `VirtualModels`.
        folder: Created if missing; an older model in it is replaced.
        processing_class: Tokenizer to save with it, or None.
        hf: Also write ``folder/hf``, the same model as a Hugging Face checkpoint, first.
        settings: Options of ``save_pretrained``: format, in the background or not.
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
            run_on_first_rank(lambda: _install_hf(staged, folder))
        self._pending = model.save_pretrained(self._staged, overwrite=True, **settings)

    def done(self) -> bool:
        """Return True if all ranks have written their files."""
        return self._pending is None or bool(self._pending.done())

    def finish(self) -> None:
        """Wait for the files and move the model into the directory."""
        if self._pending is not None:
            self._pending.finish()
        run_on_first_rank(self._install)

    def _install(self) -> None:
        self._save_tokenizer(self._staged)
        _move_up(self._staged, self._folder)

    def _save_tokenizer(self, folder: Path) -> None:
        if self._processing_class is not None:
            self._processing_class.save_pretrained(folder)


def require_format(model: VirtualModels, ckpt_format: str) -> None:
    """Raise if checkpoints of ``model`` cannot be written in ``ckpt_format``."""
    if ckpt_format != "mca" and isinstance(model, PeftModels):
        raise McaError(
            f"ckpt_format {ckpt_format} is not supported with an adapter; remove ckpt_format and async_save"
        )


def _move_up(staged: Path, folder: Path) -> None:
    """Replace the model's files in ``folder`` by those in ``staged``; other files stay.

    A stale adapter configuration is deleted, because readers would take the new model for an adapter.
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


def _install_hf(staged: Path, folder: Path) -> None:
    """Replace the older HF model; other files in its directory stay."""
    target, older = folder / HF_FOLDER, folder / f".{HF_FOLDER}-older"
    if target.exists():
        _keep_other_files(older, target)
        target.rename(older)
    staged.rename(target)
    _keep_other_files(older, target)


def _keep_other_files(older: Path, target: Path) -> None:
    """Delete ``older`` after moving files that are not weights and not in ``target``."""
    if not older.is_dir():
        return
    for entry in older.iterdir():
        weights = entry.name.endswith((".safetensors", ".safetensors.index.json"))
        if not weights and entry.name != ADAPTER and not (target / entry.name).exists():
            entry.rename(target / entry.name)
    shutil.rmtree(older)


def load_weights(model: VirtualModels, directory: Path) -> None:
    """Fill ``model`` in place from an MCA (or Hugging Face) directory; every rank reads its own slices.

    Raises:
        McaError: The directory holds another model.
    """
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


def saved_weights(model: VirtualModels, directory: Path) -> ReadFp32:
    """Return a reader of the weights that `load_weights` loaded; ``directory`` is opened on the first read."""

    @cache
    def reader() -> ReadFp32:
        if isinstance(model, PeftModels):
            return _adapter_reader(model, directory)
        return _model_reader(model, directory)

    return lambda param: reader()(param)


def _model_reader(model: VirtualModels, directory: Path) -> ReadFp32:
    source = open_checkpoint(directory)
    params = {id(tensor): item.param for item, tensor in model.local_params()}
    stored, place = fill.stored_in(source), model.rank_context

    def read(param: nn.Parameter) -> Tensor:
        values = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
        rule = params[id(param)]
        shard = fill.shard_rank_and_size(rule, place.layout, place.coordinates)
        fill.read_into(values, source, stored(rule), shard)
        return values

    return read


def _adapter_reader(model: "PeftModels", directory: Path) -> ReadFp32:
    layout, at = model.config.layout, model.rank_context.coordinates
    adapter = with_layout(open_adapter(directory, model.config), layout)
    source = Adapter(model.config, model.adapter, model.rules, adapter.read)
    rules = {rule.mca_name(): rule for rule in model.rules.params}
    names = {id(tensor): name for name, tensor in model.trained_parameters()}

    def read(param: nn.Parameter) -> Tensor:
        rule = rules[names[id(param)]]
        piece = np.array(source.piece(rule, *shard_rank_and_size(rule, layout, at)))
        return to_torch(piece).to(param.device, torch.float32)

    return read


def _require_same(theirs: McaModelConfig, mine: McaModelConfig, directory: Path) -> None:
    """Raise if the two models compute differently or have other shapes."""
    saved, current = theirs.to_fields(), mine.to_fields()
    different = [
        f"{name} is {saved.get(name)} there, {current.get(name)} here"
        for name in sorted(saved.keys() | current.keys(), key=lambda name: (name != "model_type", name))
        if name not in _MAY_DIFFER and saved.get(name) != current.get(name)
    ]
    if different:
        raise UsageError(
            f"{directory}: holds another model than this run's: {'; '.join(different[:3])}; set model_name_or_path "
            "to the model that it was trained from"
        )
