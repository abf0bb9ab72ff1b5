"""Manifest of a send of weights, with which a receiver checks that all tensors arrived unchanged.

A receiver in another process needs torch for it, not Megatron.
"""

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from mca_config.errors import McaError, raise_problems
from mca_models.megatron.state.weight_receiver import Weight

_SHOWN = 8


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
            McaError: A tensor is missing or unexpected, came twice, has another shape or other bytes, or the
                receiver's version is not ``base_version``.
        """
        if self.base_version is not None and version != self.base_version:
            raise McaError(
                f"the weights of version {self.version} are changes to version {self.base_version}, the receiver has "
                f"{version}; send all weights with buckets(full=True)"
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
    if record.crc32 is not None and tensor_crc32(tensor) != record.crc32:
        return "has other bytes than were sent"
    return None


def tensor_crc32(tensor: Tensor) -> int:
    """Return the CRC-32 of the bytes of ``tensor`` (copied to the CPU) in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
