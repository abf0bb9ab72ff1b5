"""Names of ``mcore_adapter`` as ROLL's Megatron strategy and weight update import them, on top of mca.

``docs/other_programs.md`` lists what maps and what does not. The facade for LLaMA-Factory is another package of the
same name.
"""

from dataclasses import dataclass, field

from mca_config.errors import McaError
from mca_train.clients.mcore_adapter.mcore_adapter import training_args

__all__ = ["TrainingArguments"]

_OFF = (
    "compile_warmup",
    "overlap_param_gather",
    "optimizer_cpu_offload",
)


@dataclass(kw_only=True, repr=False)
class TrainingArguments(training_args.TrainingArguments):
    """Training arguments of mca with ROLL's further options and the defaults that ROLL's optimizer needs."""

    check_for_nan_in_loss_and_grad: bool = field(
        default=True, metadata={"help": "Stop at a gradient that is not finite."}
    )
    delay_grad_reduce: bool = field(default=True, metadata={"help": "Overlap reductions of all stages."})
    compile_warmup: bool = field(default=False, metadata={"help": "Must be false."})
    moe_enable_routing_replay: bool = field(
        default=False, metadata={"help": "Set by ROLL for router_replay.mode R3."}
    )

    def __post_init__(self) -> None:
        self.require_supported()
        if vars(self)["ckpt_format"] == "legacy":
            self.ckpt_format = "mca"
        super().__post_init__()
        self.optimizer = self.optimizer or "adam"
        self.use_distributed_optimizer = bool(self.use_distributed_optimizer)
        self.overlap_grad_reduce = bool(self.overlap_grad_reduce)
        if self.accumulate_allreduce_grads_in_fp32 is None:
            self.accumulate_allreduce_grads_in_fp32 = self.bf16

    def require_supported(self) -> None:
        """Raise for options that mca does not support with ROLL, which sets some after the construction."""
        for name in _OFF:
            if getattr(self, name):
                raise McaError(f"{name} is not supported with ROLL; set it to false")
