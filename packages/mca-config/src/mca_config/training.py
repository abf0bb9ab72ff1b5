"""The training arguments: Hugging Face's together with Megatron's.

Only this module and `_hf_arguments` of the package need transformers.
"""

import logging
import os
from dataclasses import dataclass, fields
from typing import Literal

import torch
import transformers
from transformers.training_args import OptimizerNames

from mca_config import _hf_arguments
from mca_config.arguments import MegatronArguments
from mca_config.errors import McaError
from mca_config.metrics import choose_direction

_logger = logging.getLogger(__name__)

_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


@dataclass(kw_only=True, repr=False)
class TrainingArguments(MegatronArguments, transformers.TrainingArguments):  # type: ignore[misc]
    """Hugging Face's ``TrainingArguments`` with Megatron's parallelism, optimizer and checkpoints.

    Sizes: ``per_device_train_batch_size`` is Megatron's micro-batch size, ``gradient_accumulation_steps`` the
    number of micro-batches in a step. Ranks of one model replica share their samples, so a step has
    micro-batch size x accumulation x ``data_parallel_size`` samples (:attr:`global_train_batch_size`), not x
    ``world_size``. ``world_size`` and ``process_index`` count all processes, as in Hugging Face. A process uses
    one device: ``n_gpu`` is at most 1.

    ``bf16`` turns ``accumulate_allreduce_grads_in_fp32`` on unless that is set to false;
    ``gradient_checkpointing`` (``activation_checkpointing``) means full recomputation of every layer;
    ``optim`` sets an unset ``optimizer``; ``full_determinism`` turns ``deterministic_mode`` on;
    ``metric_for_best_model`` sets an unset ``greater_is_better``. Without a GPU ``use_cpu`` is on.

    All checks run before Hugging Face's own set-up, which may use devices and process groups.
    """

    def __post_init__(self) -> None:
        if self.bf16 and self.accumulate_allreduce_grads_in_fp32 is None:
            self.accumulate_allreduce_grads_in_fp32 = True
        # Megatron's communication order needs it; CUDA reads it at its start, which Hugging Face's set-up triggers
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if not torch.cuda.is_available():
            self.use_cpu = True  # otherwise Hugging Face treats every rank as the only process
        self._move_checkpointing_to_megatron()
        if self.full_determinism and self.deterministic_mode is None:
            self.deterministic_mode = True  # Hugging Face's own setting takes effect after the model is built
        if self.optimizer is None:
            self.optimizer = _require_optimizer(self.optim)
        choose_direction(self)
        MegatronArguments.__post_init__(self)
        transformers.TrainingArguments.__post_init__(self)

    __repr__ = transformers.TrainingArguments.__repr__

    def _move_checkpointing_to_megatron(self) -> None:
        """Replace HF's gradient checkpointing flags, with which the Trainer would recompute too, by Megatron's."""
        unset = {field.name: field.default for field in fields(self) if field.name in _CHECKPOINTING}
        enabled = [name for name in unset if getattr(self, name)]
        for name in enabled:
            setattr(self, name, unset[name])
        if enabled and self.recompute_granularity is None:
            _logger.info("%s: recomputing every layer (recompute_granularity full, uniform, 1)", enabled[0])
            self.recompute_granularity, self.recompute_method, self.recompute_num_layers = (
                "full",
                "uniform",
                1,
            )

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.bf16 and self.fp16:
            problems.append("bf16 excludes fp16; remove one of the two")
        if self.full_determinism and not self.deterministic_mode:
            problems.append("full_determinism needs deterministic_mode; remove one of the two")
        problems += _hf_arguments.problems(self)
        if not self._layout_problems() and self._virtual_size() > 1:
            problems += self._interleaving_problems()
        return problems

    def _virtual_size(self) -> int:
        if self.pipeline_model_parallel_size is None:
            return self.virtual_pipeline_model_parallel_size or 1
        return self.layout().vpp

    def _interleaving_problems(self) -> list[str]:
        """Check that the interleaved schedule can form groups of micro-batches of at least the pipeline size."""
        size, steps = self.pipeline_model_parallel_size or 1, self.gradient_accumulation_steps
        group = self.microbatch_group_size_per_vp_stage or size
        if group < size:
            return [
                f"microbatch_group_size_per_vp_stage {group} is below pipeline_model_parallel_size {size}; raise it"
            ]
        if steps < group or 0 < steps % group < size:
            return [
                f"gradient_accumulation_steps {steps} must be at least {group} and leave a remainder of 0 or of "
                f"{size} and more when divided by it, as virtual pipelining at pipeline_model_parallel_size "
                f"{size} requires; change it, for example to {-(-steps // group) * group}"
            ]
        return []

    @property
    def n_gpu(self) -> int:
        """Devices of this process: at most one, so that batch sizes are per rank."""
        return min(int(super().n_gpu), 1)

    @property
    def data_parallel_size(self) -> int:
        """Model replicas that train on different samples: world / (tp x pp x cp)."""
        return self.grid(self.world_size).data_parallel_size

    @property
    def global_train_batch_size(self) -> int:
        """Samples in one optimizer step: micro batch x accumulation x data-parallel size."""
        return int(self.train_batch_size * self.gradient_accumulation_steps * self.data_parallel_size)

    @property
    def global_eval_batch_size(self) -> int:
        """Samples in one evaluation step of all replicas."""
        return int(self.eval_batch_size * self.data_parallel_size)


def _require_optimizer(optim: str) -> Literal["adam", "sgd"]:
    name = str(OptimizerNames(optim).value)
    optimizer = _hf_arguments.megatron_optimizer(name)
    if optimizer is None:
        raise McaError(
            f"optim {name} is not supported by Megatron; use adamw_torch or sgd, or set optimizer to adam, sgd or muon"
        )
    return optimizer


@dataclass(kw_only=True, repr=False)
class Seq2SeqTrainingArguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):  # type: ignore[misc]
    """:class:`TrainingArguments` with the generation settings of Hugging Face's sequence-to-sequence ones."""

    __repr__ = transformers.TrainingArguments.__repr__
