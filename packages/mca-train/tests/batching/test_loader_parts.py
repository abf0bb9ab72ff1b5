"""Parts of loaders by the arguments that they come from: order, seeds, rounds, caches, and errors."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from mca_config import TrainingArguments
from mca_config.errors import McaError, UsageError
from mca_config.layout import ParallelLayout
from mca_train import TokenDataset
from mca_train.batching.collate import PadCollator
from mca_train.batching.packing import packing_multiple
from mca_train.batching.position import RunPosition
from mca_train.batching.sampling import (
    BatchShape,
    PackedStream,
    StepSampler,
    StepStream,
    is_stream,
    require_steps,
)
from mca_train.trainer import loaders as module
from mca_train.trainer.kto import KtoKlPairs
from mca_train.trainer.loaders import Loaders, iterate_steps, resume_position

DATA = [{"input_ids": torch.arange(3) + number} for number in range(12)]


@pytest.fixture
def made(tmp_path: Path) -> Loaders:
    """Loaders of rank 1 of 2 replicas with two pipeline stages."""
    args = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=2,
        max_steps=5,
        seed=7,
    )
    ranks: Any = SimpleNamespace(
        layout=ParallelLayout(pipeline_model_parallel_size=2),
        device=torch.device("cpu"),
        data_parallel_size=2,
        data_parallel_rank=1,
        context_parallel_rank=0,
    )
    megatron = SimpleNamespace(
        sequence_parallel=False,
        moe_token_dispatcher_type="alltoall",
        moe_pad_expert_input_to_capacity=False,
        fp8=None,
        fp8_recipe="delayed",
        transformer_impl="local",
    )
    return Loaders(args=args, ranks=ranks, megatron=megatron, collate=PadCollator(0), pad_token_id=0)


@pytest.mark.parametrize(
    ("strategy", "data_seed", "seed", "order"),
    [
        ("random", None, 7, "shuffled by seed 7"),
        ("random", 0, 0, "shuffled by seed 0"),
        ("random", 9, 9, "shuffled by seed 9"),
        ("sequential", 9, None, "not shuffled"),
    ],
)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("packs", [False, True])
def test_training_samples_are_shuffled_by_the_seed_of_the_data_or_of_the_run(
    strategy: str,
    data_seed: int | None,
    seed: int | None,
    order: str,
    drop_last: bool,
    packs: bool,
    made: Loaders,
) -> None:
    args = made.args
    args.train_sampling_strategy, args.data_seed, args.dataloader_drop_last = strategy, data_seed, drop_last
    args.sequence_packing = packs
    _, sampler = replace(made, pack_length=3).train(DATA)
    assert isinstance(sampler, StepSampler)
    assert (sampler.seed, sampler.order, sampler._drop_last) == (seed, order, drop_last)
    assert sampler.shape == BatchShape(
        micro_batch_size=2, num_micro_batches=2, data_parallel_size=2, data_parallel_rank=1
    )
    units = "packs of 3 tokens, of sequences in multiples of 1" if packs else "samples"
    assert (sampler.num_samples, sampler.units) == (12, units)


def test_an_evaluation_fills_the_pipeline_in_the_order_of_its_samples(made: Loaders) -> None:
    made.args.dataloader_drop_last = True
    loader, sampler = made.evaluation(DATA)
    assert (sampler.seed, sampler._drop_last, sampler.num_samples) == (None, False, 12)
    assert (sampler.shape.micro_batch_size, sampler.shape.num_micro_batches) == (3, 2)
    (step,) = loader
    first = [int(row[0]) for batch in step.micro_batches for row in batch.input_ids]
    assert first == [3, 4, 5, 9, 10, 11], "the second half of each row of micro-batches"
    made.args.sequence_packing = True
    packed, sampler = replace(made, pack_length=6).evaluation(DATA)
    assert sampler.num_samples == 6 and len(packed) == 1


class Stream(IterableDataset[Any]):
    reads = 0

    def __iter__(self) -> Iterator[Any]:
        self.reads += 1
        return iter(DATA)


def test_caches_are_of_the_datasets_that_are_kept(made: Loaders) -> None:
    """A stream of evaluation samples is read once, and samples are packed once for each seed."""
    made.args.sequence_packing = True
    made = replace(made, pack_length=6)
    streams, packs = [Stream(), Stream()], [made._pack(DATA, "a", seed) for seed in (None, 1, None)]
    assert packs[0] is packs[2] is not packs[1]
    for stream in (*streams, *streams):
        made.evaluation(stream)
    assert [stream.reads for stream in streams] == [1, 1]
    made.keep_only([streams[1]])
    assert [*made._evaluation_samples] == [id(streams[1])]
    assert made._pack(DATA, "a", None) is not packs[0]
    made.evaluation(streams[0])
    assert [stream.reads for stream in streams] == [2, 1]


def test_a_stream_of_packs_needs_their_length(made: Loaders) -> None:
    made.args.sequence_packing = True
    with pytest.raises(McaError, match="sequence_packing of a stream needs pack_length"):
        made.train(Stream())
    _, stream = replace(made, pack_length=6).train(Stream())
    assert (stream.units.split(",")[0], stream.num_samples) == ("packs of 6 tokens", 5 * 8)
    made.args.sequence_packing = False
    _, stream = made.train(Stream())
    assert (stream.units, stream.num_samples, stream.seed) == ("samples", 5 * 8, None)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("pins", "device"), [(True, "cuda"), (True, "cpu"), (False, "cuda")])
def test_a_loader_has_the_options_of_the_run(workers: int, pins: bool, device: str, made: Loaders) -> None:
    made.args.dataloader_num_workers, made.args.dataloader_prefetch_factor = workers, 5 if workers else None
    made.args.dataloader_pin_memory = pins
    made.ranks.device = torch.device(device)  # type: ignore[misc]
    loader, sampler = made.train(DATA)
    assert loader.pin_memory is (pins and device == "cuda")
    assert (loader.num_workers, loader.prefetch_factor) == ((workers, 5) if workers else (0, None))
    assert loader.batch_sampler is sampler
    context = loader.multiprocessing_context
    assert (context is None) if not workers else context.get_start_method() == "fork"
    stream, _ = made.train(Stream())
    assert (stream.batch_size, stream.batch_sampler) == (None, None)


def test_workers_are_seeded_by_the_run_the_replica_and_the_position(made: Loaders) -> None:
    loader, _ = made.train(DATA)
    made.args.seed = 2**32 + 7
    for position in ((), (3, 8)):
        made.seed_workers(loader, *position)
        seed = np.random.SeedSequence((7, 1, *position)).generate_state(1)[0]
        assert loader.generator.initial_seed() == int(seed)


@pytest.mark.parametrize(("length", "multiple", "context"), [(7, 1, 1), (8, 4, 2), (12, 6, 3)])
def test_packed_sequences_are_cut_for_each_context_rank_and_its_mirror(
    length: int, multiple: int, context: int, made: Loaders
) -> None:
    made.ranks.layout = ParallelLayout(context_parallel_size=context)  # type: ignore[misc]
    assert packing_multiple(context) == multiple
    assert made._pack([{"input_ids": torch.arange(7)}], "a", None).fill.length == length


def test_experts_of_one_length_have_that_of_a_row_of_packs(made: Loaders) -> None:
    made.ranks.layout = ParallelLayout(expert_model_parallel_size=2)  # type: ignore[misc]
    made.megatron.moe_pad_expert_input_to_capacity = True
    shape = BatchShape(micro_batch_size=3, num_micro_batches=1, data_parallel_size=1, data_parallel_rank=0)
    made = replace(made, pack_length=6)
    assert made._common_length(made._pack(DATA, "a", None), shape) == 18
    assert made._common_length(DATA, shape) == 3


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_a_dataset_without_samples_or_a_length_is_named(name: str) -> None:
    assert module._length([0], name) == 1
    with pytest.raises(McaError, match=f"^{name} is empty$"):
        module._length([], name)
    with pytest.raises(McaError, match=f"^{name} has items but no length; give it __len__"):
        module._length(SimpleNamespace(), name)


def test_packs_need_the_collator_of_mca(made: Loaders) -> None:
    made.args.sequence_packing = True
    with pytest.raises(McaError, match="sequence_packing is not supported with data_collator"):
        replace(made, collate=dict)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [McaError, UsageError])
def test_an_error_in_a_worker_is_one_line_of_its_kind(kind: type[McaError]) -> None:
    def steps() -> Iterator[Any]:
        yield "first"
        raise kind(f"Caught {kind.__name__} in worker 0.\n  a.py:3\nmca.{kind.__name__}: row 3 is wrong\n")

    found = iterate_steps(steps())  # type: ignore[arg-type]
    assert next(found) == "first"
    with pytest.raises(kind) as error:
        next(found)
    assert (type(error.value), str(error.value)) == (kind, "row 3 is wrong")


SHAPE = BatchShape(micro_batch_size=2, num_micro_batches=2, data_parallel_size=2, data_parallel_rank=1)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({}, None),
        ({"unit": "packs", "order": "b"}, "counts packs, this run samples"),
        ({"unit": ""}, None),
        ({"epoch_samples": 22}, "is in an epoch of 22 samples, this run's have 23"),
        ({"epoch_samples": 0}, None),
        ({"samples": 23, "order": "b"}, None),
        ({"samples": 22, "order": "b"}, "has its samples in another order (b) than this run (a)"),
    ],
)
def test_a_position_in_other_data_is_reported(saved: dict[str, Any], words: str | None, caplog: Any) -> None:
    place = RunPosition(**{"epoch_samples": 23, "samples": 8, "step_samples": 4, "unit": "samples", **saved})
    found = resume_position(place, StepSampler(23, SHAPE, order="a"))
    assert (found.step_samples, found.epoch_samples, found.unit, found.order) == (8, 23, "samples", "a")
    expected = f"the checkpoint {words}: some samples of this epoch may be used twice or not at all"
    assert caplog.messages == ([] if words is None else [expected])


@pytest.mark.parametrize(("size", "fails"), [(8, False), (0, False), (4, True)])
def test_a_stream_is_resumed_with_steps_of_one_size(size: int, fails: bool) -> None:
    place, stream = RunPosition(samples=16, step_samples=size), StepStream([], SHAPE, 10)
    if fails:
        with pytest.raises(
            UsageError, match="steps have 4 samples, this run's 8 samples; a stream can only be resumed"
        ):
            resume_position(place, stream)
    else:
        assert resume_position(place, stream).samples == 16


def test_an_epoch_of_packs_counts_packs(caplog: Any) -> None:
    packs = {"units": "packs of 64 tokens"}
    place = RunPosition(epoch_samples=22, samples=8, step_samples=4, unit=packs["units"])
    resume_position(place, StepSampler(2300, SHAPE, **packs))
    assert "is in an epoch of 22 packs, this run's have 2,300: some samples" in caplog.text
    with pytest.raises(UsageError, match="steps have 4 packs, this run's 8 packs;"):
        resume_position(place, StepStream([], SHAPE, 10, **packs))
    with pytest.raises(UsageError, match="steps have 4 packs, this run's 8 samples;"):
        resume_position(place, StepStream([], SHAPE, 10))


def test_a_stream_counts_its_samples_in_full_steps() -> None:
    stream = StepStream([], SHAPE, 10)
    assert stream.num_samples == 80
    assert [stream.steps_after(samples) for samples in (0, 7, 8, 79, 80, 99)] == [10, 10, 9, 1, 0, 0]
    assert [stream.share(samples) for samples in (0, 20, 80)] == [0, 0.25, 1]


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [8, 4, 8, 4, 8]), (True, [8, 8, 8, 8, 8])])
def test_a_stream_restarts_after_each_pass(drop_last: bool, sizes: list[int]) -> None:
    epochs: list[int] = []
    source: Any = Stream()
    source.set_epoch = epochs.append
    stream = StepStream(source, SHAPE, 5, make=lambda row: int(row["input_ids"][0]), drop_last=drop_last)
    steps = list(stream)
    passes = sizes.count(4) + 1 if not drop_last else 5
    assert epochs == list(range(passes))
    counted = [sum(counts for _, counts in step) for step in steps]
    assert counted == [min(size // 2, 4) if size == 8 else 2 for size in sizes]
    assert steps[0] == [(2, True), (3, True), (6, True), (7, True)], "rank 1 of 2 with rows of 2 samples"
    stream.set_epoch(0, 17)
    assert list(stream) == steps[2:]


@pytest.mark.parametrize(("samples", "made"), [(0, 0), (9, 2)])
def test_a_stream_that_cannot_restart_is_an_error(samples: int, made: int) -> None:
    rows = iter(DATA[:samples])
    stream = StepStream(rows, SHAPE, 5)
    steps = iter(stream)
    for _ in range(made):
        next(steps)
    with pytest.raises(
        McaError, match=rf"no samples in pass {1 + bool(made)}, after {made} of 5 steps; a stream"
    ):
        next(steps)
    StepStream([0], SHAPE, 5)
    with pytest.raises(McaError, match="set max_steps"):
        require_steps(rows, 0)
    require_steps(rows, 1)
    require_steps(DATA, 0)
    assert [is_stream(each) for each in (rows, Stream(), DATA, 3)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("length", "multiple", "needs", "fails"),
    [(6, 1, 6, False), (6, 1, 7, True), (6, 4, 6, False), (6, 4, 7, False), (6, 4, 9, True)],
)
def test_a_sample_is_not_too_long_for_a_pack_because_of_its_padding(
    length: int, multiple: int, needs: int, fails: bool
) -> None:
    """The pack itself is rounded up: 6 tokens in multiples of 4 are 8."""
    stream = PackedStream([{"input_ids": torch.arange(needs)}], length, multiple=multiple, make=None)
    if not fails:
        assert [len(pack) for pack in stream] == [1]
        return
    whole = needs + -needs % multiple
    with pytest.raises(
        McaError,
        match=f"sample 0 takes {whole} tokens, but a pack holds {length + -length % multiple}; raise",
    ):
        list(stream)


def test_a_stream_of_packs_passes_the_epoch_on() -> None:
    epochs: list[int] = []
    source: Any = Stream()
    PackedStream(source, 6, multiple=1, make=None).set_epoch(3)
    source.set_epoch = epochs.append
    packed = PackedStream(source, 6, multiple=1, make=None)
    packed.set_epoch(4)
    assert epochs == [4] and [len(pack) for pack in packed] == [2] * 6


def answers(prompts: list[int], group: int, length: int | None = None) -> KtoKlPairs:
    rows = [([prompt, number, number], [False, True, True]) for number, prompt in enumerate(prompts)]
    return KtoKlPairs(TokenDataset.from_samples(rows), group, length)


@pytest.mark.parametrize(
    ("prompts", "group", "partners"),
    [
        ([1, 2, 3, 4, 5, 6], 3, [2, 0, 1, 5, 3, 4]),
        ([1, 1, 1], 2, [1, 0, 1]),
        ([1, 2, 2], 2, [1, 0, 0]),
        ([2, 1, 1, 2], 3, [2, 0, 1, 2]),
        ([2, 2, 2, 2], 3, [2, 0, 1, 2]),
        ([1, 1, 2, 2, 1], 5, [3, 4, 0, 1, 2]),
    ],
)
def test_answers_have_the_nearest_partner_with_another_prompt(
    prompts: list[int], group: int, partners: list[int]
) -> None:
    made = answers(prompts, group)
    assert [made._partner(index) for index in range(len(prompts))] == partners


def test_an_exchanged_answer_is_cut_and_keeps_the_images_of_its_prompt() -> None:
    made = answers([5, 6], 2, 2)
    sample = made[0]
    assert sample["other_input_ids"].tolist() == [5, 1] and len(sample["other_labels"]) == 2
    assert sample["input_ids"].tolist() == [5, 0, 0]
    places = [SimpleNamespace(start=0)]
    images = SimpleNamespace(places=places)
    rows = [{**made._dataset[index], "images": images} for index in range(2)]
    made._dataset = rows
    assert made[0]["other_images"] is images
    for start in (1, 2):
        places[0].start = start
        with pytest.raises(McaError, match="a completion has an image; put images in prompts only"):
            made[0]
