"""Which numbers of an evaluation are better when they are greater, of those that mca computes."""

from collections.abc import Mapping

GREATER_IS_BETTER: Mapping[str, bool] = {
    "loss": False,
    "runtime": False,
    "samples_per_second": True,
    "steps_per_second": True,
    "rewards/chosen": True,
    "rewards/rejected": False,
    "rewards/accuracies": True,
    "rewards/margins": True,
    "logps/chosen": True,
    "logps/rejected": False,
    "kl": False,
    "accuracy": True,
    "mean_absolute_error": False,
    "margin": True,
    "mean_reward": True,
    "min_reward": True,
    "max_reward": True,
}
"""By name, without ``eval_`` and the name of a dataset."""


def greater_is_better(metric: str) -> bool | None:
    """Whether greater numbers of ``metric_for_best_model`` are better ones; None: it is none of mca's own."""
    name = metric.removeprefix("eval_")
    own = (known for known in GREATER_IS_BETTER if name == known or name.endswith(f"_{known}"))
    known = max(own, key=len, default=None)
    return None if known is None else GREATER_IS_BETTER[known]
