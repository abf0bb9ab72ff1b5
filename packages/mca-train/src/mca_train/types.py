"""Names for what the trainer is handed: classes that are slow to import, and objects of libraries without types.

A type checker sees the classes; at run time the names stand for any object, so that nothing is imported for them.
Nothing is checked here: a wrong dataset or model is refused where it is first used.
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
"""A row of a dataset that a user gave: a mapping with ``input_ids``; or a list of such rows, packed together."""

SampleSource = Any
"""A dataset that a user gave: anything with length and index, or a stream (``IterableDataset``)."""

MegatronOptimizer = Any
"""``megatron.core.optimizer.MegatronOptimizer``: a distributed one, a plain one, or several in a chain."""

HybridOptimizer = Any
"""``HybridDeviceOptimizer`` of ``megatron.core``: an Adam of which a part is on the host."""

ImageProcessor = Any
"""An image processor of ``transformers``: called with images, it gives ``pixel_values`` and what goes with them."""

OptimizerState = Any
"""A node in the nested state of Megatron's optimizers: dicts, lists, sharded tensors and plain values."""

Router = Any
"""``megatron.core.transformer.moe.router.TopKRouter``, with what `losses` hangs on it."""

Wrapper = Any
"""``megatron.core.distributed.DistributedDataParallel`` around a chunk, with its buffers and hooks."""

Chunk = Any
"""``GPTModel``, alone or wrapped by Megatron's ``DistributedDataParallel``: the model of one virtual stage."""

Upstream = Any
"""A module, method or value of Megatron's or torch's that is replaced, watched or handed on as it is."""

Scheduler = Any
"""A schedule of ``transformers.get_scheduler``: ``torch.optim.lr_scheduler.LambdaLR``, and those of its kind."""
