"""Use torch's CPU random state for Megatron's "CUDA" random state.

There is only one generator then, so Megatron's check that the CPU state did not change inside a fork of the tracker
always warns; its logger is set to errors only.
"""

import logging

import torch

from mca_models.megatron.platform._patch import CPU, Patch
from mca_models.megatron.types import Upstream


def _apply() -> None:
    import megatron.core.tensor_parallel.random as random

    def get_state(device: Upstream = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Upstream = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


PATCH = Patch(
    name="rng-state",
    why="megatron-core reads and writes the CUDA generator for dropout and initialisation",
    megatron=">=0.16.1",
    devices=CPU,
    needed=lambda: True,
    apply=_apply,
)
