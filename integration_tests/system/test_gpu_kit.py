"""The kit for a GPU that is lent, rehearsed on the CPU: it computes and compares, and keeps what it found.

One step of each kind is rehearsed here, with ``MCA_GPU_KIT=1`` every step. What a step does on a GPU alone: modules and
fused kernels of Transformer Engine, device memory, limits of time.
"""

import json
import os
import re
import struct
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from tools.gpu_kit import device_code, gather, needs, parity, run, speed, summary
from tools.gpu_kit.kit import Kit, LeftOut
from tools.gpu_kit.steps import STEPS, Step, step_of

from harness import run_ranks
from source_tree import ROOT

IS_FULL = bool(os.environ.get("MCA_GPU_KIT"))
CASES = parity.TINY if IS_FULL else parity.TINY[:1]
IS_THERE = find_spec("transformer_engine") is not None  # mca hides it on a CPU

pytestmark = [pytest.mark.ranks, pytest.mark.fork]


def found_by(name: str, folder: Path, planted: bool) -> tuple[bool, list[str]]:
    """Return True if a step passes, and its error otherwise. Runs on a rank."""
    from mca_models.megatron import AutoModel

    plain = AutoModel.from_pretrained

    def wrong(*args: Any, **kwargs: Any) -> Any:
        import torch

        model = plain(*args, **kwargs)
        with torch.no_grad():
            next(tensor for name, tensor in model.canonical_parameters() if "linear_qkv" in name).mul_(1.1)
        return model

    kit = Kit("cpu", True, folder, folder / "found.json")
    with (
        patch.object(AutoModel, "from_pretrained", wrong if planted else plain),
        patch.object(parity, "TINY", CASES),
    ):
        step_of(name).run(kit)
    kept = json.loads(kit.output.read_text())
    assert [each["holds"] for each in kept["checks"]] == [check.holds for check in kit.checks]
    return kit.passed, [check.name for check in kit.checks if not check.holds]


def test_parity_compares_logits_and_gradients(tmp_path: Path) -> None:
    for number, planted in enumerate((False, True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        ((passed, wrong),) = run_ranks(1, found_by, "parity-fp32-local", folder, planted)
        assert passed != planted
        assert sum(name.endswith(": logits") for name in wrong) == len(CASES) * planted
        assert sum("gradients" in name for name in wrong) == len(CASES) * planted


def one_of_each_kind() -> list[str]:
    """The first step of each call with its layers, or its rival."""
    found: dict[tuple[str, ...], str] = {}
    for step in STEPS:
        kind = step.call, step.options.get("layers", ""), step.options.get("rival", "")
        found.setdefault((*kind, step.name) if IS_FULL else kind, step.name)
    return list(found.values())


def rehearsed(name: str, folder: Path) -> tuple[str, list[str]]:
    """Return the end of a step, and its checks. Runs on a rank."""
    kit = Kit("cpu", True, folder, folder / "found.json")
    if name == "kinds":  # whose processes would take themselves for ranks of this one's group
        for variable in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            os.environ.pop(variable, None)
    try:
        step_of(name).run(kit)
    except LeftOut as reason:
        return f"left out: {reason}", []
    wrong = [f"{check.name}: {check.value}" for check in kit.checks if not check.holds]
    return "passed" if kit.passed else f"wrong: {wrong}", [check.name for check in kit.checks]


@pytest.mark.qualify
def test_one_command_runs_steps_and_keeps_what_they_found(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu_kit.run", str(tmp_path / "results")]
    command += ["--device", "cpu", "--tiny", "--only", "smoke"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (kept,) = [json.loads(line) for line in (tmp_path / "results" / "results.jsonl").read_text().splitlines()]
    assert (kept["step"], kept["status"]) == ("smoke", "passed")
    assert kept["checks"]
    table = (tmp_path / "results" / "summary.md").read_text()
    assert "a rehearsal with tiny sizes" in table
    assert "| smoke | passed |" in table


@pytest.fixture
def workspace(tmp_path: Path) -> run.Workspace:
    (tmp_path / "results").mkdir()
    return run.Workspace(tmp_path / "results", tmp_path / "scratch", run.install(None, tmp_path), "cpu", True)


@pytest.mark.qualify
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", one_of_each_kind())
def test_every_kind_of_step_is_rehearsed(name: str, tmp_path: Path, workspace: run.Workspace) -> None:
    over_engine = name.endswith("-engine")
    if over_engine and IS_THERE:  # emulated in a separate process
        result = run.run(step_of(name), workspace, 600)
        assert result["status"] == "passed", result
        assert result["checks"]
        return
    ((status, checked),) = run_ranks(1, rehearsed, name, tmp_path, timeout=600)
    if over_engine:
        assert status == "left out: Transformer Engine is not there; see tools/build_transformer_engine.py"
    else:
        assert status == "passed"
        assert checked


def test_a_step_that_breaks_or_hangs_is_kept_and_the_next_goes_on(workspace: run.Workspace) -> None:
    broken = run.run(Step("no-such-step", "nothing:nothing", 1, 5), workspace, 20)
    assert broken["status"] == "failed"
    assert "invalid choice: 'no-such-step'" in broken["log"]
    assert run.run(step_of("memory"), workspace, 0.1)["status"] == "out of time"
    summary.write_summary(workspace.results)
    table = (workspace.results / "summary.md").read_text()
    assert "| no-such-step | failed |" in table
    assert "| memory | out of time |" in table
    assert "invalid choice" in table


def test_parts_fit_into_the_minutes_that_a_machine_is_lent() -> None:
    parts = sorted({step.part for step in STEPS})
    assert parts == [1, 2, 3]
    assert run.SECONDS * len(parts) <= 25 * 60
    assert [step.part for step in STEPS] == sorted(step.part for step in STEPS)


def test_a_step_leaves_later_ones_of_its_part_the_time_that_they_need_least() -> None:
    for part in (1, 2, 3):
        steps = run.chosen(part, None)
        left = float(run.SECONDS)
        for number, step in enumerate(steps, 1):
            given = run.time_of(step, steps[number:], left)
            assert step.least <= given <= step.seconds, step.name
            left -= given  # every step is stopped
        assert left >= 0


def test_steps_come_in_the_order_of_what_they_say_of_the_machine() -> None:
    groups = ["smoke", "parity", "packing", "lora", "files", "memory", "speed", "stream"]
    found = [step.name.split("-")[0] for step in STEPS]
    assert [name for number, name in enumerate(found) if name not in found[:number]][: len(groups)] == groups


@pytest.mark.parametrize("size", speed.SIZES)
@pytest.mark.parametrize("rival", ["bare", "hf"])
def test_both_models_of_a_speed_step_fit_into_an_h100(size: str, rival: str) -> None:
    """81,559 MiB, of which torch sees about 79.2 GiB."""
    document = speed.document_of(size, False)
    for gib, longest in ((79.2, 2048 if size == "1.7b" else 4096), (139.7, 4096)):
        length, found = needs.length_for(document, rival, int(gib * 2**30), speed.LENGTH)
        assert length == longest
        assert found == needs.needed(document, rival, length) < 0.92 * gib * 2**30
    with pytest.raises(RuntimeError, match=r"need .* GiB by arithmetic for samples of 1024 tokens"):
        needs.length_for(document, rival, 2**30, speed.LENGTH)


def test_parameters_are_counted_as_transformers_has_them() -> None:
    import torch
    import transformers

    document = speed.document_of("8b-shape", False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**document))
    matrices = [parameter.numel() for parameter in model.parameters() if parameter.dim() > 1]
    assert needs.parameters_of(document) == sum(matrices)


def test_a_speed_step_that_is_stopped_keeps_the_rounds_that_it_measured(tmp_path: Path) -> None:
    ours: list[float] = []
    theirs: list[float] = []
    kept: list[tuple[int, int]] = []

    class Slow:
        def take(self, steps: int) -> list[float]:
            if len(kept) == 2:
                raise TimeoutError
            return [1.0] * steps

    kit, rival = Kit("cpu", True, tmp_path, tmp_path / "found.json"), Slow()
    callback = speed.turns(kit, ours, rival, theirs, lambda: kept.append((len(ours), len(theirs))))  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        for step in range(1, speed.WARM + speed.ROUNDS * speed.EACH + 1):
            callback.on_step_end(None, SimpleNamespace(global_step=step), None)
    assert kept == [(speed.EACH * number, speed.WARM + speed.EACH * number) for number in (1, 2)]


def test_a_step_that_is_stopped_keeps_what_its_processes_printed(workspace: run.Workspace) -> None:
    folder, log = workspace.results / "step", workspace.results / "step.txt"
    folder.mkdir()
    (folder / "sft.log").write_text("what a run printed")
    run._add_logs(folder, log)
    assert "--- sft.log\nwhat a run printed" in log.read_text()


def test_the_kit_brings_transformer_engine_with_its_metadata(tmp_path: Path) -> None:
    """Its import asks for those of all three distributions."""
    names = ("transformer_engine-2.8.0", "transformer_engine_cu13-2.8.0", "transformer_engine_torch-2.8.0")
    for name in (*(f"{each}.dist-info" for each in names), "transformer_engine", "onnx", "scratch"):
        (tmp_path / "built" / name).mkdir(parents=True)
    gather.pack_engine(tmp_path / "built", tmp_path / "built" / "scratch", tmp_path / "engine.tar.xz")
    with tarfile.open(tmp_path / "engine.tar.xz") as archive:
        assert archive.getnames() == sorted([*(f"{each}.dist-info" for each in names), "transformer_engine"])


def test_one_command_gathers_everything(tmp_path: Path) -> None:
    """And builds Transformer Engine where none is named."""
    (tmp_path / "built" / "transformer_engine").mkdir(parents=True)
    asked: list[tuple[str, dict[str, str]]] = []

    def ran(*command: str | Path, **environment: str) -> str:
        asked.append((" ".join(map(str, command)), environment))
        return f"{tmp_path / 'built'}\n" if "build_transformer_engine.py" in asked[-1][0] else ""

    with patch.object(gather, "run", ran), patch.object(sys, "argv", ["gather", str(tmp_path / "kit")]):
        assert gather.main() == 0
    words = [command for command, _ in asked]
    assert sum(command.startswith("uv build") for command in words) == len(gather.PACKAGES)
    assert "pytest-timeout==" in next(command for command in words if "pip download" in command)
    assert f"torch=={gather.TORCH}" in next(command for command in words if "pip install" in command)
    assert words[-1].endswith("build_transformer_engine.py")
    assert asked[-1][1] == {"MCA_TE_OPTIMISE": "2"}
    with tarfile.open(tmp_path / "kit" / "engine.tar.xz") as archive:
        assert archive.getnames() == ["transformer_engine"]


def test_the_kit_brings_what_is_locked_for_its_python() -> None:
    assert "megatron-core==0.19.2" in (found := gather.locked(gather.MISSING))
    assert all(re.fullmatch(r"[a-z-]+==[0-9.]+", each) for each in found)


def test_a_check_that_found_no_number_does_not_hold(tmp_path: Path) -> None:
    kit = Kit("cpu", True, tmp_path, tmp_path / "found.json")
    assert not kit.passed
    kit.check("fine", 1.0, 1.0)
    assert kit.passed
    kit.check("nothing", float("nan"), 1.0)
    assert not kit.passed


def library_of(architectures: list[int]) -> bytes:
    """An ELF file of nothing but a section of device code and one of names."""
    code = b""
    for architecture in architectures:
        entry = struct.pack("<HHIQ", 2, 1, 64, 16).ljust(28, b"\0") + struct.pack("<I", architecture)
        code += entry.ljust(64, b"\0") + b"device code here"
    fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(code)) + code + bytes(8)
    names = b"\0.nv_fatbin\0.shstrtab\0"
    headers = [
        struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, 64, len(fatbin), 0, 0, 8, 0),
        struct.pack("<IIQQQQIIQQ", 12, 3, 0, 0, 64 + len(fatbin), len(names), 0, 0, 1, 0),
    ]
    start = bytearray(64)
    struct.pack_into("<Q", start, 40, 64 + len(fatbin) + len(names))
    struct.pack_into("<HHH", start, 58, 64, 2, 1)
    return bytes(start) + fatbin + names + b"".join(headers)


def test_device_code_of_other_gpus_is_left_out(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(library_of([80, 90, 100]))
    assert device_code.keep_only(library, (90,)) == 32
    data = library.read_bytes()
    assert len(data) == len(library_of([80, 90, 100]))
    kept = {entry.architecture: data[entry.start : entry.stop] for entry in device_code.entries(data)}
    assert kept == {80: bytes(16), 90: b"device code here", 100: bytes(16)}
