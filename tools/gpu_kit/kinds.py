"""Every kind of run from the shell, as a user starts it: all at once, as each needs little."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.gpu_kit.kit import Kit, of_tests

KINDS: dict[str, dict[str, Any]] = {
    "pretrain": {},
    "sft": {"sequence_packing": True},
    "dpo": {},
    "kto": {"per_device_train_batch_size": 2},
    "reward": {},
    "classify": {"num_labels": 2},
    "sft-lora": {"lora_rank": 4, "lora_target_modules": "all-linear"},
    "sft-experts": {},
    "sft-offload": {"bf16": True, "optimizer_cpu_offload": True, "use_distributed_optimizer": True},
}
TINY = ("sft", "sft-experts")


def kinds(kit: Kit) -> None:
    """Two steps of each, a checkpoint, and the model at the end."""
    tests = of_tests("train_cases")
    tokenizer = of_tests("tokenizers_for_tests").byte_tokenizer()
    for name, make in (("model", tests.tiny_checkpoint), ("experts", tests.sparse_checkpoint)):
        make(kit.scratch / name, vocab_size=264, num_hidden_layers=2)
        tokenizer.save_pretrained(kit.scratch / name)
    (kit.scratch / "rows.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(1, 17)))
    chosen = TINY if kit.tiny else tuple(KINDS)
    running = {name: _start(kit, name, KINDS[name]) for name in chosen}
    while running:
        ended = [name for name, process in running.items() if process.poll() is not None]
        for name in ended:
            code = running.pop(name).returncode
            kit.check(f"mca-train {name}: exit code", code, 0)
            if not code:
                _look(kit, name)
        kit.figure("still running", ", ".join(running) or "none")
        time.sleep(0.5)


def row(number: int) -> dict[str, Any]:
    """Row that has the columns of every kind."""
    return {
        "text": "abcdefgh"[: number % 8] * 12,
        "prompt": f"{number}+1=",
        "completion": "x" * number,
        "chosen": str(number + 1),
        "rejected": "no",
        "label": number % 2,
    }


def _start(kit: Kit, name: str, changes: dict[str, Any]) -> subprocess.Popen[bytes]:
    values = {
        "model_name_or_path": str(kit.scratch / ("experts" if "experts" in name else "model")),
        "train_file": str(kit.scratch / "rows.jsonl"),
        "output_dir": str(kit.scratch / name),
        "seq_length": 32,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 5e-3,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_hf_model": True,
        **changes,
    }
    path = kit.scratch / f"{name}.json"
    path.write_text(json.dumps(values))
    port = {"OMP_NUM_THREADS": "1"} if kit.device == "cpu" else {}
    with (kit.scratch / f"{name}.log").open("w") as log:  # which is kept if the step fails or is stopped
        return subprocess.Popen(
            [sys.executable, "-m", "mca_train", name.split("-")[0], str(path)],
            stdout=log,
            stderr=log,
            env=os.environ | port,
        )


def _look(kit: Kit, name: str) -> None:
    """Losses are numbers, and there is a model."""
    folder: Path = kit.scratch / name
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    kit.holds(f"mca-train {name}: two losses", len(losses) == 2 and all(0 < loss < 20 for loss in losses))
    kit.holds(f"mca-train {name}: a model", (folder / "mca_config.json").is_file() or "lora" in name)
