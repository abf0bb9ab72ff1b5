"""Times a step of McaTrainer against a hand-written Megatron-core loop of the same model, data and schedule.

    python benchmarks/step_time.py [--ranks 1] [--steps 60] [--rounds 20] [--longest 128]

Both are built once per process and take turns, ``--steps / --rounds`` steps at a time, so that a busy machine slows
both. A step has 8 samples of 8 to ``--longest`` tokens, one a micro-batch. Four ranks are tensor 2 x pipeline 2. Says
the median step of each and their ratio, on the slowest rank. The loop by hand reads ready batches and calls schedule
and optimizer, nothing else: no sampler, callbacks or log. On the CPU, whose ranks are forked; on a GPU the steps
``speed-*`` of `tools/gpu_kit` say the same.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "integration_tests" / "support"))


def by_hand(trainer: Any, batches: list[Any]) -> Any:
    """A generator that takes one step of Megatron's loop each time it is asked."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    engine = trainer.engine
    one = len(engine.chunks) == 1

    def forward(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        output = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
        )

        def loss(out: Any) -> Any:
            total = (out.float() * batch.loss_mask).sum()
            return total, batch.loss_mask.sum().int(), {"loss": total.detach()}

        return output, loss

    run = get_forward_backward_func()
    while True:
        for batch in batches:
            for chunk in engine.chunks:
                chunk.zero_grad_buffer()
            engine.optimizer.zero_grad()
            iterators = [iter(batch.micro_batches) for _ in engine.chunks]
            run(
                forward_step_func=forward,
                data_iterator=iterators[0] if one else iterators,
                model=engine.chunks[0] if one else engine.chunks,
                num_microbatches=len(batch.micro_batches),
                seq_length=batch.seq_length,
                micro_batch_size=batch.micro_batch_size,
                decoder_seq_length=batch.seq_length,
                forward_only=False,
            )
            engine.optimizer.step()
            yield


def measure(
    checkpoint: Path, output: Path, steps: int, rounds: int, longest: int, changes: dict[str, Any]
) -> dict[str, list[float]]:
    """Seconds of every step, on one rank."""
    import torch.distributed as dist
    from transformers import TrainerCallback

    from train_cases import make_trainer, quietly, samples

    each = steps // rounds
    times: dict[str, list[float]] = {"trainer": [], "by hand": []}
    hand: list[Any] = []

    class Turns(TrainerCallback):
        """Times the trainer from step end to step end; every ``each`` steps the loop by hand has its turn."""

        since = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            now = time.perf_counter()
            if state.global_step > 2 and self.since:
                times["trainer"].append(now - self.since)
            if state.global_step > 2 and (state.global_step - 2) % each == 0:
                self.take_turn()
            else:
                self.since = now

        def take_turn(self) -> None:
            if not hand:
                hand.append(by_hand(trainer, list(trainer.get_train_dataloader())))
                next(hand[0])
            dist.barrier()
            for _ in range(each):
                start = time.perf_counter()
                next(hand[0])
                times["by hand"].append(time.perf_counter() - start)
            dist.barrier()
            self.since = time.perf_counter()

    data = samples(64, longest=longest)
    trainer = make_trainer(
        checkpoint, output, train_dataset=data, max_steps=steps + 2, logging_steps=10, **changes
    )
    trainer.add_callback(Turns())
    quietly(trainer.train)
    return times


def main() -> None:
    """Run and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=(1, 4), default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--longest", type=int, default=128)
    args = parser.parse_args()
    from harness import run_ranks
    from train_cases import tiny_checkpoint

    size: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    four = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(Path(folder) / "model", **size)
        changes = four if args.ranks == 4 else {}
        call = (checkpoint, Path(folder) / "out", args.steps, args.rounds, args.longest, changes)
        found = run_ranks(args.ranks, measure, *call, timeout=900)
    medians = {name: max(statistics.median(rank[name]) for rank in found) for name in ("trainer", "by hand")}
    ratio = medians["trainer"] / medians["by hand"]
    print(
        f"{args.ranks} rank(s), {args.steps} steps each: McaTrainer {medians['trainer'] * 1000:.1f} ms, by hand "
        f"{medians['by hand'] * 1000:.1f} ms, ratio {ratio:.3f}"
    )


if __name__ == "__main__":
    main()
