"""Times this tree against another checkout of it, in turns: start-ups, conversions and training steps.

    git worktree add /tmp/before COMMIT
    python benchmarks/before_and_after.py /tmp/before MODEL [--only start convert train] [--rounds 7] [--steps 30]

Both run with this environment's packages; MODEL is a small Hugging Face directory with a tokenizer. Of start-ups and
conversions the processor seconds of the command are compared, of training the time of a step on one rank. Says the
median of each, the least, and the ratio now / before with its spread over the rounds.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mca-config", "mca-models", "mca-train", "mca-convert")
STARTS = {
    "mca-train --help": ["-m", "mca_train", "--help"],
    "mca-convert --help": ["-m", "mca_convert", "--help"],
    "import mca_train": ["-c", "import mca_train"],
}
LAYOUT = ["--tensor_model_parallel_size", "2", "--pipeline_model_parallel_size", "2"]
KINDS = ("start", "convert", "train")
WARM = 5  # steps that are not counted


def environment(tree: Path, folder: Path) -> dict[str, str]:
    """In which the packages of ``tree`` are imported, compiled once."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "PYTHONPATH": os.pathsep.join(str(tree / "packages" / name / "src") for name in PACKAGES),
        "PYTHONPYCACHEPREFIX": str(folder / tree.resolve().as_posix().replace("/", "_")),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MCA_DEVICE": "cpu",
    }


def processor_seconds(words: list[str], env: dict[str, str]) -> float:
    """Return the CPU seconds of a Python command, user and system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *words],
        env=env,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def conversion(source: Path, target: Path, flags: list[str], env: dict[str, str]) -> float:
    """Processor seconds of one conversion into a new directory."""
    shutil.rmtree(target, ignore_errors=True)
    command = ["-m", "mca_convert", "--checkpoint_path", str(source), "--output_path", str(target)]
    return processor_seconds([*command, *flags], env)


def mca_of(env: dict[str, str]) -> Path:
    """Return the output folder for the tree of ``env``, which an older tree may not read."""
    return Path(f"{env['PYTHONPYCACHEPREFIX']}-mca")


def step(model: Path, folder: Path, steps: int, env: dict[str, str]) -> float:
    """The median seconds of a step of pre-training on one rank."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rows = [{"text": f"{number} " * 40} for number in range(400)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model_name_or_path": str(model),
        "train_file": str(folder / "train.jsonl"),
        "output_dir": str(folder / "run"),
        "seq_length": 64,
        "max_steps": steps + WARM,
        "logging_steps": 1,
        "learning_rate": "1e-3",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "save_strategy": "no",
    }
    (folder / "run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    processor_seconds(["-m", "mca_train", "pretrain", str(folder / "run.yaml")], env)
    lines = map(json.loads, (folder / "run" / "train_log.jsonl").read_text().splitlines())
    return statistics.median([line["step_time"] for line in lines if "step_time" in line][WARM:])


def in_turns(name: str, trees: dict[str, dict[str, str]], rounds: int, measure: Callable[..., float]) -> None:
    """Print what ``measure`` finds of both trees; the first round warms caches and does not count."""
    found: dict[str, list[float]] = {tree: [] for tree in trees}
    for number in range(rounds + 1):
        for tree in list(trees) if number % 2 else reversed(list(trees)):
            seconds = measure(trees[tree])
            if number:
                found[tree].append(seconds)
    ratios = sorted(now / before for before, now in zip(*found.values(), strict=True))
    told = ", ".join(f"{tree} {statistics.median(x):.4f} (least {min(x):.4f})" for tree, x in found.items())
    print(f"{name}: {told} s; ratio {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}")


def main() -> None:
    """Run and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    for tree in (args.before / "packages", args.model / "config.json"):
        if not tree.exists():
            parser.error(f"{tree}: no such file or directory")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees = {
            "before": environment(args.before, folder / "bytecode"),
            "now": environment(ROOT, folder / "bytecode"),
        }
        for what in args.only:
            if what == "start":
                for title, words in STARTS.items():
                    in_turns(
                        title, trees, args.rounds, lambda env, words=words: processor_seconds(words, env)
                    )
            elif what == "convert":
                in_turns(
                    "to MCA", trees, args.rounds, lambda env: conversion(args.model, mca_of(env), LAYOUT, env)
                )
                in_turns(
                    "to HF", trees, args.rounds, lambda env: conversion(mca_of(env), folder / "hf", [], env)
                )
            else:
                in_turns(
                    "step", trees, args.rounds, lambda env: step(args.model, folder / "t", args.steps, env)
                )


if __name__ == "__main__":
    main()
