"""Repeated export of a live model that sends only what changed since the last complete send.

Each rank keeps a digest of 128 bits of each of its shards, in the dtype that is sent, not a copy of the weights.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed
from torch import Tensor

from mca_models.megatron import platform
from mca_models.megatron.live_model import LiveModel
from mca_models.megatron.state.buckets import ParamSpecs
from mca_models.megatron.state.export import WeightBucket, WeightRequest, export_buckets
from mca_models.megatron.state.stream import Piece
from mca_models.megatron.state.weight_manifest import TensorRecord, WeightManifest, tensor_crc32
from mca_models.megatron.tensors import CODES, DTYPE_OF, cast_finite
from mca_models.quantization import fp8_write
from mca_models.weights import Param

_STEP = 1 << 22
"""Elements that are converted to 64-bit integers at a time: four such tensors exist, 128 MiB."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = ((-0x61C8864680B583EB, -0x3B314601E57A13AD), (-0x4B47D0C5C6F19D2B, -0x7C2D1FE84C9A6B35))
_SHIFT = 29


class WeightSender:
    """Sender of a model's weights that can leave out parameters that did not change; made by ``weight_sender``.

    Attributes:
        version: Number of complete sends; 0 before the first.
        manifest: Of the last complete send, on ranks that received its tensors; else None.
    """

    def __init__(
        self,
        models: LiveModel,
        request: WeightRequest,
        piece: Callable[[], Piece] | None = None,
        *,
        checksums: bool = False,
    ) -> None:
        self.version = 0
        self.manifest: WeightManifest | None = None
        self._models, self._request, self._piece = models, request, piece
        self._checksums = checksums
        self._digests: Tensor | None = None
        self._current: Tensor | None = None

    def buckets(self, *, full: bool = False) -> Iterator[WeightBucket]:
        """Yield buckets of what changed since the last complete send, or of all weights; collective.

        All weights are sent the first time, with ``full``, and after a send that did not reach its end. A parameter is
        the unit: one expert of a stacked tensor with ``split_experts``, else the stacked tensor. A change is missed
        only if two digests of 128 bits are equal.

        Args:
            full: Send all weights, for example to an engine that was restarted.
        """
        before = None if full else self._digests
        self._digests, self._current = None, None  # an interrupted send must be repeated in full
        base = None if before is None else self.version
        records: list[TensorRecord] = []

        def select(params: Sequence[Param], specs: ParamSpecs, piece: Piece) -> set[str]:
            self._current = _digests(params, specs, piece)
            return _changed(params, before, self._current)

        piece = None if self._piece is None else self._piece()
        for bucket in export_buckets(self._models, self._request, piece, select):
            records += self._records(bucket)
            yield bucket
        self._digests = self._current
        self.version += 1
        receives = self._models.rank_context.rank in self._request.targets(self._models.rank_context)
        self.manifest = WeightManifest(self.version, base, tuple(records)) if receives else None

    def _records(self, bucket: WeightBucket) -> Iterator[TensorRecord]:
        for entry in bucket.entries:
            code = fp8_write.CODE if entry.dtype == torch.float8_e4m3fn else CODES[entry.dtype]
            crc32 = tensor_crc32(entry.view(bucket.buffer)) if self._checksums else None
            yield TensorRecord(entry.name, code, entry.shape, entry.start, crc32)


def _changed(params: Sequence[Param], before: Tensor | None, current: Tensor) -> set[str]:
    """Return the canonical names of the parameters of which any rank's shard changed; collective."""
    if before is None:
        return {param.mca_name() for param in params}
    flags = (before != current).any(1).to(torch.int32)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return {param.mca_name() for param, flag in zip(params, flags.tolist(), strict=True) if flag}


def _digests(params: Sequence[Param], specs: ParamSpecs, piece: Piece) -> Tensor:
    """Return int64 ``[params, 2]``, the digest of this rank's shard of each parameter; 0 where it has none."""
    digests = torch.zeros(len(params), 2, dtype=torch.int64, device=platform.current_device())
    for number, param in enumerate(params):
        name = param.mca_name()
        if (shard := piece(name)) is not None:
            digests[number] = _digest(cast_finite(shard.detach(), DTYPE_OF[specs[name][0]], name))
    return digests


def _digest(tensor: Tensor) -> Tensor:
    """Return int64 ``[2]``: sums of the elements' bits, each mixed with its position so that their order counts."""
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    position = 0
    for part in tensor.reshape(-1).split(_STEP):
        bits = part.contiguous().view(_BITS[part.element_size()]).to(torch.int64)
        places = torch.arange(position + 1, position + 1 + bits.numel(), device=bits.device)
        for which, (first, second) in enumerate(_FACTORS):
            mixed = places * first
            mixed += bits
            mixed *= second
            mixed ^= mixed >> _SHIFT
            mixed *= first
            mixed ^= mixed >> _SHIFT
            total[which] += mixed.sum()  # integers wrap around
        position += bits.numel()
    return total
