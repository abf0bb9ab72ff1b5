"""Save, resume, export and convert: a run goes on as if it had not stopped, and every format holds the same model."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tools.gpu_kit.kit import Kit, Layers, of_tests
from tools.gpu_kit.parity import EXACT, saved_logits

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split bf16": {"use_distributed_optimizer": True, "bf16": True},
    "in the background": {"ckpt_format": "torch_dist", "async_save": True, "use_distributed_optimizer": True},
}


def files(kit: Kit, layers: Layers) -> None:
    """On a model of four layers."""
    settings = kit.settings(layers)
    checkpoint = of_tests("train_cases").tiny_checkpoint(kit.scratch / "model")
    for name, changes in RUNS.items():
        if not kit.tiny or name == "in the background":
            _resumed(kit, name, checkpoint, settings | changes)
    _formats(kit, checkpoint, layers, settings)


def _resumed(kit: Kit, name: str, checkpoint: Path, changes: dict[str, Any]) -> None:
    """Losses after a checkpoint are those of the run that wrote it."""
    folder = kit.scratch / name.replace(" ", "-")
    before = used(kit)
    found = of_tests("train_cases").stop_and_resume(
        checkpoint, folder, use_cpu=kit.device == "cpu", dataloader_pin_memory=kit.device == "cuda", **changes
    )
    kit.figure(f"{name}: GiB at most, of all", used(kit) - before)
    for key in ("loss", "grad_norm"):
        straight, resumed = found["straight"][key], found["resumed"][key]
        error = max(abs(a - b) / abs(a) for a, b in zip(straight, resumed, strict=True))
        kit.check(f"{name}: {key} after resuming", error, 0.0 if kit.device == "cpu" else 1e-4)
    kit.holds(f"{name}: equal weights", found["state"]["equal_weights"] or kit.device == "cuda")
    kit.figure(f"{name}: every bit", str(found["state"]["equal_weights"]))


def used(kit: Kit) -> float:
    """GiB that were held at most."""
    return torch.cuda.max_memory_allocated() / 2**30 if kit.device == "cuda" else 0.0


def _formats(kit: Kit, checkpoint: Path, layers: Layers, settings: dict[str, Any]) -> None:
    """HF to MCA by the trainer's writer and by the converter, and back; transformers computes the same with each."""
    from mca_models.megatron import AutoModel

    args = of_tests("layouts").arguments("tp1", **settings)
    model: Any = AutoModel.from_pretrained(checkpoint, args)
    input_ids = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(2))
    expected = saved_logits(kit, checkpoint, input_ids, torch.float32)
    model.save_pretrained(kit.scratch / "mca")
    _converter(kit, "convert", "--checkpoint_path", checkpoint, "--output_path", kit.scratch / "converted")
    _converter(kit, "verify", kit.scratch / "mca", checkpoint)
    _converter(kit, "verify", kit.scratch / "mca", kit.scratch / "converted")
    again: Any = AutoModel.from_pretrained(kit.scratch / "converted", args)
    again.save_pretrained_as_hf(kit.scratch / "hf")
    exported = saved_logits(kit, kit.scratch / "hf", input_ids, torch.float32)
    kit.check("exported logits", float((exported - expected).abs().max()), 0.0)
    for name, each in (("loaded", model), ("converted", again)):
        difference = float((each.logits(input_ids).cpu() - expected).abs().max())
        kit.check(f"{name} logits", difference, EXACT[layers])


def _converter(kit: Kit, verb: str, *words: str | Path) -> None:
    """One command of mca-convert."""
    command = [sys.executable, "-m", "mca_convert", *([] if verb == "convert" else [verb]), *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=90)
    sys.stderr.write(ran.stderr)
    kit.check(f"mca-convert {verb} {Path(words[-1]).name}: exit code", ran.returncode, 0)
