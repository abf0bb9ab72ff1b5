"""`TASKS` has the kinds of run that ``mca-train`` knows, by name, and a new kind is one line of it.

What a kind is made of stands in its own file.
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
    """What to say of the keys that ``task`` does not understand and another kind does."""
    return {
        key: f"for mca-train {other.name}, not {task.name}; remove the key"
        for other in reversed(TASKS.values())  # the first that knows a key is named
        for key in other.task_keys - task.task_keys
    }


def infer_task(keys: Iterable[str]) -> Task:
    """The kind that is meant by a configuration with ``keys``: the one that has some of its own there, else sft."""
    given = set(keys)
    return next((task for task in TASKS.values() if task.task_keys & given), TASKS["sft"])
