"""Whatever a pickle says, nothing runs: only a refusal or inert values come back."""

import collections
import io
import os
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_models.torch_checkpoint import allowed_globals
from mca_models.torch_checkpoint.allowed_globals import GLOBALS, Record, TensorRef
from mca_models.torch_checkpoint.torch_file import read_pickle

CANARY = "mca_pickle_canary"


class Call:
    """Pickles as the call of ``function`` on ``args``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


def glob(name: str) -> bytes:
    """The opcode that pushes a global."""
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


@pytest.fixture(autouse=True)
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    before = repr(dict(GLOBALS)), dict(vars(Record))
    yield
    assert not (tmp_path / CANARY).exists(), "the pickle ran something"
    assert (repr(dict(GLOBALS)), dict(vars(Record))) == before, "the pickle changed the stand-ins"


TOUCH = f"touch {CANARY}"
HOSTILE = {
    "os.system": pickle.dumps(Call(os.system, TOUCH)),
    "os.system in a list in a dict": pickle.dumps({"model": [1, {"x": Call(os.system, TOUCH)}]}),
    "nested reduce": pickle.dumps(Call(print, Call(os.system, TOUCH))),
    "eval": pickle.dumps(Call(eval, f"open({CANARY!r}, 'w')")),
    "exec by protocol 0": pickle.dumps(Call(exec, f"open({CANARY!r}, 'w')"), protocol=0),
    "getattr": pickle.dumps(Call(getattr, Call(__import__, "os"), "system")),
    "dotted name, protocol 4": b"\x80\x04" + text("torch") + text("Size.__init__.__globals__") + b"\x93.",
    "attribute of a stand-in": b"\x80\x04" + text("collections") + text("OrderedDict.__class__") + b"\x93.",
    "INST": b"(" + text(TOUCH) + b"iposix\nsystem\n.",
    "OBJ": b"(" + glob("os.system") + text(TOUCH) + b"o.",
    "NEWOBJ": glob("subprocess.Popen") + b"(" + text(TOUCH) + b"t\x81.",
    "NEWOBJ_EX": b"\x80\x04" + glob("subprocess.Popen") + b"()}\x92.",
    "builtins.type": glob("builtins.type") + b"(" + text("X") + b")}tR.",
    "functools.partial": glob("functools.partial") + b"(" + glob("os.system") + text(TOUCH) + b"tR.",
    "numpy loader": pickle.dumps(Call(__import__("numpy").load, CANARY)),
    "torch.load": b"\x80\x02" + glob("torch.load") + b"(" + text(CANARY) + b"tR.",
    "our own module": glob("mca_models.torch_checkpoint.torch_file.read_pickle") + b".",
    "extension registry": b"\x80\x02\x82\x01.",
    "memoised then called": glob("os.system") + b"q\x01" + text(TOUCH) + b"\x85R.",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_call_is_refused_and_not_made(data: bytes) -> None:
    with pytest.raises(McaError, match=r"^evil.pt: "):
        read_pickle(data, "evil.pt")


def test_the_refused_global_is_named() -> None:
    with pytest.raises(McaError, match=r"evil.pt: the pickle names posix.system, .* nothing was executed"):
        read_pickle(HOSTILE["os.system"], "evil.pt")


METADATA = "torch.distributed.checkpoint.metadata.Metadata"
REBUILD = "torch._utils._rebuild_tensor_v2"
EMPTY_TUPLE, BUILD = b")", b"b"
STATE = b"}" + text("x") + b"K\x01s"  # {"x": 1}
SLOTS = b"N" + STATE + b"\x86"  # (None, {"x": 1}): set attributes one by one
SETTERS = {
    "on a function": glob(REBUILD) + STATE + BUILD,
    "slots on a function": glob(REBUILD) + SLOTS + BUILD,
    "on a class": glob(METADATA) + STATE + BUILD,
    "slots on a class": glob(METADATA) + SLOTS + BUILD,
    "__setstate__ of a class": glob(METADATA)
    + b"N}"
    + text("__setstate__")
    + glob(REBUILD)
    + b"s\x86"
    + BUILD,
    "twice on an instance": glob(METADATA) + EMPTY_TUPLE + b"\x81" + STATE + BUILD + STATE + BUILD,
    "on a dtype": glob("torch.float32") + STATE + BUILD,
    "slots on a dtype": glob("torch.float32") + b"N}" + text("code") + b"K\x01s\x86" + BUILD,
    "on OrderedDict itself": glob("collections.OrderedDict") + SLOTS + BUILD,
    "items into a class": glob(METADATA) + text("a") + text("b") + b"s",
    "append to a class": glob(METADATA) + text("a") + b"a",
    "call of an instance": glob(METADATA) + EMPTY_TUPLE + b"\x81" + EMPTY_TUPLE + b"R",
    "call of a dtype": glob("torch.float32") + EMPTY_TUPLE + b"R",
    "a function of theirs inside torch's": glob("torch._tensor._rebuild_from_type_v2")
    + b"("
    + glob(METADATA)
    + glob("torch.Tensor")
    + EMPTY_TUPLE
    + b"NtR",
    "a foreign persistent id": b"(" + text("module") + text("os") + b"tQ",
    "a persistent id of one string": text("os") + b"Q",
    "a codec": glob("_codecs.encode") + text("x") + text("rot13") + b"\x86R",
}


@pytest.mark.parametrize("data", SETTERS.values(), ids=SETTERS)
def test_stand_ins_cannot_be_changed_or_misused(data: bytes) -> None:
    with pytest.raises(McaError, match=r"^evil.pt: not a pickle that can be read"):
        read_pickle(data + b".", "evil.pt")


def test_state_of_a_record_stays_inside_it() -> None:
    data = glob(METADATA) + EMPTY_TUPLE + b"\x81}" + text("__class__") + glob(REBUILD) + b"s" + BUILD + b"."
    record = read_pickle(data, "x")
    assert type(record) is allowed_globals.Metadata
    assert list(record.state) == ["__class__"]


def test_attributes_of_an_ordered_dict_are_dropped() -> None:
    value = collections.OrderedDict(a=1)
    value._metadata = {"version": 1}
    read = read_pickle(pickle.dumps(value, 2), "x")
    assert read == {"a": 1}
    assert not hasattr(read, "_metadata")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x02.",
        b"\x80\x7f.",
        b"cos",
        b"K\x01",
        b"(((",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"garbage",
    ],
)
def test_bytes_that_are_no_pickle_are_one_clear_error(data: bytes) -> None:
    with pytest.raises(McaError, match=r"^some.pt: not a pickle that can be read"):
        read_pickle(data, "some.pt")


def test_every_cut_and_flipped_byte_of_a_real_pickle_is_an_error_or_inert() -> None:
    import zipfile

    stream = io.BytesIO()
    torch.save({"w": torch.zeros(2, 3), "s": torch.nn.Linear(2, 2).state_dict()}, stream)
    data = zipfile.ZipFile(stream).read("archive/data.pkl")
    for at in range(len(data)):
        for changed in (data[:at], data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :]):
            if _asks_for_much_memory(changed):
                continue
            try:
                read_pickle(changed, "x")
            except McaError:
                pass


def _asks_for_much_memory(data: bytes) -> bool:
    """The interpreter itself allocates what LONG_BINPUT names."""
    try:
        return any(op.name == "LONG_BINPUT" and arg > 1 << 20 for op, arg, _ in pickletools.genops(data))
    except Exception:
        return b"r" in data


def test_common_objects_of_torch_are_read() -> None:
    import zipfile

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = torch.nn.Parameter(torch.zeros(2))
            self.p.note = 1

    value = {
        "p": Module().p,
        "b": b"\x00\xff",
        "io": io.BytesIO(b"x"),
        "d": torch.device("cpu"),
        "s": torch.Size([1, 2]),
    }
    stream = io.BytesIO()
    torch.save(value, stream)
    tree = read_pickle(zipfile.ZipFile(stream).read("archive/data.pkl"), "x")
    assert isinstance(tree["p"], TensorRef)
    assert (tree["b"], tree["s"]) == (b"\x00\xff", (1, 2))
