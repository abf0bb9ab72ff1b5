"""The arguments of loading, converting and training, as plain dataclasses without transformers."""

from mca_config.arguments._constraints import transformer_engine_problems
from mca_config.arguments._training_constraints import float16_problems
from mca_config.arguments.distributing import DistributingParallelArguments
from mca_config.arguments.megatron import MegatronArguments

__all__ = [
    "DistributingParallelArguments",
    "MegatronArguments",
    "float16_problems",
    "transformer_engine_problems",
]
