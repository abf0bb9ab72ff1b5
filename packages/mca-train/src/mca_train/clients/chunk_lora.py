"""``peft.PeftModel`` around a chunk with mca's adapter, for ROLL, which wraps and sends each chunk by itself."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.lora.targets import Target, linear_targets
from mca_models.megatron.peft import PeftModels, get_peft_model
from mca_train.types import Chunk, Upstream, VirtualModels

FACTORS = "base_model.lora."
"""Prefix of canonical names in the state of an adapted chunk, by which PEFT selects an adapter's tensors."""


class _AdaptedChunk(torch.nn.Module, BaseTunerLayer):  # type: ignore[misc]
    """PEFT's ``base_model``: PEFT takes the tensors below its children, except ``model``, for an adapter's.

    Args:
        chunk: The chunk.
        name: Name of the adapter.
        config: Its ``LoraConfig``.
    """

    def __init__(self, chunk: Chunk, name: str, config: Upstream) -> None:
        super().__init__()
        self.model, self.lora = chunk, torch.nn.Module()
        self.peft_config = {name: config}

    def __getattr__(self, name: str) -> Upstream:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(self.model, name)


class ChunkPeftModel(peft.PeftModel):  # type: ignore[misc]
    """``peft.PeftModel`` around the only chunk of a rank, whose linears have mca's adapter.

    Args:
        model: The chunk.
        peft_config: ``LoraConfig``; its ``target_modules`` become names of Hugging Face's modules.
        adapter_name: Name of the adapter.
        options: Ignored: the factors have the dtype of the model, and their optimizer keeps fp32 copies.
    """

    def __init__(
        self, model: Chunk, peft_config: Upstream, adapter_name: str = "default", **options: object
    ) -> None:
        torch.nn.Module.__init__(self)
        self._is_prompt_learning = False
        self._name = adapter_name
        self._adapted: list[PeftModels] = [model.attach_lora(peft_config)]  # in a list: it is no child module
        self.base_model = _AdaptedChunk(model, adapter_name, peft_config)

    @property
    def config(self) -> Upstream:
        """Megatron's configuration."""
        return self.base_model.model.config

    def forward(self, *args: object, **kwargs: object) -> Upstream:
        """Return the output of the chunk."""
        return self.base_model.model(*args, **kwargs)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Compute as the base model does, in this block."""
        with self._adapted[0].disable_adapter():
            yield

    def state_dict_for_save_checkpoint(self, *_: object, **__: object) -> dict[str, Tensor]:
        """Return this rank's shards of the adapter by canonical names, with PEFT's prefix and suffix."""
        return {
            f"{FACTORS}{name}.{self._name}": tensor.detach()
            for name, tensor in self._adapted[0].adapter_parameters()
        }


def attach(models: VirtualModels, config: Upstream, seed: int) -> PeftModels:
    """Attach the adapter of ``config`` to a model of one chunk.

    Args:
        models: mca's ``VirtualModels``.
        config: ``LoraConfig`` with Megatron's or Hugging Face's module names; it gets those of Hugging Face.
        seed: Seed of the adapter's random values.

    Raises:
        McaError: ROLL would adapt or save something else.
    """
    if len(models.chunks) > 1:
        raise McaError(
            "lora_target is not supported with virtual_pipeline_model_parallel_size, as ROLL adapts the first chunk "
            "only; set virtual_pipeline_model_parallel_size to 1"
        )
    if config.modules_to_save:
        names = ", ".join(config.modules_to_save)
        raise McaError(f"additional_target: {names} is not supported with ROLL on mca; remove it")
    if not isinstance(config.target_modules, str):
        config.target_modules = hf_modules(models.config, config.target_modules)
    adapted = get_peft_model(models, config, seed=seed)
    document: JsonObject = adapted.peft_config(per_expert=True)
    config.target_modules = set(document["target_modules"])  # ROLL sends it to the inference engine
    return adapted


def hf_modules(config: McaModelConfig, names: Collection[str]) -> list[str]:
    """Return ``names`` with Megatron's linears (``linear_qkv``) replaced by their Hugging Face modules, sorted."""
    found: set[str] = set()
    for name in names:
        parts = {target.label for target in linear_targets(config) if linear_name(target) == name}
        found |= parts or {name}
    return sorted(found)


def linear_name(target: Target) -> str:
    """Return the last word of the name of the module that has the Megatron weight of ``target``."""
    return target.base.mca.rpartition(".")[0].rpartition(".")[2]
