"""Stand-ins that the restricted pickle reader builds for the globals of a pickle.

A pickle is a program: it names globals, calls them, and sets the state of what it gets. Here every name
is looked up in one literal table, whose entries cannot do anything: they keep their arguments.
Nothing can be set on it either, since a pickle's BUILD can reach any object that the pickle has in hand:
classes are sealed by their metaclass, functions are wrapped in ``_Call``, values are named tuples.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType, new_class
from typing import Any, NamedTuple, NoReturn

Pickled = Any
"""Value in a pickle of another program; it is checked at its use."""


class Dtype(NamedTuple):
    """A torch dtype, by its safetensors code; ``torch`` where there is no such code."""

    code: str


class StorageType(NamedTuple):
    """A torch storage class; ``dtype`` None: an untyped one, counted in bytes."""

    dtype: Dtype | None


class StorageRef(NamedTuple):
    """A persistent id: one storage of the file."""

    dtype: Dtype | None
    key: str
    numel: int
    """Elements of ``dtype``, or bytes."""


class TensorRef(NamedTuple):
    """A tensor: a view of a storage. Nothing in it has been checked yet."""

    storage: Pickled
    offset: Pickled
    shape: Pickled
    strides: Pickled
    dtype: Pickled = None
    """Given only for a view of an untyped storage."""


class _Sealed(type):
    """Classes whose attributes cannot be set or deleted."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"{cls.__name__} cannot be changed")

    def __delattr__(cls, name: str) -> NoReturn:
        raise TypeError(f"{cls.__name__} cannot be changed")


class Record(metaclass=_Sealed):
    """An object of some class: its constructor's arguments and its state, as they came."""

    __slots__ = ("args", "state")
    args: tuple[Pickled, ...]
    state: Pickled

    def __new__(cls, *args: Pickled) -> "Record":
        """Keep the arguments."""
        self = object.__new__(cls)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "state", None)
        return self

    def __setstate__(self, state: Pickled) -> None:
        if self.state is not None:
            raise TypeError(f"the state of a {type(self).__name__} is set twice")
        object.__setattr__(self, "state", state)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be changed")

    def __delattr__(self, name: str) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be changed")


def _records(name: str) -> type[Record]:
    """Return a class of records, which readers tell from others."""
    made: type[Record] = new_class(name, (Record,), exec_body=lambda body: body.update(__slots__=()))
    return made


Metadata = _records("Metadata")
"""``torch.distributed.checkpoint.metadata.Metadata`` and Megatron's subclass of it."""
TensorStorageMetadata = _records("TensorStorageMetadata")
"""One tensor of a distributed checkpoint."""
ChunkStorageMetadata = _records("ChunkStorageMetadata")
"""Offset and size of one chunk."""
MetadataIndex = _records("MetadataIndex")
"""Key of a chunk: tensor name and offset."""
StorageInfo = _records("StorageInfo")
"""File, offset and length of a chunk."""
TensorProperties = _records("TensorProperties")
"""dtype and layout of a tensor."""
OpaqueObject = _records("OpaqueObject")
"""Object that no reader looks into."""


class _Dict(dict[Pickled, Pickled], metaclass=_Sealed):
    """In place of ``OrderedDict``; what torch hangs on a state dict (``_metadata``) is dropped."""

    __slots__ = ()

    def __setstate__(self, state: Pickled) -> None:
        pass


class _Call(metaclass=_Sealed):
    """A function that a pickle may call, without attributes that it could set."""

    __slots__ = ("_function",)
    _function: Callable[..., Pickled]

    def __init__(self, function: Callable[..., Pickled]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Pickled) -> Pickled:
        return self._function(*args)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise TypeError("a function cannot be changed")

    def __setstate__(self, state: Pickled) -> NoReturn:
        raise TypeError("a function has no state")


def _tensor(storage: Pickled, offset: Pickled, shape: Pickled, strides: Pickled, *rest: Pickled) -> TensorRef:
    return TensorRef(storage, offset, shape, strides)


def _tensor_v3(*args: Pickled) -> TensorRef:
    storage, offset, shape, strides, _gradient, _hooks, dtype, *_ = args
    return TensorRef(storage, offset, shape, strides, dtype)


def _parameter(data: Pickled, *rest: Pickled) -> Pickled:
    return data


def _tensor_with_attributes(function: Pickled, kind: Pickled, args: Pickled, state: Pickled) -> Pickled:
    if not isinstance(function, _Call):
        raise TypeError("only the tensor functions of torch are called")
    return function(*args)


def _size(sizes: Pickled) -> tuple[Pickled, ...]:
    if not isinstance(sizes, tuple | list):
        raise TypeError(f"a torch.Size of {type(sizes).__name__}")
    return tuple(sizes)


def _latin1(text: Pickled, encoding: Pickled = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise TypeError("only texts that stand for bytes are encoded")
    return text.encode("latin1")


def _last(*args: Pickled) -> Pickled:
    """An enum member by its value, a layout or device by its name."""
    return args[-1] if args else None


_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "complex32": "complex32", "complex64": "complex64", "complex128": "complex128",
}  # fmt: skip

_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
    "ByteStorage": "U8", "BoolStorage": "BOOL",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip

_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"

GLOBALS: Mapping[tuple[str, str], Pickled] = MappingProxyType(
    {
        ("collections", "OrderedDict"): _Dict,
        ("_codecs", "encode"): _Call(_latin1),
        ("torch", "Size"): _Call(_size),
        ("torch", "device"): _Call(_last),
        ("torch", "Tensor"): OpaqueObject,
        ("torch.nn.parameter", "Parameter"): OpaqueObject,
        ("torch._utils", "_rebuild_tensor"): _Call(_tensor),
        ("torch._utils", "_rebuild_tensor_v2"): _Call(_tensor),
        ("torch._utils", "_rebuild_tensor_v3"): _Call(_tensor_v3),
        ("torch._utils", "_rebuild_parameter"): _Call(_parameter),
        ("torch._utils", "_rebuild_parameter_with_state"): _Call(_parameter),
        ("torch._tensor", "_rebuild_from_type_v2"): _Call(_tensor_with_attributes),
        ("torch.storage", "UntypedStorage"): StorageType(None),
        ("torch.serialization", "_get_layout"): _Call(_last),
        **{("torch", name): Dtype(code) for name, code in _DTYPES.items()},
        **{("torch", name): StorageType(Dtype(code)) for name, code in _STORAGES.items()},
        (f"{_DCP}.metadata", "Metadata"): Metadata,
        (f"{_DCP}.metadata", "TensorStorageMetadata"): TensorStorageMetadata,
        (f"{_DCP}.metadata", "BytesStorageMetadata"): OpaqueObject,
        (f"{_DCP}.metadata", "ChunkStorageMetadata"): ChunkStorageMetadata,
        (f"{_DCP}.metadata", "MetadataIndex"): MetadataIndex,
        (f"{_DCP}.metadata", "TensorProperties"): TensorProperties,
        (f"{_DCP}.metadata", "StorageMeta"): OpaqueObject,
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _Call(_last),
        (f"{_DCP}.filesystem", "_StorageInfo"): StorageInfo,
        (f"{_DCP}.filesystem", "_StoragePrefix"): OpaqueObject,
        **{
            (f"{_DCP}.planner", name): OpaqueObject
            for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")
        },
        (f"{_DCP}.planner", "WriteItemType"): _Call(_last),
        (_SHARDED, "TensorProperties"): TensorProperties,
        (_SHARDED, "MEM_FORMAT_ENCODING"): _Call(_last),
        (_MEGATRON, "MCoreMetadata"): Metadata,
        (_MEGATRON, "MCoreSavePlan"): OpaqueObject,
        ("io", "BytesIO"): OpaqueObject,
        ("_io", "BytesIO"): OpaqueObject,
        ("argparse", "Namespace"): OpaqueObject,
        ("pathlib", "PosixPath"): OpaqueObject,
        ("pathlib", "PurePosixPath"): OpaqueObject,
        ("pathlib._local", "PosixPath"): OpaqueObject,
    }
)
"""Every global that a pickle may name, by module and name."""


def persistent(identifier: Pickled) -> StorageRef:
    """The storage that a persistent id of ``torch.save`` names."""
    kind, storage, key, _location, numel, *view = (
        identifier  # the old format has fields for views, which no writer uses
    )
    if kind != "storage" or not isinstance(storage, StorageType) or not isinstance(key, str) or any(view):
        raise TypeError("a persistent id that is no storage")
    return StorageRef(storage.dtype, key, numel)
