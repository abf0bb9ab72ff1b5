"""Selection of the weights that quantisation methods take for those of linears.

`hf_tensors` and `fp8_write` quantise them.
"""

from mca_models.storage.byte_ranges import Shape
from mca_models.weights import Param, Stage

_NEVER_QUANTISED = (
    "router.weight",
    "shared_experts.gate_weight",
    "eh_proj.weight",
    "position_embeddings.weight",
    "indexer.weights_proj",  # transformers keeps it in fp32, engines leave it as it is
)
_NOT_INSIDE = (Stage.LAST, Stage.VISION, Stage.PASSTHROUGH)


def is_linear(param: Param, whole: Shape) -> bool:
    """Return whether quantisation methods take ``param``, of full shape ``whole``, for the weight of a linear."""
    left_out = param.vocab or param.stage in _NOT_INSIDE or param.mca.endswith(_NEVER_QUANTISED)
    return len(whole) == 2 and not left_out
