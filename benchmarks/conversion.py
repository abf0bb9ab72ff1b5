"""Times mca-convert against ``cp -r`` plus ``sync`` of the same bytes, interleaved, with warm cache.

    python benchmarks/conversion.py [--gigabytes 4.3] [--rounds 5] [--folder DIR] [dense|quarter|moe|fp8|to-fp8 ...]

Makes random models (a Llama; the same at a quarter of the size; a Qwen3-MoE with 128 experts in each of 24
layers; half of the Llama in fp8 blocks; the Llama, which becomes such blocks), checks one round trip with ``verify``,
then runs cp, HF -> MCA, cp, MCA -> HF in turns; beside what becomes fp8 cp copies what was written. Prints medians, the
ratio of throughputs, processor time, the peak of anonymous memory, what ``plan`` predicted for it, and the size of the
written tree; exits 1 if a target is missed. Needs four times the model's size in the folder and, for a warm cache, in
memory.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mca_models.checkpoint.hf_writer import METADATA, HfLayout
from mca_models.storage.safetensors import plan_file
from mca_models.storage.writer import SafetensorsWriter
from mca_models.templates import config_from_hf, get_family
from mca_models.templates.shapes import full_shape

BASE = {
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
    "attention_bias": False,
}
DENSE_LAYOUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
MOE_LAYOUT = DENSE_LAYOUT | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
MEMORY_TARGET = 512 << 20  # beyond the largest tensor
PLAN_TARGET, SIZE_TARGET = 0.2, 0.01  # relative
NOISE_BYTES = 64 << 20


def dense_config(nbytes: float) -> dict[str, Any]:
    """A Llama of about ``nbytes``: the more layers the larger."""
    layer = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 11008)
    layers = max(2, round((nbytes - 4 * 32000 * 4096) / layer / 2) * 2)
    return BASE | {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": layers,
    }


def moe_config(nbytes: float) -> dict[str, Any]:
    """A Qwen3-MoE of about ``nbytes`` with 128 experts in each of 24 layers: the wider the larger."""
    width = max(16, round(nbytes / (24 * 128 * 3 * 1024 * 2) / 16) * 16)
    return BASE | {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": width,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_hidden_layers": 24,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }


def make_model(hf: dict[str, Any], directory: Path) -> None:
    """Write a HF checkpoint of random bytes."""
    config = config_from_hf(hf)
    params = get_family(config.model_type).params(config)
    wholes = {param.mca_name(): full_shape(param, config) for param in params}
    layout = HfLayout(params, config, dict.fromkeys(wholes, "BF16"), wholes)
    write_tensors(directory, {name: layout.specs(name) for name in layout.files})
    layout.finish(directory)
    (directory / "config.json").write_text(json.dumps(hf))


def make_fp8_model(hf: dict[str, Any], directory: Path) -> None:
    """The same with the layers' matrices in fp8 blocks of 128 x 128, each with its scale."""
    make_model(hf, directory)
    index = read_specs(directory)
    specs = []
    for name, (dtype, shape) in index.items():
        if len(shape) == 2 and ".layers." in name:
            specs.append((name, "F8_E4M3", shape))
            specs.append((f"{name}_scale_inv", "F32", tuple(-(-size // 128) for size in shape)))
        else:
            specs.append((name, dtype, shape))
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    write_tensors(directory, {"model.safetensors": specs})
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(hf | {"quantization_config": settings}))


def read_specs(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor of a HF checkpoint."""
    from mca_models.storage.safetensors import read_header

    headers = [read_header(file) for file in sorted(directory.glob("*.safetensors"))]
    return {info.name: (info.dtype, info.shape) for header in headers for info in header.tensors.values()}


def write_tensors(directory: Path, files: dict[str, list[tuple[str, str, tuple[int, ...]]]]) -> None:
    """Write files of random bytes, in which no float of 2 or 4 bytes is infinite, large or next to nothing."""
    noise = np.random.default_rng(0).integers(0, 255, NOISE_BYTES, dtype=np.uint8)
    noise[3::4] &= 0x3F
    noise[1::4] &= 0x3F
    noise[1::2] |= 0x30
    directory.mkdir(parents=True, exist_ok=True)
    for file, specs in files.items():
        plan = plan_file(directory / file, specs, METADATA)
        with SafetensorsWriter(plan, checksum=False) as writer:
            for name, info in plan.tensors.items():
                for start in range(0, info.nbytes, NOISE_BYTES):
                    writer.write(name, noise[: min(NOISE_BYTES, info.nbytes - start)], start)


@dataclass(frozen=True)
class Case:
    """One model: what it is, in which layout, and what is demanded of it."""

    make: Callable[[dict[str, Any], Path], None]
    config: Callable[[float], dict[str, Any]]
    layout: dict[str, int]
    share: float = 1.0
    ratio: float | None = None
    """cp + sync seconds over ours; None: no target."""
    back: tuple[str, ...] = ()
    """Flags of the way back, which then writes something else than there was: cp copies that."""


CASES = {
    "dense": Case(make_model, dense_config, DENSE_LAYOUT, ratio=1.0),
    "quarter": Case(make_model, dense_config, DENSE_LAYOUT, share=0.25),
    "moe": Case(make_model, moe_config, MOE_LAYOUT, ratio=0.7),
    "fp8": Case(make_fp8_model, dense_config, DENSE_LAYOUT, share=0.5),
    "to-fp8": Case(make_model, dense_config, DENSE_LAYOUT, ratio=0.5, back=("--fp8",)),
}


@dataclass
class Runs:
    """Measurements of the runs of one command."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: int = 0
    nbytes: int = 0
    """Bytes written."""

    def add(self, seconds: float, cpu: float, peak: int) -> None:
        """One more run."""
        self.seconds.append(seconds)
        self.cpu.append(cpu)
        self.peak = max(self.peak, peak)


class Bench:
    """Measures one case in a folder of its own.

    Args:
        name: Of the case.
        gigabytes: Of the whole size; a case may take a share.
        rounds: Timed ones; one more warms the cache.
        folder: Empty; everything is made there.
    """

    def __init__(self, name: str, gigabytes: float, rounds: int, folder: Path) -> None:
        self.name, self.case, self.rounds = name, CASES[name], rounds
        self.source, self.copy, self.mca, self.back = (folder / n for n in ("hf", "copy", "mca", "back"))
        self.environment = {key: v for key, v in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        self.environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")  # as an installer compiles it
        self.case.make(self.case.config(gigabytes * 1e9 * self.case.share), self.source)
        self.largest = max(int(np.prod(shape)) * 2 for _, shape in read_specs(self.source).values())

    def converter(self, *arguments: object) -> list[str]:
        """A command line of mca-convert."""
        return [sys.executable, "-m", "mca_convert", *map(str, arguments)]

    def flags(self) -> list[str]:
        """The layout's."""
        return [f"--{name}={value}" for name, value in self.case.layout.items()]

    def steps(self) -> list[tuple[str, list[str], Path]]:
        """The commands of a round, each with what it writes."""
        to_mca = self.converter("--checkpoint_path", self.source, "--output_path", self.mca, *self.flags())
        to_hf = self.converter("--checkpoint_path", self.mca, "--output_path", self.back, *self.case.back)
        copy = ["cp", "-r", str(self.source), str(self.copy)]
        copy_back = ["cp", "-r", str(self.back if self.case.back else self.mca), str(self.copy)]
        back = [("cp back", copy_back, self.copy), ("to HF", to_hf, self.back)]
        return [
            ("cp", copy, self.copy),
            ("to MCA", to_mca, self.mca),
            *(reversed(back) if self.case.back else back),
        ]

    def run(self) -> list[str]:
        """Print both directions; returns the targets that were missed."""
        results = {name: Runs() for name, _, _ in self.steps()}
        for number in range(self.rounds + 1):
            for name, command, target in self.steps():
                shutil.rmtree(target, ignore_errors=True)
                measured = self.timed(command)
                if number:  # the first round warms the cache
                    results[name].add(*measured)
                elif target == self.back and not self.case.back:
                    self.quietly(self.converter("verify", self.source, self.back))
                results[name].nbytes = tree_bytes(target)
                if target == self.copy or not (target == self.mca or self.case.back):
                    shutil.rmtree(target)  # it would only fill the memory
        rows = [
            ("to MCA", "cp", self.source, self.flags()),
            ("to HF", "cp back", self.mca, [*self.case.back]),
        ]
        return [
            f"{self.name} {name}: {fault}"
            for name, cp, source, flags in rows
            for fault in self.report(name, results[name], results[cp], source, flags)
        ]

    def report(self, name: str, ours: Runs, cp: Runs, source: Path, flags: list[str]) -> list[str]:
        """Print one direction; returns the targets that it missed."""
        median, reference = statistics.median(ours.seconds), statistics.median(cp.seconds)
        planned = self.planned_bytes(source, flags)
        size = ours.nbytes / cp.nbytes
        print(
            f"| {self.name} {ours.nbytes / 1e9:.2f} GB | {name} | {median:.2f} | {reference:.2f} | "
            f"{reference / median:.2f} | {statistics.median(ours.cpu):.2f} | {statistics.median(cp.cpu):.2f} | "
            f"{ours.peak / 2**20:.0f} | {planned / 2**20:.0f} | {size:.4f} |",
            flush=True,
        )
        faults = []
        if self.case.ratio and reference / median < self.case.ratio:
            faults.append(f"{reference / median:.2f} of cp, wanted {self.case.ratio}")
        if ours.peak > MEMORY_TARGET + self.largest:
            faults.append(f"{ours.peak >> 20} MiB of memory")
        if abs(planned / ours.peak - 1) > PLAN_TARGET:
            faults.append(f"planned {planned >> 20} MiB, took {ours.peak >> 20}")
        if self.name != "fp8" and abs(size - 1) > SIZE_TARGET:
            faults.append(f"{size:.4f} of the source's bytes")
        return faults

    def planned_bytes(self, source: Path, flags: list[str]) -> int:
        """The peak of memory that ``plan`` predicts."""
        command = self.converter("plan", "--checkpoint_path", source, *flags, "--json")
        peak: int = json.loads(self.quietly(command))["peak_bytes"]
        return peak

    def quietly(self, command: list[str]) -> bytes:
        """Standard output of ``command``."""
        return subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self.environment
        ).stdout

    def timed(self, command: list[str]) -> tuple[float, float, int]:
        """Seconds until ``command`` and a sync are done, its CPU seconds, and its peak of anonymous memory."""
        os.sync()
        started = time.perf_counter()
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=self.environment)
        peak = [0]
        watcher = threading.Thread(target=watch, args=(process.pid, peak))
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        os.sync()
        seconds = time.perf_counter() - started
        watcher.join()
        if code:
            sys.exit(f"{' '.join(command)} failed with {code}")
        return seconds, usage.ru_utime + usage.ru_stime, peak[0]


def watch(pid: int, peak: list[int]) -> None:
    """Samples the anonymous memory of a process until it ends."""
    status = Path(f"/proc/{pid}/status")
    while True:
        try:
            lines = status.read_text().splitlines()
        except OSError:
            return
        found = [int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")]
        if not found:
            return
        peak[0] = max(peak[0], found[0])
        time.sleep(0.005)


def tree_bytes(directory: Path) -> int:
    """Bytes of all files below ``directory``."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def conditions() -> str:
    """The machine, and how busy it is."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    noise = bytes(1 << 20)
    started = time.perf_counter()
    for _ in range(200):
        zlib.crc32(noise)
    rate = 200 * len(noise) / (time.perf_counter() - started) / 1e9
    return (
        f"{cores} cores, load {load:.1f}, Linux {platform.release()}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}, zlib CRC-32 {rate:.1f} GB/s"
    )


def main() -> int:
    """Run the cases that were asked for; 1 if one misses a target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=[], help=f"any of {', '.join(CASES)}; default all")
    parser.add_argument("--gigabytes", type=float, default=4.3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    print(conditions())
    head = ("model", "direction", "median s", "cp + sync s", "cp / ours", "CPU s", "cp CPU s")
    head += ("anon. MiB", "planned MiB", "target / source")
    print("\n| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|", flush=True)
    faults = []
    for case in options.cases or CASES:
        folder = Path(tempfile.mkdtemp(prefix="mca-bench-", dir=options.folder))
        try:
            faults += Bench(case, options.gigabytes, options.rounds, folder).run()
        finally:
            shutil.rmtree(folder)
    for fault in faults:
        print(f"missed: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
