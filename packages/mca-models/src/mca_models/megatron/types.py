"""Type names for objects of megatron-core, transformers and peft, which ship no usable types.

To a type checker all of them are ``Any``. Other uses of ``Any`` are counted in
``integration_tests/system/test_architecture.py``.
"""

from typing import Any

from torch import Tensor

MegatronConfig = Any
"""``megatron.core.transformer.TransformerConfig``, or its subclass for MLA."""

GptModel = Any
"""``megatron.core.models.gpt.GPTModel``: one pipeline chunk, and the modules in it that are accessed by name."""

HfModel = Any
"""A ``transformers.PreTrainedModel``: which modules and methods it has depends on its family."""

MegatronModule = Any
"""A layer, or another module, that Megatron built from a spec."""

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
"""Mutable arguments of Megatron's constructors by name."""

WithBias = tuple[Tensor, Tensor | None]
"""Return value of most of Megatron's linears and blocks: the output, and a bias that is not added yet."""

HookOutput = Any
"""Return value of a Megatron linear: ``(y, bias)``, ``((y, x), bias)`` or ``(y, bias, x)``, by its options."""

SaveRequest = Any
"""``AsyncRequest`` of ``megatron.core.dist_checkpointing``: data to write and the functions that write it."""

DcpObject = Any
"""A planner, reader, strategy or metadata object of Megatron's and torch's distributed checkpoints."""

MarkedParameter = Any
"""A ``torch.nn.Parameter`` with the attributes that Megatron sets on parameters (``tensor_model_parallel``, ...)."""

PeftConfig = Any
"""``peft.LoraConfig``, or the contents of an ``adapter_config.json``."""

Upstream = Any
"""A module, class or method of torch or Megatron that a patch inspects or replaces."""
