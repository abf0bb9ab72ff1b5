"""Use mca's ``FusedAdam`` in Megatron's optimizers if neither Transformer Engine nor Apex is installed.

With ``torch.optim.AdamW`` the distributed optimizer cannot resume: ``state_dict()`` asserts that a step was made,
loading raises KeyError 'step', and ``load_state_dict`` lets all parameters share one step tensor, so that with three
parameters step 5 becomes 8 after one update (a silently wrong bias correction).
"""

from mca_models.megatron.platform._patch import EVERYWHERE, Patch
from mca_models.megatron.platform.fused_adam import FusedAdam


def _needed() -> bool:
    import megatron.core.optimizer as optimizer

    return bool(optimizer.USING_PYTORCH_OPTIMIZER)


def _apply() -> None:
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


PATCH = Patch(
    name="distributed-adam",
    why="the distributed optimizer cannot resume with torch.optim.AdamW",
    megatron=">=0.16.1",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
