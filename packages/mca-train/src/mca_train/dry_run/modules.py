"""Attribution of operations to modules, in forward and backward passes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from mca_train.types import Upstream


class ModuleNames:
    """Tracer of the module that is running.

    A backward pass runs no modules. Its operations belong to the module whose forward created the running autograd
    node, found by the node's sequence number, which increases with the operations of a forward pass.
    """

    def __init__(self) -> None:
        self._names: dict[torch.nn.Module, str] = {}
        self._stack: list[str] = []
        self._name_by_node: dict[int, str] = {}

    def add_names(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Add the names of all modules in ``chunks``."""
        for chunk in chunks:
            self._names |= {module: name for name, module in chunk.named_modules()}

    @contextmanager
    def trace(self) -> Iterator[None]:
        """Context in which the running module is traced."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def current(self) -> tuple[str, bool]:
        """Return the name of the running module, and True in its backward pass."""
        node: Upstream = torch._C._current_autograd_node()
        if node is not None and not self._stack:
            return self._name_by_node.get(node._sequence_nr(), ""), True
        name = self._stack[-1] if self._stack else ""
        self._name_by_node[torch._C._autograd._get_sequence_nr() - 1] = (
            name  # the node of this operation exists already
        )
        return name, False

    def _enter(self, module: torch.nn.Module, _: object) -> None:
        self._stack.append(self._names.get(module) or (self._stack[-1] if self._stack else ""))

    def _leave(self, module: torch.nn.Module, _: object, __: object) -> None:
        self._stack.pop()
