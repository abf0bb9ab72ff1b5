"""Experts in a dry run: every one of them is sent as many tokens as every other."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

from mca_train.dry_run.fake_values import Answers
from mca_train.losses.moe_aux import routers

Routing = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def route_evenly(chunks: Iterable[torch.nn.Module], answers: Answers | None = None) -> None:
    """Has the routers of ``chunks`` send token t to experts k t, ..., k t + k - 1, counted round.

    Args:
        chunks: Megatron models.
        answers: Is told of it, where tensors have no memory; None: they have.
    """
    for router in routers(chunks):
        router.routing = _even(router.routing, answers, router.topk)


def _even(routing: Routing, answers: Answers | None, topk: int) -> Routing:
    def routed(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities, chosen = routing(*args, **kwargs)
        even = even_choice(chosen.shape[0], chosen.shape[1], topk)
        if answers is not None:
            answers.know(chosen, even)
        else:
            chosen.data.copy_(even)  # which the backward pass may have kept
        return probabilities, chosen

    return routed


def even_choice(tokens: int, experts: int, topk: int) -> torch.Tensor:
    """``[tokens, experts]`` bool: who is sent where."""
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
def known_as_arrays(answers: Answers) -> Iterator[None]:
    """A block in which tensors whose values are known can be made arrays of."""
    plain = torch.Tensor.numpy

    def either(tensor: torch.Tensor, **options: bool) -> object:
        return plain(tensor, **options) if type(tensor) is torch.Tensor else np.array(answers.listed(tensor))

    with patch.object(torch.Tensor, "numpy", either):
        yield


@contextmanager
def no_rounds_of_sinkhorn() -> Iterator[None]:
    """A block in which sinkhorn's rounds, which end by a value that nothing knows, are left out.

    Each needs the memory that is needed behind the last.
    """
    from megatron.core.transformer.moe import router

    with patch.object(router, "sinkhorn", partial(router.sinkhorn, tol=math.inf)):
        yield
