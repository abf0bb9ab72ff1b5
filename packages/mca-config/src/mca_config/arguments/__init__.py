"""The arguments of loading, converting and training, as plain dataclasses without transformers.

Those of training are imported on first use: a conversion starts without them.
"""

from typing import TYPE_CHECKING

from mca_config.arguments.distributing import (
    DistributingParallelArguments,
    transformer_engine_options,
    transformer_engine_problems,
)
from mca_config.lazy_names import make_lazy_getattr

if TYPE_CHECKING:
    from mca_config.arguments.megatron import MegatronArguments, float16_problems

__all__ = [
    "DistributingParallelArguments",
    "MegatronArguments",
    "float16_problems",
    "transformer_engine_options",
    "transformer_engine_problems",
]

__getattr__ = make_lazy_getattr(__name__, {"MegatronArguments": "megatron", "float16_problems": "megatron"})
