"""Times mca-convert against ``cp -r`` plus ``sync`` of the same bytes, interleaved, with warm cache.

    python benchmarks/conversion.py [--gigabytes 4.3] [--rounds 5] [--folder DIR] [dense|moe ...]

Makes random models (dense Llama; Qwen3-MoE with 128 experts in each of 24 layers), then for each round runs
cp, HF -> MCA, cp, MCA -> HF. Prints medians, the ratio of throughputs, the peak of anonymous memory beyond
the interpreter's own, and the size of the tree on disk. Needs three times the model's size in the folder.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from mca_models.checkpoint import METADATA, HfLayout, SafetensorsWriter, plan_file
from mca_models.checkpoint.shapes import expected_shape
from mca_models.templates import config_from_hf, family_of

BASE = {
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
    "attention_bias": False,
}


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


CASES = {
    "dense": (dense_config, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "moe": (
        moe_config,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
        },
    ),
}


def make_model(hf: dict[str, Any], directory: Path) -> int:
    """Writes a HF checkpoint of random bytes; returns their number."""
    config = config_from_hf(hf)
    params = family_of(config.model_type).params(config)
    wholes = {param.mca_name(): shape for param in params if (shape := expected_shape(param, config))}
    wholes |= {param.mca_name(): (config.kv_channels,) for param in params if param.mca_name() not in wholes}
    layout = HfLayout(params, config, dict.fromkeys(wholes, "BF16"), wholes)
    noise = np.random.default_rng(0).integers(0, 255, 64 << 20, dtype=np.uint8)
    directory.mkdir(parents=True)
    total = 0
    for file in layout.files:
        plan = plan_file(directory / file, layout.specs(file), METADATA)
        with SafetensorsWriter(plan, checksum=False) as writer:
            for name, info in plan.tensors.items():
                for start in range(0, info.nbytes, noise.size):
                    writer.write(name, noise[: min(noise.size, info.nbytes - start)], start)
                total += info.nbytes
    layout.finish(directory)
    (directory / "config.json").write_text(json.dumps(hf))
    return total


def timed(command: list[str]) -> tuple[float, float, int]:
    """Seconds until ``command`` and a sync are done, its CPU seconds, and its peak of anonymous memory."""
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
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


def measure(case: str, gigabytes: float, rounds: int, folder: Path) -> None:
    """Makes the model of ``case`` in ``folder``, and times and prints both directions."""
    make, sizes = CASES[case]
    source, copy, mca, back = (folder / name for name in ("hf", "copy", "mca", "back"))
    total = make_model(make(gigabytes * 1e9), source)
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    convert = [sys.executable, "-m", "mca_convert", "--checkpoint_path"]
    steps = {
        "cp": (["cp", "-r", str(source), str(copy)], copy),
        "to_mca": ([*convert, str(source), "--output_path", str(mca), *flags], mca),
        "cp again": (["cp", "-r", str(source), str(copy)], copy),
        "to_hf": ([*convert, str(mca), "--output_path", str(back)], back),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0)
    for number in range(rounds + 1):
        for name, (command, target) in steps.items():
            if target != back or name == "to_hf":
                shutil.rmtree(target, ignore_errors=True)
            elapsed, busy, peak = timed(command)
            if number:  # the first round warms the cache
                seconds[name].append(elapsed)
                cpu[name].append(busy)
                peaks[name] = max(peaks[name], peak)
        if number == 0:
            subprocess.run(
                [*convert[:-1], "verify", str(source), str(back)], check=True, stderr=subprocess.DEVNULL
            )
    cp = statistics.median(seconds["cp"] + seconds["cp again"])
    cp_cpu = statistics.median(cpu["cp"] + cpu["cp again"])
    size = tree_bytes(mca) / tree_bytes(source)
    for name in ("to_mca", "to_hf"):
        median = statistics.median(seconds[name])
        print(
            f"| {case} {total / 1e9:.2f} GB | {name} | {median:.2f} | {cp:.2f} | {cp / median:.2f} | "
            f"{statistics.median(cpu[name]):.2f} | {cp_cpu:.2f} | "
            f"{peaks[name] / 2**20:.0f} | {size:.4f} |",
            flush=True,
        )


def main() -> None:
    """Runs the cases that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=[], help=f"any of {', '.join(CASES)}; default all")
    parser.add_argument("--gigabytes", type=float, default=4.3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    print(
        "| model | direction | median s | cp + sync s | cp / ours | CPU s | cp CPU s | anon. MiB | tree / source |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for case in options.cases or CASES:
        folder = Path(tempfile.mkdtemp(prefix="mca-bench-", dir=options.folder))
        try:
            measure(case, options.gigabytes, options.rounds, folder)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
