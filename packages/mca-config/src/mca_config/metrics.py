"""Which numbers of an evaluation are better when they are greater, of those that mca computes."""

from collections.abc import Mapping

from mca_config.types import HfArguments

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


def choose_direction(args: HfArguments) -> None:
    """Sets ``greater_is_better`` by what ``metric_for_best_model`` is, unless that is none of mca's or the user did."""
    if args.metric_for_best_model is None or args.greater_is_better is not None:
        return
    name = args.metric_for_best_model.removeprefix("eval_")
    own = (known for known in GREATER_IS_BETTER if name == known or name.endswith(f"_{known}"))
    known = max(own, key=len, default=None)
    args.greater_is_better = None if known is None else GREATER_IS_BETTER[known]
