"""A run that stops inside an epoch and resumes with another global batch size trains on every sample once."""

from collections.abc import Sized
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from harness import run_ranks
from train_cases import history, make_trainer, quietly, tiny_checkpoint

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

SAMPLES, STOP = 13, 3
RUN = {
    "max_steps": -1,
    "num_train_epochs": 2,
    "warmup_steps": 0,
    "lr_scheduler_type": "linear",
    "gradient_accumulation_steps": 2,
    "save_strategy": "steps",
    "save_steps": STOP,
}


def numbered() -> Any:
    """Samples that begin with their own number."""
    import numpy as np

    from mca_train import TokenDataset

    rows = [(np.arange(number, number + 8), np.ones(8, dtype=bool)) for number in range(SAMPLES)]
    return TokenDataset.from_samples(rows)


def run(
    checkpoint: Path, output_dir: Path, resume: str | None, stop: int = 0, **changes: Any
) -> dict[str, Any]:
    """Trains, up to ``stop`` if that is given; what it saw on this rank in each step, and what it logged."""
    from transformers import TrainerCallback

    from mca_train.run.record import summary

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == stop

    trainer = make_trainer(checkpoint, output_dir, train_dataset=numbered(), **RUN | changes)
    trainer.add_callback(Stop())
    seen: list[list[int]] = []

    def see(batch: Any) -> None:
        rows = [
            (row, mask)
            for b in batch.micro_batches
            for row, mask in zip(b.input_ids, b.loss_mask, strict=True)
        ]
        seen.append([int(row[0]) for row, mask in rows if mask.any()])

    trainer.before_forward = see
    path = str(output_dir / resume) if resume else None
    result = quietly(lambda: trainer.train(resume_from_checkpoint=path))
    keys = ("loss", "grad_norm", "learning_rate", "epoch")
    found = {key: history(trainer, key) for key in keys}
    return found | {"seen": seen, "max_steps": trainer.state.max_steps, "summary": summary(trainer, result)}


def again(checkpoint: Path, output_dir: Path) -> list[dict[str, Any]]:
    """On two ranks: from the checkpoint of one rank, from one of its own, and from the end."""
    return [run(checkpoint, output_dir, f"checkpoint-{step}") for step in (STOP, 6, 9)]


def test_every_sample_comes_once_with_any_batch_size(tmp_path):
    model, output = tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=2), tmp_path / "run"
    (first,) = run_ranks(1, run, model, output, None, STOP)
    assert [len(step) for step in first["seen"]] == [2] * STOP
    assert first["max_steps"] == 14
    found = run_ranks(2, again, model, output)
    resumed, own, ended = found[0]
    steps = [sorted(one + other) for one, other in zip(found[0][0]["seen"], found[1][0]["seen"], strict=True)]
    assert [len(step) for step in steps] == [4, 3, 4, 4, 4, 1]
    before = [number for step in first["seen"] for number in step]
    assert sorted(before + list(chain(*steps[:2]))) == list(range(SAMPLES)), "the rest of the epoch"
    assert sorted(chain(*steps[2:])) == list(range(SAMPLES)), "a whole epoch"
    assert resumed["max_steps"] == 9
    # four steps of four are an epoch; two of them remained, so the schedule goes on at the third of eight
    expected = [5e-3 * (8 - step) / 8 for step in range(2, 8)]
    assert resumed["learning_rate"][STOP:] == pytest.approx(expected)
    assert resumed["epoch"][STOP + 1] == 1.0
    assert resumed["epoch"][-1] == 2.0
    for key in ("loss", "grad_norm", "learning_rate", "epoch", "max_steps"):
        assert own[key] == resumed[key] == ended[key], "bit for bit after another change of nothing"
    assert ended["seen"] == []
    assert "none; the checkpoint is at step 9 already, the end of the run" in ended["summary"]
    assert "training loss" not in ended["summary"]


def sampler_order(loaders: Any, data: Any, **changes: Any) -> str:
    """Describe the order of training on ``data``, with ``changes`` of the arguments."""
    from dataclasses import replace

    args = copy(loaders.args)
    vars(args).update(changes)
    return str(replace(loaders, args=args).train(data)[1].order)


def packed_again(checkpoint: Path, output_dir: Path) -> list[list[str]]:
    """Return the messages of a resumed run, with the same packs and with those for two context ranks, by data."""
    from dataclasses import replace

    from mca_train.trainer.loaders import resume_position

    reported = []
    settings = RUN | {"sequence_packing": True, "pack_length": 16, "max_steps": 5, "save_strategy": "no"}
    for data in (numbered(), (numbered()[number] for number in range(SAMPLES))):
        trainer = make_trainer(checkpoint, output_dir, train_dataset=data, **settings)
        loaders, ranks = trainer._data.loaders, trainer.ranks
        cut = replace(ranks, layout=replace(ranks.layout, context_parallel_size=2))
        others = replace(loaders, ranks=cut, _packs={})
        if isinstance(data, Sized):
            evaluated = replace(loaders, _packs={})
            evaluated.evaluation(data)  # in the file's order, training in another
            steps = [next(iter(each.train(data)[0])) for each in (loaders, evaluated)]
            assert steps[0].micro_batches[0].input_ids.equal(steps[1].micro_batches[0].input_ids)
            assert [sampler_order(loaders, data), sampler_order(loaders, data, data_seed=5)] == [
                "shuffled by seed 3",
                "shuffled by seed 5",
            ]
            assert sampler_order(loaders, data, train_sampling_strategy="sequential") == "not shuffled"
            data.order_description = "rows of a.jsonl"
            assert sampler_order(loaders, data) == "rows of a.jsonl, shuffled by seed 3"
            args = copy(trainer.args)
            args.dataloader_num_workers = 1
            workers = replace(loaders, args=args).train(data)[0].multiprocessing_context
            assert workers.get_start_method() == "fork", "whatever Python's default"
        place = resume_position(trainer._progress.position, loaders.train(data)[1])
        for again in (loaders, others):
            with patch("mca_train.trainer.loaders.logger.warning") as warning:
                resume_position(place, again.train(data)[1])
            reported.append([call.args[0] % call.args[1:] for call in warning.call_args_list])
    return reported


def test_packs_of_another_context_size_are_reported(tmp_path):
    (reported,) = run_ranks(
        1, packed_again, tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=2), tmp_path / "run"
    )
    expected = (
        "the checkpoint counts packs of 16 tokens, of sequences in multiples of 1, this run packs of 16 tokens, of "
        "sequences in multiples of 4: some samples of this epoch may be used twice or not at all"
    )
    assert reported == [[], [expected]] * 2, "in memory, and of a stream"


def streamed(checkpoint: Path, output_dir: Path) -> str:
    from mca_config.errors import McaError

    class Stream:
        def __iter__(self) -> Any:
            return iter([numbered()[number] for number in range(SAMPLES)])

    settings = RUN | {"train_dataset": Stream(), "max_steps": 5}
    quietly(make_trainer(checkpoint, output_dir, **settings).train)
    trainer = make_trainer(checkpoint, output_dir, **settings | {"gradient_accumulation_steps": 3})
    try:
        quietly(lambda: trainer.train(resume_from_checkpoint=True))
    except McaError as error:
        return str(error)
    return "no error"


def test_a_stream_goes_on_with_steps_of_its_size_only(tmp_path):
    (said,) = run_ranks(
        1, streamed, tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=2), tmp_path / "run"
    )
    assert "the checkpoint's steps have 2 samples, this run's 3 samples; a stream can only be resumed" in said
