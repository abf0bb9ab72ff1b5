"""Keys of a configuration that contradict one another, found before a model or a file is read."""

from collections.abc import Iterator
from typing import Any

from mca_config.errors import McaError
from mca_train.lr_schedule import schedule_problems


def contradictions(values: dict[str, Any], training: Any, data: Any) -> Iterator[str]:
    """What is wrong with a run whatever it trains.

    Args:
        values: As given.
        training: Training arguments.
        data: Model and files.
    """
    if data.streaming and training.max_steps <= 0:
        yield "streaming needs max_steps: a stream has no length"
    if values.get("do_train", True) is not True and not training.do_train:
        yield "do_train is false, but mca-train trains; remove it"
    if values.get("do_eval", True) is not True and not training.do_eval and data.eval_file:
        yield "do_eval is false, but eval_file is set, which is evaluated at the end; remove one of the two"
    if not data.eval_file:
        yield from _without_evaluation(values, training)
    if training.load_best_model_at_end and training.eval_strategy == "no":
        yield "load_best_model_at_end is true, but eval_strategy is no: no model is the best; set it or remove the key"
    yield from schedule_problems(training)


def _without_evaluation(values: dict[str, Any], training: Any) -> Iterator[str]:
    asked = {
        f"eval_strategy is {training.eval_strategy.value}": training.eval_strategy != "no",
        "eval_on_start is true": training.eval_on_start,
        "do_eval is true": "do_eval" in values and training.do_eval and training.eval_strategy == "no",
    }
    yield from (
        f"{what}, but eval_file is not set; set it or remove {what.split()[0]}"
        for what, on in asked.items()
        if on
    )


def require_backend(given: Any) -> None:
    """Refuses a ``ddp_backend`` that is not what ranks of this machine talk over.

    Raises:
        McaError: It is another.
    """
    from mca_models.megatron import platform

    usual = platform.backend()
    if given not in (None, usual):
        raise McaError(f"ddp_backend is {given!r}; ranks of this machine talk over {usual}; remove it")
