"""Dtypes and shapes of all parameters, which every rank needs before weights are sent or written.

Only names, dtypes and shapes are communicated here.
"""

from mca_config.model_config import DtypeName
from mca_models.checkpoint.placement import stored_params
from mca_models.megatron.distributed import parallel
from mca_models.megatron.distributed.collectives import all_gather
from mca_models.megatron.distributed.parallel import LiveModel
from mca_models.megatron.factory.fill import full_shape
from mca_models.megatron.state.buckets import ParamSpecs, Shape
from mca_models.megatron.tensors import CODES
from mca_models.storage.dtypes import CODES as CODE_OF
from mca_models.storage.dtypes import DTYPE_NAMES
from mca_models.templates import get_family
from mca_models.weights import Param


def model_params(models: LiveModel) -> list[Param]:
    """Return all parameters of the model except second copies, in checkpoint order."""
    return stored_params(get_family(models.config.model_type).params(models.config))


def gather_param_specs(models: LiveModel) -> ParamSpecs:
    """Gather the specs of all parameters of the model. Collective."""
    parallel.activate_process_groups(models.chunks)
    mine = {
        item.param.mca_name(): (CODES[tensor.dtype], full_shape(item.param, tensor, models.config))
        for item, tensor in models.local_params()
        if not item.copy
    }
    specs: dict[str, tuple[str, Shape]] = {}
    for part in all_gather(mine, parallel.whole_model_group()):
        specs |= part
    return specs


def cast_param_specs(params: list[Param], specs: ParamSpecs, dtype: DtypeName) -> ParamSpecs:
    """Return ``specs`` with the dtype that weights are cast to."""
    return {
        param.mca_name(): (code if param.keep_fp32 or code not in DTYPE_NAMES else CODE_OF[dtype], shape)
        for param in params
        for code, shape in (specs[param.mca_name()],)
    }


def split_specs(specs: ParamSpecs) -> tuple[dict[str, str], dict[str, Shape]]:
    """Split into codes and full shapes."""
    return {name: code for name, (code, _) in specs.items()}, {
        name: shape for name, (_, shape) in specs.items()
    }
