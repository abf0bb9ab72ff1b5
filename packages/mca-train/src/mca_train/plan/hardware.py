"""Table of devices: ``hardware.toml``, extended by a user's file."""

import tomllib
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields, replace
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import TypeVar

from mca_config.errors import UsageError
from mca_config.files import read_text
from mca_config.types import JsonObject

RESERVED_GIB = 4.0
"""Memory reserved on a device for the CUDA context, communication buffers and kernel workspaces."""
T = TypeVar("T")
_BARE = "gib:"
_MAY_BE_ZERO = ("link_us", "network_us", "launch_us", "overlapped")
_REFERENCE = "h100-80"


@dataclass(frozen=True, kw_only=True)
class Device:
    """Accelerator; rates in 10^9 bytes per second in one direction."""

    name: str
    memory_gib: float
    tflops: float
    fp8_tflops: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    link_us: float
    network_us: float
    node: int
    fp8_transposed: bool = True

    @property
    def usable_gib(self) -> float:
        """Memory available to tensors of a run."""
        return self.memory_gib - RESERVED_GIB


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of the data-sheet rates that are achieved; see ``hardware.toml``."""

    products: float
    fp8_products: float
    attention: float
    experts: float
    memory: float
    link: float
    network: float
    overlapped: float
    launch_us: float


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Device with its efficiencies."""

    device: Device
    efficiency: Efficiency


def load_hardware(name: str, table: Path | None = None) -> Hardware:
    """Load the device that ``--device`` names.

    Args:
        name: Name of a device in the table, or ``gib:N``: an H100 with N GiB.
        table: User's file with new devices, or with keys of known ones.

    Raises:
        UsageError: The device is unknown, or the file is invalid.
    """
    defaults, custom = _sections(None), _sections(table) if table is not None else {}
    known = defaults["devices"] | {
        section: defaults["devices"].get(section, {}) | _table(values, f"devices.{section}", table)
        for section, values in custom.get("devices", {}).items()
    }
    efficiency = _made(Efficiency, defaults["efficiency"] | custom.get("efficiency", {}), "efficiency", table)
    devices = {
        section: _made(Device, values, f"devices.{section}", table, name=section)
        for section, values in known.items()
    }
    if name.startswith(_BARE):
        bare = replace(devices[_REFERENCE], name=name, memory_gib=_gib(name))
        return Hardware(device=bare, efficiency=efficiency)
    if name not in devices:
        named = ", ".join(devices)
        raise UsageError(f"--device {name}: expected {named} or gib:N, or a device of a --hardware file")
    return Hardware(device=devices[name], efficiency=efficiency)


def _gib(name: str) -> float:
    try:
        size = float(name.removeprefix(_BARE))
    except ValueError:
        size = 0.0
    if not RESERVED_GIB < size < inf:
        raise UsageError(f"--device {name}: expected a number of GiB above {RESERVED_GIB:g}, such as gib:40")
    return size


def _sections(table: Path | None) -> dict[str, JsonObject]:
    try:
        text = (files(__package__) / "hardware.toml").read_text() if table is None else read_text(table)
        found: JsonObject = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"--hardware {table}: {error}; see the comment in hardware.toml") from None
    _only_known(found, ("devices", "efficiency"), "the file", table)
    return {section: _table(values, section, table) for section, values in found.items()}


def _table(values: object, section: str, table: Path | None) -> JsonObject:
    if not isinstance(values, dict):
        raise UsageError(
            f"--hardware {table}: {section} = {values!r}: expected a table such as [devices.NAME]"
        )
    return values


def _only_known(values: JsonObject, known: Collection[str], where: str, table: Path | None) -> None:
    if wrong := sorted(values.keys() - known):
        text = ", ".join(sorted(known))
        raise UsageError(f"--hardware {table}: {where} has unknown keys: {', '.join(wrong)}; expected {text}")


def _made(kind: type[T], values: JsonObject, section: str, table: Path | None, **more: str) -> T:
    names = {field.name for field in fields(kind)} - more.keys()  # type: ignore[arg-type]
    _only_known(values, names, f"[{section}]", table)
    needed = {field.name for field in fields(kind) if field.default is MISSING} - more.keys()  # type: ignore[arg-type]
    if missing := sorted(needed - values.keys()):
        raise UsageError(f"--hardware {table}: [{section}] lacks the keys {', '.join(missing)}")
    for name, value in values.items():
        if (expected := _expected(name, value, share=kind is Efficiency)) is not None:
            raise UsageError(f"--hardware {table}: [{section}] {name} = {value!r}: expected {expected}")
    return kind(**values, **more)


def _expected(name: str, value: object, *, share: bool) -> str | None:
    """Return what is expected for ``name``; None: the value is valid."""
    least = RESERVED_GIB if name == "memory_gib" else 0.0
    most = 1.0 if share and name != "launch_us" else inf
    known = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    if name == "fp8_transposed":
        return None if isinstance(value, bool) else "true or false"
    if name == "node":
        return None if known and isinstance(value, int) and value else "a whole number of at least 1"
    if known and value != inf and (value != least or name in _MAY_BE_ZERO):
        return None
    text = "a number of at least 0" if name in _MAY_BE_ZERO else f"a number above {least:g}"
    return text + (f" and at most {most:g}" if most < inf else "")
