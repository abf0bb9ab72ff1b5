"""Use torch's SGD even if Transformer Engine or Apex is installed, whose SGD Megatron would use.

Theirs allocates a momentum buffer for every parameter also without momentum: 4 bytes each that are never read, and
that a checkpoint has and a new optimizer does not expect. They also read their device from the first parameter of the
first group, which may be empty on a rank (IndexError), because Megatron makes the same groups on all ranks.
"""

import inspect

from mca_models.megatron.platform._patch import EVERYWHERE, Patch


def _needed() -> bool:
    import megatron.core.optimizer as optimizer

    return "import FusedSGD as SGD" in inspect.getsource(optimizer)


def _apply() -> None:
    import megatron.core.optimizer as optimizer
    from torch.optim import SGD

    optimizer.SGD = SGD


PATCH = Patch(
    name="plain-sgd",
    why="sgd of Transformer Engine and of Apex keeps a momentum that is 0, and fails where a group is empty",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
