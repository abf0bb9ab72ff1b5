"""Type aliases for inputs of the trainer: classes that are slow to import, and objects of libraries without types.

A type checker uses the classes; at run time the names are ``object`` or ``Any``, so that nothing is imported for them.
"""

from typing import TYPE_CHECKING, Any

__all__ = [
    "Chunk",
    "HybridOptimizer",
    "ImageProcessor",
    "MegatronOptimizer",
    "OptimizerState",
    "PreTrainedTokenizerBase",
    "Router",
    "Sample",
    "SampleSource",
    "Scheduler",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "Upstream",
    "VirtualModels",
    "Wrapper",
]

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainerControl, TrainerState

    from mca_config.training import TrainingArguments
    from mca_models.megatron.virtual_models import VirtualModels
else:
    PreTrainedTokenizerBase = TrainerControl = TrainerState = TrainingArguments = VirtualModels = object

Sample = Any
"""A row of a user's dataset: a mapping with ``input_ids``, or a list of such rows that are packed together."""

SampleSource = Any
"""A user's dataset: an object with length and index, or a stream (``IterableDataset``)."""

MegatronOptimizer = Any
"""``megatron.core.optimizer.MegatronOptimizer``: a distributed one, a plain one, or several in a chain."""

HybridOptimizer = Any
"""``HybridDeviceOptimizer`` of ``megatron.core``: Adam with a part of its state on the host."""

ImageProcessor = Any
"""An image processor of ``transformers``, which returns ``pixel_values`` and further inputs of the vision tower."""

OptimizerState = Any
"""A node in the nested state of Megatron's optimizers: dicts, lists, sharded tensors and plain values."""

Router = Any
"""``megatron.core.transformer.moe.router.TopKRouter``, with the attributes that `losses` adds."""

Wrapper = Any
"""``megatron.core.distributed.DistributedDataParallel`` around a chunk, with its buffers and hooks."""

Chunk = Any
"""``GPTModel``, alone or wrapped by Megatron's ``DistributedDataParallel``: the model of one virtual stage."""

Upstream = Any
"""A module, method or value of Megatron or torch that is replaced, observed or passed on unchanged."""

Scheduler = Any
"""A scheduler of ``transformers.get_scheduler``, such as ``torch.optim.lr_scheduler.LambdaLR``."""
