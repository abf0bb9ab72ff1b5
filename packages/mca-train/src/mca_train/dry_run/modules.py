"""Which module an operation belongs to, in forward passes and in backward passes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from mca_train.types import Upstream


class ModuleNames:
    """Follows the modules that run.

    A backward pass has no modules; its operations belong to those whose forward made the autograd node that runs. A
    node knows its number, and numbers go up with the operations of a forward pass.
    """

    def __init__(self) -> None:
        self._names: dict[torch.nn.Module, str] = {}
        self._stack: list[str] = []
        self._of_node: dict[int, str] = {}

    def name(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Takes the names of the modules in ``chunks``."""
        for chunk in chunks:
            self._names |= {module: name for name, module in chunk.named_modules()}

    @contextmanager
    def following(self) -> Iterator[None]:
        """A block in which the modules that run are known."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def here(self) -> tuple[str, bool]:
        """The module that runs, and whether it is its backward."""
        node: Upstream = torch._C._current_autograd_node()
        if node is not None and not self._stack:
            return self._of_node.get(node._sequence_nr(), ""), True
        name = self._stack[-1] if self._stack else ""
        self._of_node[torch._C._autograd._get_sequence_nr() - 1] = name  # the node of this operation is made
        return name, False

    def _enter(self, module: torch.nn.Module, _: object) -> None:
        self._stack.append(self._names.get(module) or (self._stack[-1] if self._stack else ""))

    def _leave(self, module: torch.nn.Module, _: object, __: object) -> None:
        self._stack.pop()
