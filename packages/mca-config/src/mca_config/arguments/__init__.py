"""The arguments of loading, converting and training, as plain dataclasses without transformers.

Nothing here trains or builds a model.
"""

from mca_config.arguments._constraints import needing_engine
from mca_config.arguments._training_constraints import of_float16
from mca_config.arguments.distributing import DistributingParallelArguments
from mca_config.arguments.megatron import MegatronArguments

__all__ = ["DistributingParallelArguments", "MegatronArguments", "needing_engine", "of_float16"]
