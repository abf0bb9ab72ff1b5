"""The training arguments: Hugging Face's together with Megatron's.

Only this module of the package needs transformers.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers
from transformers.trainer_pt_utils import AcceleratorConfig

from mca_config.arguments import MegatronArguments
from mca_config.training_checks import CheckedArguments, report_problems
from mca_config.types import Typed


@dataclass(kw_only=True, repr=False)
class TrainingArguments(CheckedArguments, transformers.TrainingArguments):  # type: ignore[misc]
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
        # Megatron's communication order needs it; CUDA reads it at its start, which Hugging Face's set-up triggers
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if not torch.cuda.is_available():
            self.use_cpu = True  # otherwise Hugging Face treats every rank as the only process
        self.derive_settings()
        MegatronArguments.__post_init__(self)
        transformers.TrainingArguments.__post_init__(self)

    __repr__ = transformers.TrainingArguments.__repr__

    def _problems(self) -> list[str]:
        return [
            *super()._problems(),
            *_accelerator_problems(self.accelerator_config),
            *_report_problems(self.report_to),
        ]

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


def _accelerator_problems(value: Typed) -> Iterator[str]:
    """Report non-default accelerate settings; a copy of the arguments always has the defaults."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.lstrip().startswith("{") else {value: True}
        except json.JSONDecodeError:
            value = {value: True}
    values = value.to_dict() if isinstance(value, AcceleratorConfig) else value or {}
    defaults = AcceleratorConfig().to_dict()
    changed = [name for name, entry in values.items() if name not in defaults or entry != defaults[name]]
    if changed:
        yield f"accelerator_config ({', '.join(changed)}) is not supported (accelerate is not used); remove it"


def _report_problems(report_to: Typed) -> Iterator[str]:
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    def is_installed(
        name: str,
    ) -> bool:  # looks for the packages of all integrations, so only if one is named
        return name in get_available_reporting_integrations()

    return report_problems(report_to, INTEGRATION_TO_CALLBACK, is_installed)


@dataclass(kw_only=True, repr=False)
class Seq2SeqTrainingArguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):  # type: ignore[misc]
    """:class:`TrainingArguments` with the generation settings of Hugging Face's sequence-to-sequence ones."""

    __repr__ = transformers.TrainingArguments.__repr__
