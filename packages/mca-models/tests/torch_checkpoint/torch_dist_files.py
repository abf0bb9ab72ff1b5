"""Checkpoints of ``torch_dist`` as torch itself writes them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family

State = dict[str, Any]


def by_layer(config: McaModelConfig, hf: dict[str, torch.Tensor]) -> State:
    """Every parameter under its own name; experts stacked."""
    state: dict[str, Any] = {}
    for param in get_family(config.model_type).params(config):
        if param.alias_of is not None:
            continue
        whole = param.to_full([hf[name] for name in param.hf_names()]).clone()
        name = param.mca_name()
        if param.expert is None:
            state[name] = whole
        else:
            state.setdefault(
                name.replace(".experts.", ".experts.experts.").removesuffix(str(param.expert)), []
            ).append(whole)
    return {name: torch.stack(value) if isinstance(value, list) else value for name, value in state.items()}


def save(path: Path, state: State) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return path
