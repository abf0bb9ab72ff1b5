"""What saving and the forward pass need of a live model, so that neither knows the class that offers them.

Nothing is implemented here.
"""

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
    """One rank's part of a model: `VirtualModels`, or anything with the same parts."""

    config: McaModelConfig
    rank_context: RankContext
    megatron: MegatronConfig
    chunks: torch.nn.ModuleList
    source: Path | None

    def local_params(self) -> Sequence[tuple[LocalParam, Tensor]]:
        """Every parameter and saved buffer of this rank with its rule, second copies included."""

    def canonical_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names and this rank's pieces, without second copies of tied weights."""
