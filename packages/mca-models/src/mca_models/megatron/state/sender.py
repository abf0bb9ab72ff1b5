"""Repeated export of a live model that sends only what changed since the last complete send.

Each rank keeps a digest of 128 bits of each of its shards, in the dtype that is sent, not a copy of the weights.
A `WeightManifest` lets a receiver check that all tensors arrived unchanged.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed
from torch import Tensor

from mca_config.errors import McaError, raise_problems
from mca_models.megatron import platform
from mca_models.megatron.distributed.parallel import LiveModel
from mca_models.megatron.state.buckets import ParamSpecs
from mca_models.megatron.state.export import WeightBucket, WeightRequest, export_buckets
from mca_models.megatron.state.stream import Piece
from mca_models.megatron.state.weight_receiver import Weight
from mca_models.megatron.tensors import CODES, DTYPE_OF, cast_finite
from mca_models.quantization.fp8 import CODE as FP8_CODE
from mca_models.weights import Param

_SHOWN = 8
_STEP = 1 << 22
"""Elements that are converted to 64-bit integers at a time: four such tensors exist, 128 MiB."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CODES = CODES | {torch.float8_e4m3fn: FP8_CODE}
_FACTORS = ((-0x61C8864680B583EB, -0x3B314601E57A13AD), (-0x4B47D0C5C6F19D2B, -0x7C2D1FE84C9A6B35))
_SHIFT = 29


@dataclass(frozen=True)
class TensorRecord:
    """A tensor, or a slice of a stacked one, that was sent.

    Args:
        name: Hugging Face name.
        dtype: Safetensors code.
        shape: Shape of the tensor or slice.
        start: First expert of a slice; None: the full tensor.
        crc32: CRC-32 of its bytes in row-major order; None: not computed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int | None = None
    crc32: int | None = None


@dataclass(frozen=True)
class WeightManifest:
    """All tensors of one send.

    Args:
        version: Number of this send.
        base_version: Version that a receiver must have for this send to make it ``version``; None: any, because all
            weights were sent.
        tensors: The tensors in the order in which they were sent.
    """

    version: int
    base_version: int | None
    tensors: tuple[TensorRecord, ...]

    def to_json(self) -> str:
        """Return the manifest as JSON, for a receiver in another process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "WeightManifest":
        """Read the output of `to_json`."""
        document = json.loads(text)
        records = (
            TensorRecord(**{**record, "shape": tuple(record["shape"])}) for record in document.pop("tensors")
        )
        return WeightManifest(**document, tensors=tuple(records))

    def check(self, received: Iterable[Weight], *, version: int | None = None) -> None:
        """Check that ``received`` are exactly the tensors of this send.

        Args:
            received: Names and tensors, and for slices their first expert, in any order.
            version: Version of the weights that the receiver had before; None: it had none.

        Raises:
            McaError: A tensor is missing or unexpected, came twice, has another shape, dtype or bytes, or the
                receiver's version is not ``base_version``.
        """
        if self.base_version is not None and version != self.base_version:
            raise McaError(
                f"the weights of version {self.version} are changes to version {self.base_version}, the receiver has "
                f"{version}; send all weights with buckets(full=True), "
                "or pass check(..., version=<the version that the receiver holds>)"
            )
        expected = {(record.name, record.start): record for record in self.tensors}
        problems: list[str] = []
        for name, tensor, *start in received:
            record = expected.pop((name, start[0] if start else None), None)
            problem = "is not in the manifest, or came twice" if record is None else _fault(record, tensor)
            problems += [f"{_shown(name, *start)} {problem}"] if problem else []
        problems += [f"{_shown(name, start)} is missing" for name, start in expected]
        raise_problems(problems, f"weights of version {self.version}", shown=_SHOWN)


def _shown(name: str, start: int | None = None) -> str:
    return name if start is None else f"{name} from expert {start} on"


def _fault(record: TensorRecord, tensor: Tensor) -> str | None:
    if tuple(tensor.shape) != record.shape:
        return f"has shape {list(tensor.shape)}, expected {list(record.shape)}"
    if (code := _CODES.get(tensor.dtype)) != record.dtype:
        return f"has dtype {code or tensor.dtype}, expected {record.dtype}"
    if record.crc32 is not None and tensor_crc32(tensor) != record.crc32:
        return "has other bytes than were sent"
    return None


def tensor_crc32(tensor: Tensor) -> int:
    """Return the CRC-32 of the bytes of ``tensor`` (copied to the CPU) in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())


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
        before = None if self._sends_all(full) else self._digests
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

    def _sends_all(self, full: bool) -> bool:
        """Return whether any rank must send all weights, and take over the latest version; collective.

        A rank that stopped at the last bucket has an interrupted send, which the others completed.
        """
        state = torch.tensor(
            [full or self._digests is None, self.version], dtype=torch.int64, device=platform.current_device()
        )
        torch.distributed.all_reduce(state, torch.distributed.ReduceOp.MAX)
        everything, self.version = state.tolist()
        return bool(everything)

    def _records(self, bucket: WeightBucket) -> Iterator[TensorRecord]:
        for entry in bucket.entries:
            code = _CODES[entry.dtype]
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
