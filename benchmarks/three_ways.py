"""Measures one model by the plan, by the dry run and on real CPU ranks: ``python benchmarks/three_ways.py``.

Prints the tables of "One model, three ways" in docs/validation/evidence.md: MiB of the first rank of each
stage, and of runs on one rank those of the process.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "integration_tests" / "support"))

MIB = 1 << 20
RANKS = 4
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
KEYS = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "bf16": True,
    "seq_length": 1024,
}
PARTS = ("weights", "gradients", "optimizer", "activations", "temporaries")
ALONE = ("one rank", "recomputed", "dpo", "bf16", "lora", "experts")
"""Cases of `step_memory` on one rank."""


def without_ranks(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The stages of the plan, and of the dry run; runs in a process of its own."""
    from dry_run_cases import be_no_rank, prepared
    from mca_train.dry_run.stages import measure_stages
    from mca_train.plan.memory import plan_layout
    from mca_train.run.plan_input import make_plan_input

    be_no_rank()
    run = prepared(folder, "pretrain", KEYS, RANKS)
    subject = make_plan_input(run, "local")
    plan = plan_layout(subject, run.settings.training, run.layout, RANKS)
    dry = measure_stages(run.task, run.settings, run.model, run.layout, RANKS)
    return [asdict(stage) | {"peak": stage.total} for stage in plan.stages], [asdict(stage) for stage in dry]


def with_ranks(folder: Path) -> dict[str, Any]:
    """Memory of a rank and of its process."""
    from dry_run_cases import prepared
    from step_memory import stepped

    process, needs = stepped(prepared(folder, "pretrain", KEYS, RANKS))
    return asdict(needs) | {"process": process}


def stages(folder: Path) -> list[str]:
    """The lines of the first table."""
    from harness import run_ranks

    (folder / "config.json").write_text(json.dumps(MODEL))
    ((planned, dry),) = run_ranks(1, without_ranks, folder, process_group=False, timeout=300)
    real = run_ranks(RANKS, with_ranks, folder, timeout=300)
    ways = [way for number in (0, 1) for way in (planned[number], dry[number], real[number * 2])]
    heads = [f"stage {number}: plan | dry run | run" for number in (0, 1)]
    lines = [f"| | {' | '.join(heads)} |", "|---" * 7 + "|"]
    for part in (*PARTS, "peak", "process"):
        cells = (f"{way[part] / MIB:.1f}" if part in way else "" for way in ways)
        lines.append(f"| {part} | {' | '.join(cells)} |")
    cells = (f"{way['flops'] / 1e9:.1f}" if "flops" in way else "" for way in ways)
    lines.append(f"| GFLOP | {' | '.join(cells)} |")
    sent = (sum(one["bytes"] for one in way["messages"]) / MIB if "messages" in way else None for way in ways)
    lines.append(f"| MiB of messages | {' | '.join('' if s is None else f'{s:.1f}' for s in sent)} |")
    return lines


def processes(folder: Path) -> list[str]:
    """The lines of the second table."""
    from harness import run_ranks
    from step_memory import said, taken, write_model

    lines = ["| one rank | process | dry run | |", "|---|---|---|---|"]
    for name in ALONE:
        write_model(folder, name)
        (process,) = run_ranks(1, taken, folder, name, timeout=300)
        (dry,) = run_ranks(1, said, folder, name, 0, process_group=False)
        more = process / dry - 1
        lines.append(f"| {name} | {process / MIB:.1f} | {dry / MIB:.1f} | {more:+.1%} |")
    return lines


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write("\n".join([*stages(Path(folder)), "", *processes(Path(folder))]) + "\n")


if __name__ == "__main__":
    main()
