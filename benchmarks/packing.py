"""Times training on packs against training on padded batches of the same samples, whose lengths have a long tail.

    python benchmarks/packing.py [--rounds 3] [--samples 96] [--layers 4]

One process, one thread, fp32. Both train an epoch by turns. Padded batches hold 8 samples; packs are as long as the
longest sample and come 4 to a batch. Says tokens that are computed for each that counts, tokens per second of either
(medians), and the gain as a share of the padding that is removed: 1 would be all of it, below 0.9 is a failure.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "integration_tests" / "support"))

LONGEST, BATCH, PACKS = 512, 8, 4
PADDED = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1}
PACKED = {
    "sequence_packing": True,
    "pack_length": LONGEST,
    "per_device_train_batch_size": PACKS,
    "gradient_accumulation_steps": 1,
}


def ragged(count: int) -> Any:
    """Log-normal lengths between 8 and `LONGEST`, median 55."""
    import numpy as np

    from mca_train import TokenDataset
    from train_cases import VOCAB

    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(4.0, 1.0, count).astype(int), 8, LONGEST)
    return TokenDataset.from_samples([(draw.integers(0, VOCAB, n), np.ones(n, bool)) for n in lengths])


def epoch(checkpoint: Path, output: Path, data: Any, changes: dict[str, Any]) -> tuple[float, float]:
    """Tokens per second of one epoch, and tokens computed for each that counts."""
    from train_cases import history, make_trainer, quietly

    trainer = make_trainer(checkpoint, output, train_dataset=data, **changes)
    computed = sum(
        micro.input_ids.numel() for step in trainer.get_train_dataloader() for micro in step.micro_batches
    )
    steps = len(trainer.get_train_dataloader())
    trainer.args.max_steps = trainer.args.logging_steps = steps
    quietly(trainer.train)
    (speed,) = history(trainer, "tokens_per_second")
    return speed, computed / int(data.lengths.sum())


def measure(
    checkpoint: Path, output: Path, samples: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the results of `epoch` for each kind, ``rounds`` times; a first, short one of each does not count."""
    for changes in (PADDED, PACKED):
        epoch(checkpoint, output, ragged(16), changes)
    found: dict[str, list[tuple[float, float]]] = {"padded": [], "packed": []}
    for _ in range(rounds):
        for name, changes in (("padded", PADDED), ("packed", PACKED)):
            found[name].append(epoch(checkpoint, output, ragged(samples), changes))
    return found


def main() -> int:
    """Run and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    from harness import run_ranks
    from train_cases import tiny_checkpoint

    size = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": LONGEST}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(Path(folder) / "model", num_hidden_layers=args.layers, **size)
        call = (checkpoint, Path(folder) / "out", args.samples, args.rounds)
        (found,) = run_ranks(1, measure, *call, timeout=900)
    speed = {name: statistics.median(tokens for tokens, _ in runs) for name, runs in found.items()}
    computed = {name: runs[0][1] for name, runs in found.items()}
    gain, removed = speed["packed"] / speed["padded"], computed["padded"] / computed["packed"]
    for name in found:
        print(
            f"{name}: {computed[name]:.2f} tokens computed for each that counts, {speed[name]:.0f} tokens/s"
        )
    print(f"gain {gain:.2f} of {removed:.2f}: {gain / removed:.2f} of the padding removed")
    return int(gain < 0.9 * removed)


if __name__ == "__main__":
    sys.exit(main())
