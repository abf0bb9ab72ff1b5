"""What a run of ``mca-train`` says at its end."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def summary(trainer: Any, result: Any) -> str:
    """What was done, how fast, and where it is."""
    output = Path(trainer.args.output_dir)
    history = trainer.state.log_history
    evaluations = [log["eval_loss"] for log in history if "eval_loss" in log]
    speed = averages(history, since=trainer.started_at_step)
    if result.global_step == trainer.started_at_step:
        ending = f"the checkpoint is at step {result.global_step} already, the end of the run"
        lines = {"steps": f"none; {ending}", "model": str(output)}
        return "\n".join(f"{name:<5}  {value}" for name, value in lines.items())
    lines = {
        "steps": f"{result.global_step} in {result.metrics['train_runtime']:.1f} s"
        + (f", {speed['step_time']:.3g} s each" if speed else ""),
        "tokens": f"{trainer.state.num_input_tokens_seen:,}"
        + (f", {speed['tokens_per_second']:,.0f} per second" if speed else ""),
        **({"speed": _flops(speed)} if "model_tflops" in speed else {}),
        "training loss": f"{result.training_loss:.4f} (mean of the run)",
        **({"evaluation loss": f"{evaluations[-1]:.6f}"} if evaluations else {}),
        "model": str(output),
        **({"Hugging Face model": str(output / "hf")} if trainer.args.save_hf_model else {}),
        "log": str(output / "train_log.jsonl"),
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _flops(speed: Mapping[str, float]) -> str:
    mfu = f", MFU {speed['mfu']:.1%}" if "mfu" in speed else ""
    return f"{speed['model_tflops']:.4g} model TFLOP/s{mfu}"


def averages(history: Iterable[Mapping[str, float]], since: int = 0) -> dict[str, float]:
    """Means over the time of training of what the logs after step ``since`` say about speed; empty without any."""
    totals: dict[str, float] = {}
    seconds, before, steps = 0.0, since, 0
    for log in history:
        if "step_time" not in log or log["step"] <= since:
            continue
        took = int(log["step"]) - before
        before, steps = int(log["step"]), steps + took
        seconds += took * log["step_time"]
        for name in ("tokens_per_second", "model_tflops", "mfu"):
            if name in log:
                totals[name] = totals.get(name, 0.0) + log[name] * took * log["step_time"]
    if not seconds:
        return {}
    return {"step_time": seconds / steps} | {name: total / seconds for name, total in totals.items()}
