"""Learning rate and checkpoint metadata of ROLL's strategies."""

from typing import NoReturn

from torch import Tensor

from mca_config.errors import McaError
from mca_config.training import TrainingArguments
from mca_config.types import JsonObject
from mca_train.lr_schedule import LearningRate
from mca_train.types import MegatronOptimizer


def build_sharded_state_dict_metadata(args: TrainingArguments) -> JsonObject:
    """Return the metadata of Megatron's optimizer checkpoint: shards that other layouts can read."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


class MegatronLRScheduler:
    """Hugging Face's learning rate schedule, written into the groups of Megatron's optimizer.

    Args:
        args: Arguments with the schedule.
        steps: Optimizer steps of the run.
        optimizer: Megatron's optimizer.
    """

    def __init__(self, args: TrainingArguments, steps: int, optimizer: MegatronOptimizer) -> None:
        kwargs = dict(args.lr_scheduler_kwargs or {})
        args.min_lr = kwargs.pop("min_lr", args.min_lr)
        args.lr_scheduler_kwargs = kwargs
        self._rate, self._optimizer = LearningRate(args, steps), optimizer
        self._rate.write(optimizer.param_groups)
        self._rate.write_decay(optimizer.param_groups)

    def step(self) -> None:
        """Advance by one optimizer step."""
        self._rate.step()
        self._rate.write(self._optimizer.param_groups)

    def get_last_lr(self) -> list[float]:
        """Return the rate of each parameter group."""
        return [group["lr"] for group in self._optimizer.param_groups]

    def state_dict(self) -> JsonObject:
        """Return the position in the schedule."""
        return {"scheduler": self._rate.scheduler.state_dict()}

    def load_state_dict(self, state: JsonObject) -> None:
        """Continue at the position of ``state``."""
        self._rate.move(state["scheduler"]["last_epoch"] - self._rate.scheduler.last_epoch)
        self._rate.write(self._optimizer.param_groups)


def get_megatron_lr_scheduler(
    args: TrainingArguments, num_training_steps: int, optimizer: MegatronOptimizer
) -> MegatronLRScheduler:
    """Return the schedule of ``lr_scheduler_type`` over the optimizer steps of a run.

    Raises:
        McaError: ROLL could not save the optimizer, which it would notice at the first checkpoint.
    """
    if not args.use_distributed_optimizer and not args.save_only_model:
        raise McaError(
            "use_distributed_optimizer: false is not supported with ROLL, which would fail at its first checkpoint: it "
            "calls get_data_modulo_expert_parallel_rank, which megatron-core has removed; set "
            "use_distributed_optimizer or save_only_model to true"
        )
    return MegatronLRScheduler(args, num_training_steps, optimizer)


def get_ltor_masks_and_position_ids(input_ids: Tensor) -> NoReturn:
    """Raise the error for ``compile_warmup``, which alone calls it."""
    raise McaError("compile_warmup is not supported with ROLL; set it to false")
