"""Initialization of an adapter: its trained tensors, and the first values of a new one.

The distributions are PEFT's; values are the same on every layout. Values of an existing adapter are read, not drawn.
"""

import math
from collections.abc import Callable

import torch

from mca_config.errors import McaError
from mca_models.lora import AdapterConfig, AdapterRules
from mca_models.megatron.tensors import seeded_generator, to_numpy
from mca_models.weights import Param
from mca_models.weights.arrays import Array


def require_supported_init(adapter: AdapterConfig) -> None:
    """Raise for initialisations that need data or a decomposition of the base weights.

    Raises:
        McaError: ``init_lora_weights`` is one of them.
    """
    start = adapter.document.get("init_lora_weights", True)
    if not isinstance(start, bool) and start != "gaussian":
        raise McaError(
            f"LoraConfig: init_lora_weights {start!r} is not supported for a new adapter; use true, false or "
            "'gaussian', or make the adapter with PEFT and load it"
        )


def require_base_weights(adapter: AdapterConfig, *, merged: bool) -> None:
    """Raise if disabling the adapter would not give the base model.

    Raises:
        McaError: It is merged, or trains the base model's own parameters.
    """
    if merged:
        raise McaError("the adapter is merged; call unmerge_adapter first")
    if adapter.modules_to_save:
        raise McaError(
            "disable_adapter is not supported with modules_to_save, which trains parts of the base model; load the "
            "base model a second time as reference, or remove modules_to_save"
        )


def is_trained(param: Param, adapter: AdapterConfig, rules: AdapterRules) -> bool:
    """Return whether PEFT trains ``param``: not one that it only saved, and with MiCA only lora_A."""
    if ".lora_B." in param.mca:
        return str(adapter.document.get("init_lora_weights")).lower() != "mica"
    return all(param is not other for other in rules.kept)


def initial_values(adapter: AdapterConfig, seed: int) -> Callable[[Param, tuple[int, ...]], Array]:
    """Return a function that draws the full tensor of a factor's rule.

    lora_A is uniform as a linear's weight (normal with deviation 1 / rank if ``gaussian``); lora_B is zero,
    unless ``init_lora_weights`` is false.
    """
    start = adapter.document.get("init_lora_weights", True)

    def draw(param: Param, shape: tuple[int, ...]) -> Array:
        if ".lora_B." in param.mca and start is not False:
            return to_numpy(torch.zeros(shape))
        generator = seeded_generator(f"{seed}/{param.mca_name()}")
        values = torch.empty(shape)
        if start == "gaussian":
            return to_numpy(values.normal_(0.0, 1 / shape[0], generator=generator))
        bound = 1 / math.sqrt(shape[1])
        return to_numpy(values.uniform_(-bound, bound, generator=generator))

    return draw
