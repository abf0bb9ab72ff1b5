"""The table of devices that a plan is made for: `hardware.toml`, and what a user's file adds to it."""

import tomllib
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from mca_config.errors import UsageError
from mca_config.types import JsonObject

RESERVED_GIB = 4.0
"""Of a device's memory: its context, communication buffers and workspaces of kernels."""
T = TypeVar("T")
_BARE = "gib:"
_REFERENCE = "h100-80"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator; rates in 10^9 bytes a second of one direction."""

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

    @property
    def usable_gib(self) -> float:
        """Memory that a run's tensors may take."""
        return self.memory_gib - RESERVED_GIB


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of what data sheets say that are reached; see ``hardware.toml``."""

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
    """A device and how well it is used."""

    device: Device
    efficiency: Efficiency


def hardware_of(name: str, table: Path | None = None) -> Hardware:
    """The device that ``--device`` names, of the own table or of ``table``.

    Args:
        name: A device of the table, or ``gib:N``: as fast as an H100 with N GiB.
        table: A user's file.

    Raises:
        UsageError: There is no such device, or the file is wrong.
    """
    document = _read(None)
    if table is not None:
        given = _read(table)
        for section in ("devices", "efficiency"):
            document[section] = document[section] | given.get(section, {})
    devices = document["devices"]
    efficiency = _made(Efficiency, document["efficiency"], "efficiency", table)
    if name.startswith(_BARE):
        device = _made(Device, devices[_REFERENCE] | {"name": name}, _REFERENCE, table)
        return Hardware(device=replace(device, memory_gib=_gib(name)), efficiency=efficiency)
    if name not in devices:
        known = ", ".join(devices)
        raise UsageError(f"--device {name}: expected {known} or gib:N, or a device of a --hardware file")
    return Hardware(device=_made(Device, devices[name] | {"name": name}, name, table), efficiency=efficiency)


def _gib(name: str) -> float:
    try:
        size = float(name.removeprefix(_BARE))
    except ValueError:
        size = 0.0
    if not size > RESERVED_GIB:
        raise UsageError(f"--device {name}: expected a number of GiB above {RESERVED_GIB:g}, such as gib:40")
    return size


def _read(table: Path | None) -> dict[str, JsonObject]:
    try:
        text = (files(__package__) / "hardware.toml").read_text() if table is None else table.read_text()
        return tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"--hardware {table}: {error}; see the comment in hardware.toml") from None


def _made(kind: type[T], values: JsonObject, section: str, table: Path | None) -> T:
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    wrong = sorted(names ^ values.keys())
    bad = [name for name, value in values.items() if name != "name" and not isinstance(value, int | float)]
    if wrong or bad:
        told = ", ".join([*wrong, *bad])
        raise UsageError(f"--hardware {table}: [{section}] has wrong or missing keys: {told}")
    return kind(**values)
