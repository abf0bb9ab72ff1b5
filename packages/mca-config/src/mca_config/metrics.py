"""Direction of mca's evaluation metrics: whether a greater value is better."""

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
"""Direction by name of the metric, without ``eval_`` and the name of a dataset."""


def choose_direction(args: HfArguments) -> None:
    """Set ``greater_is_better`` for ``metric_for_best_model`` if it is a metric of mca and the user set no value."""
    if args.metric_for_best_model is None or args.greater_is_better is not None:
        return
    name = args.metric_for_best_model.removeprefix("eval_")
    matches = (metric for metric in GREATER_IS_BETTER if name == metric or name.endswith(f"_{metric}"))
    metric = max(matches, key=len, default=None)
    args.greater_is_better = None if metric is None else GREATER_IS_BETTER[metric]
