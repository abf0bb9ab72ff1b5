"""Offload to host memory: verl's ``param_offload`` (parameters, gradients) and ``optimizer_offload``.

A storage is copied to the host and then resized to 0 bytes, so every tensor, view and buffer that refers to it stays
valid and has its values again after the reload. This holds for Megatron's parameter and gradient buffers, for main
parameters that are views of them, and for frozen parameters outside of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage

from mca_models.megatron import platform
from mca_train.engine.engine import Pipeline
from mca_train.types import MegatronOptimizer, Upstream

Storages = dict[int, UntypedStorage]
"""Storages by the address of torch's object, which stays the same when a storage is resized."""


def storages(tensors: Iterable[Tensor], *, without: Iterable[int] = ()) -> Storages:
    """Return the storages of ``tensors`` that can be resized.

    Args:
        tensors: Tensors, some of which may share a storage.
        without: Keys of storages to leave out.
    """
    found = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    left_out = set(without)
    return {key: each for key, each in found.items() if key not in left_out and each.resizable()}


class StorageOffload:
    """Storages that are either on their device or in host memory.

    The host memory is kept for the next offload, pinned if the device is a GPU.

    Args:
        find: Function that returns the storages to offload; called at each offload.
        drops_zeros: Do not copy a storage of zeros; the reload fills it with zeros.
    """

    def __init__(self, find: Callable[[], Storages], *, drops_zeros: bool = False) -> None:
        self._find = find
        self._drops_zeros = drops_zeros
        self._host: dict[int, Tensor] = {}
        self._offloaded: list[tuple[UntypedStorage, int, Tensor | None]] = []

    @property
    def is_offloaded(self) -> bool:
        """Return whether the storages are in host memory."""
        return bool(self._offloaded)

    def offload(self) -> None:
        """Copy the storages to host memory and free them on the device."""
        if self._offloaded:
            return
        found = self._find()
        self._host = {key: copy for key, copy in self._host.items() if key in found}
        for key, storage in found.items():
            if size := storage.nbytes():
                content = _content(storage)
                zeros = self._drops_zeros and not bool(content.any())
                self._offloaded.append((storage, size, None if zeros else self._copy(key, content)))
                storage.resize_(0)

    def _copy(self, key: int, content: Tensor) -> Tensor:
        copy = self._host.get(key)
        if copy is None or len(copy) != len(content):
            copy = torch.empty_like(content, device="cpu", pin_memory=content.device.type == "cuda")
        self._host[key] = copy
        return copy.copy_(content)

    def reload(self) -> None:
        """Allocate the storages on the device and copy their values back."""
        offloaded, self._offloaded = self._offloaded, []
        for storage, size, copy in offloaded:
            storage.resize_(size)
            content = _content(storage)
            if copy is None:
                content.zero_()
            else:
                content.copy_(copy, non_blocking=True)


def _content(storage: UntypedStorage) -> Tensor:
    """Return the bytes of ``storage``, which the tensor shares."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def model_storages(pipeline: Pipeline) -> Storages:
    """Return the storages of all parameters, trained and frozen."""
    buffers = (buffer.param_data for buffer in _buffers(pipeline) if buffer.param_data is not None)
    params = (param.detach() for chunk in pipeline.chunks for param in chunk.parameters())
    return storages([*buffers, *params])


def gradient_storages(pipeline: Pipeline) -> Storages:
    """Return the storages of Megatron's gradient buffers."""
    return storages(buffer.grad_data for buffer in _buffers(pipeline))


def optimizer_storages(pipeline: Pipeline, optimizer: MegatronOptimizer) -> Storages:
    """Return the storages of main parameters and states that are neither the model's nor on the host already.

    Args:
        pipeline: With the model.
        optimizer: Megatron's, single or chained.
    """
    model = model_storages(pipeline)
    device = platform.current_device().type
    found = storages(_optimizer_tensors(optimizer), without=[*model, *gradient_storages(pipeline)])
    return {key: each for key, each in found.items() if each.device.type == device}


def _optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    for single in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner: Upstream = single.optimizer
        if inner is None:  # this rank has no parameters of the group
            continue
        for group in inner.param_groups:
            yield from (param.detach() for param in group["params"])
        for each in (inner, *getattr(inner, "sub_optimizers", ())):
            yield from _tensors(each.state.values())


def _tensors(values: Iterable[Upstream]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())


def _buffers(pipeline: Pipeline) -> Iterator[Upstream]:
    """Yield Megatron's parameter and gradient buffers; a model that is not trained has none."""
    for chunk in pipeline.chunks:
        if hasattr(chunk, "expert_parallel_buffers"):
            yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


class EngineOffload:
    """Offload of an engine's model, gradients and optimizer, each of which is reloaded when it is used.

    Args:
        pipeline: With the model.
        optimizer: Megatron's; None: the model is not trained.
        device_module: ``torch.cuda``, or verl's module of another device.
    """

    def __init__(
        self, pipeline: Pipeline, optimizer: MegatronOptimizer | None, device_module: Upstream
    ) -> None:
        self._device_module = device_module
        self._model = StorageOffload(lambda: model_storages(pipeline))
        self._grad = StorageOffload(lambda: gradient_storages(pipeline), drops_zeros=True)
        self._optimizer = StorageOffload(
            lambda: {} if optimizer is None else optimizer_storages(pipeline, optimizer)
        )

    def offload(self, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move what is asked for to host memory."""
        chosen = self._chosen(model=model, optimizer=optimizer, grad=grad)
        if not chosen:
            return
        self._device_module.synchronize()
        for each in chosen:
            each.offload()
        self._device_module.empty_cache()

    def reload(self, *, model: bool = False, optimizer: bool = False, grad: bool = False) -> None:
        """Move what is asked for back to the device."""
        for each in self._chosen(model=model, optimizer=optimizer, grad=grad):
            each.reload()

    @contextmanager
    def reloaded(self) -> Iterator[None]:
        """Reload everything within the block; offload it again after the block, also after an error in it."""
        parts = {"model": self._model, "optimizer": self._optimizer, "grad": self._grad}
        before = {name: part.is_offloaded for name, part in parts.items()}
        try:
            self.reload(model=True, optimizer=True, grad=True)
            yield
        finally:
            self.offload(**before)

    def _chosen(self, *, model: bool, optimizer: bool, grad: bool) -> list[StorageOffload]:
        parts = ((optimizer, self._optimizer), (grad, self._grad), (model, self._model))
        return [part for chosen, part in parts if chosen]
