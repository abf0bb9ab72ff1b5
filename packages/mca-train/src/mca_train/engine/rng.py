"""Random states of a rank, in files without pickle."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from mca_config.errors import McaError
from mca_config.files import naming_read_errors
from mca_config.types import JsonObject, Typed
from mca_models.megatron.distributed import parallel
from mca_models.storage.safetensors import read_header
from mca_train.groups import Ranks
from mca_train.types import VirtualModels

_LAYOUT = "layout"


def seed_dropout(model: VirtualModels, seed: int) -> None:
    """Seed dropout differently on ranks with other layers or other tokens, if ``model`` has any dropout.

    Hugging Face's Trainer has just given all ranks one seed. Without dropout they keep it, for the collator.
    """
    if has_dropout(model):
        parallel.seed_device(seed, model.rank_context)


def has_dropout(model: VirtualModels) -> bool:
    """Return True if training draws random numbers in the forward pass: dropout or noise."""
    config, adapter = model.megatron, getattr(model, "adapter", None)
    drawn = [config.hidden_dropout, config.attention_dropout, config.moe_input_jitter_eps]
    if (moe := model.config.moe) is not None:
        drawn += [moe.sparse_mixer_jitter is not None, moe.input_jitter_noise]
    return any(drawn) or (adapter is not None and bool(adapter.dropout))


def save_rng(folder: Path, ranks: Ranks) -> None:
    """Write every generator's state and the layout to ``folder/rng_<rank>.safetensors``."""
    from megatron.core import tensor_parallel

    tensors = {f"megatron.{k}": v for k, v in tensor_parallel.get_cuda_rng_tracker().get_states().items()}
    tensors["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    state: Typed = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, gauss = state
    tensors["numpy"] = torch.from_numpy(keys.astype(np.int64))
    metadata = {
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps([kind, int(position), int(has_gauss), float(gauss)]),
        _LAYOUT: json.dumps(_sizes(ranks)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    save_file(copies, _file(folder, ranks.rank), metadata=metadata)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rng_{rank}.safetensors"


def _sizes(ranks: Ranks) -> JsonObject:
    """Return the sizes that decide which ranks draw alike: those that differ only in their tensor rank."""
    layout = ranks.layout
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "etp": layout.etp}
    return {"ranks": ranks.world_size} | sizes


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the dropout generators after the block.

    Transformer Engine's fused attention advances them in evaluation too, and loaders draw a seed.
    """
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = {name: state.clone() for name, state in tracker.get_states().items()}
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        tracker.set_states(states)


def matches_layout(folder: Path, ranks: Ranks) -> bool:
    """Return True if `save_rng` wrote this rank's file on the layout of this run."""
    path = _file(folder, ranks.rank)
    with naming_read_errors(path):
        return path.is_file() and json.loads(read_header(path).metadata.get(_LAYOUT, "null")) == _sizes(ranks)


def load_rng(folder: Path, ranks: Ranks) -> None:
    """Restore the state that `save_rng` wrote."""
    from megatron.core import tensor_parallel

    path = _file(folder, ranks.rank)
    with naming_read_errors(path):
        header = read_header(path)
        tensors = {name: torch.from_numpy(tensor.read()) for name, tensor in header.tensors.items()}
        values: JsonObject = {key: json.loads(text) for key, text in header.metadata.items()}
    if not {"torch", "numpy"} <= tensors.keys() or not {"python", "numpy"} <= values.keys():
        raise McaError(f"{path}: holds no random states; the checkpoint is damaged")
    version, state, gauss = values["python"]
    random.setstate((version, tuple(state), gauss))
    kind, position, has_gauss, cached = values["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    tracked = {
        name.removeprefix("megatron."): t for name, t in tensors.items() if name.startswith("megatron.")
    }
    if tracked:
        tensor_parallel.get_cuda_rng_tracker().set_states(tracked)
