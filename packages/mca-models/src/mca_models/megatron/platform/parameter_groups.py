"""Keep parameter groups that differ only in learning rate separate when optimizer state is loaded.

Megatron identifies the groups of a saved state by some of their keys, but not by ``max_lr`` and ``min_lr``. With
``decoupled_lr`` two groups then count as one: the non-distributed optimizer raises ("a parameter group that doesn't
match the size of optimizer's group"), and the distributed one silently continues with one group's rate for both.
"""

from mca_models.megatron.platform._patch import EVERYWHERE, Patch

_RATES = ("max_lr", "min_lr")


def _needed() -> bool:
    from megatron.core.optimizer import distrib_optimizer, optimizer

    known = (optimizer.param_group_identifier_keys, distrib_optimizer.param_group_identifier_keys)
    return not all(name in keys for keys in known for name in _RATES)


def _apply() -> None:
    from megatron.core.optimizer import distrib_optimizer, optimizer

    keys = optimizer.param_group_identifier_keys
    both = (*keys, *(name for name in _RATES if name not in keys))
    optimizer.param_group_identifier_keys = distrib_optimizer.param_group_identifier_keys = both


PATCH = Patch(
    name="parameter-groups",
    why="a state whose groups differ in their learning rate alone is loaded into the wrong ones, or not at all",
    megatron=">=0.16.1,<0.19",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
