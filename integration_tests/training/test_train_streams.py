"""Streams train as the same samples in the same order do, on every layout, with workers, packed, and resumed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from train_cases import (
    arguments,
    filled_packs,
    make_trainer,
    samples,
    stop_and_resume,
    train_losses,
)

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

RUN = {"max_steps": 4, "gradient_accumulation_steps": 4, "count": 6}  # a step and a half are one pass
ORDERED = RUN | {"train_sampling_strategy": "sequential"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "two-workers": (1, {"dataloader_num_workers": 2}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "dp2": (2, {"gradient_accumulation_steps": 2}),
    "dp2-pp2-vpp2": (
        4,
        {
            "gradient_accumulation_steps": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
        },
    ),
}


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[number] for number in range(len(self.data)))


def hugging_faces(data: Any) -> Any:
    import datasets

    rows = [{name: values.tolist() for name, values in row.items()} for row in Stream(data)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)


@pytest.fixture(scope="module")
def in_memory(checkpoint, tmp_path_factory):
    return run_ranks(1, train_losses, checkpoint, tmp_path_factory.mktemp("out"), **ORDERED)[0]


def same(one: dict[str, list[float]], other: dict[str, list[float]]) -> None:
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.cases(0, always=["two-workers"])
@pytest.mark.parametrize("name", CASES)
def test_streams_train_as_their_samples_in_memory(name, in_memory, checkpoint, tmp_path):
    size, changes = CASES[name]
    data = Stream(samples(RUN["count"]))
    for found in run_ranks(size, train_losses, checkpoint, tmp_path, train_dataset=data, **(RUN | changes)):
        same(in_memory, found)


def streamed_by_datasets(checkpoint: Path, output: Path, **changes: Any) -> dict[str, list[float]]:
    return train_losses(
        checkpoint, output, train_dataset=hugging_faces(samples(RUN["count"])), **(RUN | changes)
    )


def test_streams_of_datasets_are_not_dealt_out_twice(in_memory, checkpoint, tmp_path):
    (found,) = run_ranks(1, streamed_by_datasets, checkpoint, tmp_path, dataloader_num_workers=2)
    same(in_memory, found)


def test_packed_streams(checkpoint, tmp_path):
    data, packed = filled_packs(6, 4), {"sequence_packing": True, "pack_length": 32}
    run = {"max_steps": 4, "gradient_accumulation_steps": 4, "train_sampling_strategy": "sequential"}
    (whole,) = run_ranks(1, train_losses, checkpoint, tmp_path / "a", train_dataset=data, **(run | packed))
    split = run | packed | {"gradient_accumulation_steps": 2}
    for found in run_ranks(2, train_losses, checkpoint, tmp_path / "b", train_dataset=Stream(data), **split):
        same(whole, found)


@pytest.mark.cases(0, always=["2"])
@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_a_stream_is_exact(workers, checkpoint, tmp_path):
    data = Stream(samples(RUN["count"]))
    run = RUN | {"max_steps": 5, "gradient_accumulation_steps": 2, "dataloader_num_workers": workers, "at": 1}
    for found in run_ranks(2, stop_and_resume, checkpoint, tmp_path, train_dataset=data, **run):
        straight, resumed = found["straight"], found["resumed"]
        assert resumed["loss"][-3:] == straight["loss"][-3:]
        assert resumed["grad_norm"][-3:] == straight["grad_norm"][-3:]
        assert found["state"] == {"steps": 5, "equal_weights": True}


def refusals(checkpoint: Path, output: Path) -> list[str]:
    from mca_config.errors import McaError
    from mca_train.batching.sampling import require_steps

    reported = []
    data = samples(6)
    with pytest.raises(McaError) as error:
        require_steps(Stream(data), arguments(output, max_steps=-1).max_steps)
    reported.append(str(error.value))
    once = make_trainer(
        checkpoint, output, train_dataset=iter(list(Stream(data))), **(RUN | {"max_steps": 9})
    )
    with pytest.raises(McaError) as error:
        once.train()
    return [*reported, str(error.value)]


def test_streams_without_an_end_or_a_second_pass_raise_an_error(checkpoint, tmp_path):
    ((endless, once),) = run_ranks(1, refusals, checkpoint, tmp_path)
    assert endless == "train_dataset is a stream, which has no length; set max_steps"
    assert "yielded no samples in pass 2, after 2 of 9 steps" in once
