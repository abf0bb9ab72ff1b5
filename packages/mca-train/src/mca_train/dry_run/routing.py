"""Even MoE routing for dry runs: every expert receives the same number of tokens."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from mca_models.megatron.platform import replaced
from mca_train.dry_run.fake_values import FakeValues
from mca_train.losses.moe_aux import routers

Routing = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def route_evenly(chunks: Iterable[torch.nn.Module], answers: FakeValues | None = None) -> None:
    """Make the routers of ``chunks`` send token t to experts k t, ..., k t + k - 1, modulo the number of experts.

    Args:
        chunks: Megatron models.
        answers: Known values of fake tensors, which receive the routing; None: the tensors are real.
    """
    for router in routers(chunks):
        router.routing = _even(router.routing, answers, router.topk)


def _even(routing: Routing, answers: FakeValues | None, topk: int) -> Routing:
    def routed(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities, chosen = routing(*args, **kwargs)
        even = even_routing_map(chosen.shape[0], chosen.shape[1], topk)
        if answers is not None:
            answers.set_value(chosen, even)
        else:
            chosen.data.copy_(even)  # the backward pass may have saved this tensor
        return probabilities, chosen

    return routed


def even_routing_map(tokens: int, experts: int, topk: int) -> torch.Tensor:
    """Return the routing map ``[tokens, experts]`` bool."""
    choice = np.zeros((tokens, experts), dtype=np.bool_)
    first = np.arange(tokens)[:, None] * topk
    choice[np.arange(tokens)[:, None], (first + np.arange(topk)) % experts] = True
    return _real(choice)


def _real(array: object) -> torch.Tensor:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        tensor: torch.Tensor = torch.as_tensor(array)
        return tensor


@contextmanager
def convert_known_values(answers: FakeValues) -> Iterator[None]:
    """Context in which ``Tensor.numpy`` returns the known values of fake tensors."""
    plain = torch.Tensor.numpy

    def either(tensor: torch.Tensor, **options: bool) -> object:
        return plain(tensor, **options) if type(tensor) is torch.Tensor else np.array(answers.to_list(tensor))

    with replaced(torch.Tensor, "numpy", either):
        yield


@contextmanager
def skip_sinkhorn_iterations() -> Iterator[None]:
    """Context in which Sinkhorn routing stops after one iteration, as its tolerance test needs real values.

    Each iteration needs the same memory.
    """
    from megatron.core.transformer.moe import router

    with replaced(router, "sinkhorn", partial(router.sinkhorn, tol=math.inf)):
        yield
