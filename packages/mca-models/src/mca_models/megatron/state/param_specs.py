"""What a live model consists of, as every rank must know it before anything is sent or written.

Nothing is sent here but names, types and shapes.
"""

from dataclasses import replace

from mca_config.model_config import DtypeName
from mca_models.checkpoint.hf_writer import MAX_SHARD_BYTES, HfLayout
from mca_models.checkpoint.placement import stored
from mca_models.megatron.distributed import parallel
from mca_models.megatron.distributed.collectives import all_gather
from mca_models.megatron.factory.fill import whole_shape
from mca_models.megatron.live import LiveModel
from mca_models.megatron.state.buckets import Facts, Shape
from mca_models.megatron.tensors import CODES
from mca_models.storage.dtypes import CODES as CODE_OF
from mca_models.storage.dtypes import DTYPE_NAMES
from mca_models.templates import family_of
from mca_models.weights import Param


def params_of(models: LiveModel) -> list[Param]:
    """All parameters of the model but second copies, in checkpoint order."""
    return stored(family_of(models.config.model_type).params(models.config))


def facts_of(models: LiveModel) -> Facts:
    """What every rank holds, put together: all parameters of the model. Collective."""
    parallel.use_groups_of(models.chunks)
    mine = {
        item.param.mca_name(): (CODES[tensor.dtype], whole_shape(item.param, tensor, models.config))
        for item, tensor in models.held()
        if not item.copy
    }
    facts: dict[str, tuple[str, Shape]] = {}
    for part in all_gather(mine, parallel.whole_model_group()):
        facts |= part
    return facts


def cast_facts(params: list[Param], facts: Facts, dtype: DtypeName) -> Facts:
    """``facts`` with the type that weights are cast to."""
    return {
        param.mca_name(): (code if param.keep_fp32 or code not in DTYPE_NAMES else CODE_OF[dtype], shape)
        for param in params
        for code, shape in (facts[param.mca_name()],)
    }


def split(facts: Facts) -> tuple[dict[str, str], dict[str, Shape]]:
    """Codes and whole shapes apart."""
    return {name: code for name, (code, _) in facts.items()}, {
        name: shape for name, (_, shape) in facts.items()
    }


def hf_layout(
    models: LiveModel,
    facts: Facts,
    dtype: DtypeName | None = None,
    max_shard_bytes: int | None = None,
    *,
    fp8: bool = False,
) -> HfLayout:
    """The Hugging Face checkpoint of the model.

    Args:
        models: The model.
        facts: What it consists of.
        dtype: What it is cast to; None: nothing.
        max_shard_bytes: Limit of one file's tensors; None: the writer's own.
        fp8: Weights of linears as blocks of fp8.

    Raises:
        McaError: transformers could not read this family's weights in fp8.
    """
    config = models.config if dtype is None else replace(models.config, dtype=dtype)
    return HfLayout(params_of(models), config, *split(facts), max_shard_bytes or MAX_SHARD_BYTES, fp8=fp8)
