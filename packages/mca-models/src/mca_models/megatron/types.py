"""Names for the objects of megatron-core, transformers and peft, which ship no types that a checker can follow.

Each name says which upstream object is meant; to a type checker all of them are ``Any``. Where else ``Any``
stands is counted in ``integration_tests/system/test_architecture.py``.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

MegatronConfig = Any
"""``megatron.core.transformer.TransformerConfig``, or its subclass for latent attention."""

GptModel = Any
"""``megatron.core.models.gpt.GPTModel``: one pipeline chunk, and the modules in it that are reached by name."""

HfModel = Any
"""A ``transformers.PreTrainedModel``: which modules and methods it has depends on its family."""

MegatronModule = Any
"""A layer, or another module, that Megatron made of a spec: what it holds depends on that spec."""

Spec = Any
"""A ``ModuleSpec``, or a node of the tree below one: dataclasses, lists, classes, partials."""

PackedSeqParams = Any
"""``megatron.core.packed_seq_params.PackedSeqParams``."""

AttnMaskType = Any
"""``megatron.core.transformer.enums.AttnMaskType``."""

GroupCollection = Any
"""``megatron.core.process_groups_config.ProcessGroupCollection``."""

ShardedState = dict[str, Any]
"""Megatron's sharded tensors and objects by name, nested."""

Settings = dict[str, Any]
"""Arguments of Megatron's constructors by name, to be changed."""

WithBias = tuple[Tensor, Tensor | None]
"""What most of Megatron's linears and blocks return: the output, and a bias that is still to be added."""

Initialise = Callable[[Tensor], object]
"""Fills a weight in place."""

HookOutput = Any
"""What a Megatron linear returns: ``(y, bias)``, ``((y, x), bias)`` or ``(y, bias, x)``, as its options demand."""

SaveRequest = Any
"""``AsyncRequest`` of ``megatron.core.dist_checkpointing``: what is to be written, and by which functions."""

DcpObject = Any
"""A planner, reader, strategy or metadata object of Megatron's and torch's distributed checkpoints."""

MarkedParameter = Any
"""A ``torch.nn.Parameter`` with the attributes that Megatron hangs on parameters (``tensor_model_parallel``, ...)."""

PeftConfig = Any
"""``peft.LoraConfig``, or the contents of an ``adapter_config.json``."""

Upstream = Any
"""A module, class or method of torch or Megatron that a patch looks into or replaces."""
