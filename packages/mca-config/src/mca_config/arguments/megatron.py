"""Arguments of training and saving with Megatron, in addition to the layout.

`mca_config.training` adds the arguments of Hugging Face.
"""

from mca_config.arguments import _training_constraints
from mca_config.arguments.distributing import DistributingParallelArguments
from mca_config.arguments.options import coerce_options
from mca_config.arguments.training_options import TrainingOptions
from mca_config.types import JsonObject

_DDP_NAMES = {
    "use_distributed_optimizer": "use_distributed_optimizer",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
    "ddp_bucket_size": "bucket_size",
    "ddp_average_in_collective": "average_in_collective",
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "check_for_nan_in_grad": "check_for_nan_in_grad",
    "num_distributed_optimizer_instances": "num_distributed_optimizer_instances",
}
_OPTIMIZER_NAMES = (
    "optimizer",
    "use_distributed_optimizer",
    "overlap_param_gather",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "use_torch_optimizer_for_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
    "use_precision_aware_optimizer",
    "sgd_momentum",
    "decoupled_lr",
    "decoupled_min_lr",
    "min_lr",
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
)


class MegatronArguments(DistributingParallelArguments, TrainingOptions):
    """Gradients, optimizer, batches and checkpoints of a training run. None: Megatron's own default."""

    def __post_init__(self) -> None:
        coerce_options(self, TrainingOptions)
        super().__post_init__()

    def _problems(self) -> list[str]:
        return super()._problems() + _training_constraints.find_problems(self)

    def ddp_config_overrides(self) -> JsonObject:
        """Return all set values, under the names of Megatron's ``DistributedDataParallelConfig``."""
        values = {megatron_name: getattr(self, name) for name, megatron_name in _DDP_NAMES.items()}
        return {name: value for name, value in values.items() if value is not None}

    def optimizer_config_overrides(self) -> JsonObject:
        """Return all set values, under the names of Megatron's ``OptimizerConfig``."""
        values = {name: getattr(self, name) for name in _OPTIMIZER_NAMES}
        return {name: value for name, value in values.items() if value is not None}
