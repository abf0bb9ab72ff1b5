"""Protocol of a live model, for saving and forward passes in modules below `VirtualModels`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.distributed.parallel import RankContext
from mca_models.megatron.names import LocalParam
from mca_models.megatron.types import MegatronConfig


class LiveModel(Protocol):
    """One rank's part of a model: `VirtualModels`, or any class with the same attributes."""

    config: McaModelConfig
    rank_context: RankContext
    megatron: MegatronConfig
    chunks: torch.nn.ModuleList
    source: Path | None

    def local_params(self) -> Sequence[tuple[LocalParam, Tensor]]:
        """Return every parameter and saved buffer of this rank with its rule, second copies included."""

    def canonical_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield checkpoint names and this rank's shards, without second copies of tied weights."""
