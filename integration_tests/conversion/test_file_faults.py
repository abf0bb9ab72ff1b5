"""Every call that touches a file fails once: the result is complete or absent, one line says so, nothing is left.

By default a few calls fail. With `--cases all` each site (see `fault_sites`: calls
of one function on one kind of file from the same code are one) fails with each of the errors, the first, the middle or
the last call from it, with each number of workers.
"""

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from fault_library import ERRORS, HERE, compiled
from fault_sites import Fault, Site, code_of, lot, named

SAMPLE = 8  # of each conversion
WORKERS = (1, 2, 4)
CALLED = {"open64", "read", "write", "close", "mkdir", "fstat64", "lseek64", "fcntl64", "fsync"}
"""Functions that every conversion calls; with a site of each, none of them goes past the preloaded library."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("library") / "faults.so")


@dataclass(frozen=True)
class Sources:
    """One model and one adapter, of both kinds, in ``folder``."""

    folder: Path

    @property
    def hf(self) -> Path:
        return self.folder / "hf"

    @property
    def mca(self) -> Path:
        return self.folder / "mca"

    @property
    def peft(self) -> Path:
        return self.folder / "peft"

    @property
    def mca_adapter(self) -> Path:
        return self.folder / "mca_adapter"


TP2 = "--tensor_model_parallel_size=2"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    import peft
    import tiny_hf
    from transformers import AutoModelForCausalLM

    from mca_convert.cli import main

    made = Sources(tmp_path_factory.mktemp("sources"))
    tiny_hf.save("llama", made.hf)
    (made.hf / "tokenizer.json").write_text("{}")
    (made.hf / "additional_chat_templates").mkdir()
    (made.hf / "additional_chat_templates" / "tools.jinja").write_text("{{ x }}")
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "o_proj"])
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(made.hf), config).save_pretrained(made.peft)
    base = ["--checkpoint_path", str(made.hf)]
    adapter = ["--adapter_path", str(made.peft)]
    assert main([*base, "--output_path", str(made.mca), TP2]) == 0
    assert main([*base, *adapter, "--output_path", str(made.mca_adapter), TP2]) == 0
    return made


def conversions(sources: Sources) -> dict[str, tuple[list[str], bool]]:
    """Return the conversions, and True for each whose output directory already exists."""
    hf, mca = ["--checkpoint_path", str(sources.hf)], ["--checkpoint_path", str(sources.mca)]
    peft, adapter = ["--adapter_path", str(sources.peft)], ["--adapter_path", str(sources.mca_adapter)]
    return {
        "to mca": ([*hf, TP2], False),
        "to mca, in a directory": ([*hf, TP2], True),
        "to hf": ([*mca, "--max_shard_size=90K"], False),
        "to hf, in a directory": ([*mca], True),
        "adapter to mca": ([*hf, *peft, TP2], False),
        "adapter to hf": (adapter, False),
        "adapter to hf, in a directory": (adapter, True),
        "merged": ([*mca, *peft, "--merge"], False),
    }


class Converter:
    """`fault_runs`, a process for all runs of the module; their directory is ``folder``."""

    def __init__(self, library: Path, sources: Sources, root: Path) -> None:
        self.folder = root / "folder"
        roots = f"{sources.folder}:{self.folder}"
        self._process = subprocess.Popen(
            [sys.executable, HERE / "fault_runs.py"],
            env=os.environ | {"LD_PRELOAD": str(library), "MCA_FAULT_ROOTS": roots},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the result of each of ``cases``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(cases) + "\n")
        self._process.stdin.flush()
        return [json.loads(self._process.stdout.readline()) for _ in cases]

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def converter(
    library: Path, sources: Sources, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Converter]:
    made = Converter(library, sources, tmp_path_factory.mktemp("runs"))
    yield made
    made.close()


def fault_of(found: dict[str, Any], whole: dict[str, int], before: dict[str, int]) -> str | None:
    """Return the problem with the outcome of a run; None: there is none."""
    lines = found["said"].splitlines()
    if "Traceback" in found["said"]:
        return "a traceback"
    if found["code"] == 0:
        if found["tree"] != whole:
            return f"exit 0, and {sorted(found['tree'].items() ^ whole.items())}"
        return None if len(lines) <= 2 else f"{len(lines)} lines"
    if found["code"] != 1:
        return f"exit {found['code']}"
    if found["tree"] != before:
        return f"exit 1, and there is {sorted(found['tree'])}"
    is_told = len(lines) == 1 and lines[0].startswith(("error: /", "error: --output_path /"))
    return None if is_told else f"{len(lines)} lines"


CASES = [
    (name, workers)
    for name in conversions(Sources(Path()))
    for workers in (WORKERS[:1] if name.startswith("adapter") else WORKERS)
]


@pytest.mark.cases(
    0,
    always=["to hf, in a directory-1", "adapter to mca-1", "adapter to hf, in a directory-1"],
)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "workers"), CASES)
def test_every_call_of_a_conversion_fails_once(
    name: str, workers: int, converter: Converter, sources: Sources, every_case: bool
) -> None:
    arguments, exists = conversions(sources)[name]
    folder = converter.folder
    output = folder / "out" if exists else folder / "above" / "out"
    case: dict[str, Any] = {
        "arguments": [*arguments, "--output_path", str(output)],
        "folder": str(folder),
        "make": exists,
        "fault": None,
    }
    if not name.startswith("adapter"):  # one thread reads an adapter
        case["arguments"].append(f"--workers={workers}")
    (whole,) = converter.run([case])
    assert whole["code"] == 0, whole["said"]
    sites = Site.all_of(whole["sites"])
    assert len(sites) > 100
    assert not CALLED - {site.name.partition(" ")[0] for site in sites}
    chosen = [
        Fault(site.name, site.turn((site.number + turn) % len(ERRORS)), error)
        for turn, error in enumerate(ERRORS)
        for site in sites
    ]
    if not every_case:
        chosen = sorted(chosen, key=lambda fault: lot(name, fault.site, fault.error))[:SAMPLE]
    results = converter.run([case | {"fault": asdict(fault)} for fault in chosen])
    assert all(found["sites"] for found in results), "every site is called as often as in the whole run"
    before = {"out": -1} if exists else {}
    faults = [
        f"{fault.nth} {errno.errorcode[fault.error]} {found['sites']}: {wrong}\n{found['said']}"
        for found, fault in zip(results, chosen, strict=True)
        if (wrong := fault_of(found, whole["tree"], before))
    ]
    assert not faults, f"{len(faults)} of {len(results)}:\n" + "\n".join(faults)


def test_a_site_has_one_name_in_every_checkout_and_below_lines_that_are_new() -> None:
    found = set()
    for start, above in (("/a/lib/python3.11", ""), ("/b/lib/python3.12", "\n\n")):
        space: dict[str, Any] = {"then": lambda: code_of(sys._getframe().f_back)}
        file = f"{start}/site-packages/package/file.py"
        source = f"{above}def called():\n    return then()\nname = called()\n"
        exec(compile(source, file, "exec"), space)
        found.add(space["name"])
    assert len(found) == 1
    assert named(__file__) == "integration_tests/conversion/test_file_faults.py"
    assert named(random.__file__) == "random.py"
