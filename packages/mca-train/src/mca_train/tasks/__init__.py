"""The kinds of run: one file for each, and `TASKS`, the table of them by name; a new kind adds one line.

Nothing here trains. A kind says which encoder, samples, loss and trainer belong together.
"""

from collections.abc import Iterable

from mca_train.tasks.classify import Classify
from mca_train.tasks.dpo import Dpo
from mca_train.tasks.kto import Kto
from mca_train.tasks.pretrain import Pretrain
from mca_train.tasks.reward import Reward
from mca_train.tasks.sft import Sft
from mca_train.tasks.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (Pretrain(), Sft(), Dpo(), Kto(), Reward(), Classify())}


def other_task_keys(task: Task) -> dict[str, str]:
    """Return an error for each key that another kind has and ``task`` does not."""
    return {
        key: f"for mca-train {other.name}, not {task.name}; remove the key"
        for other in reversed(TASKS.values())  # the first kind with a key wins
        for key in other.task_keys - task.task_keys
    }


def infer_task(keys: Iterable[str]) -> Task:
    """Return the kind whose own keys are among ``keys``, else sft."""
    present = set(keys)
    return next((task for task in TASKS.values() if task.task_keys & present), TASKS["sft"])
