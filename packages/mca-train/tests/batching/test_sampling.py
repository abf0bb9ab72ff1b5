from itertools import chain

import pytest
import torch

from mca_train.batching.position import RunPosition
from mca_train.batching.sampling import BatchShape, StepSampler, StepStream
from mca_train.trainer.loaders import resume_position


def steps(num_samples, *, mbs=1, micro=1, dp=1, multiple=1, smallest=None, epoch=0, first=0, **options):
    """For each step, all ranks' samples, micro-batch after micro-batch."""
    ranks = []
    for rank in range(dp):
        shape = BatchShape(
            micro_batch_size=mbs,
            num_micro_batches=micro,
            data_parallel_size=dp,
            data_parallel_rank=rank,
            group=multiple,
            smallest_group=smallest or multiple,
        )
        sampler = StepSampler(num_samples, shape, **options)
        sampler.set_epoch(epoch, first)
        ranks.append(list(sampler))
        assert len(ranks[-1]) == len(sampler)
    return ranks


def real(step_lists):
    return sorted(i for step in step_lists for i in step if i >= 0)


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("num_samples", [1, 7, 16, 23])
def test_every_sample_counts_once_whatever_the_layout(num_samples, seed):
    for mbs, micro, dp, multiple in [(1, 8, 1, 1), (2, 2, 2, 2), (1, 2, 4, 2), (8, 1, 1, 1)]:
        ranks = steps(num_samples, mbs=mbs, micro=micro, dp=dp, multiple=multiple, seed=seed)
        assert real(chain(*ranks)) == list(range(num_samples))


def test_the_global_batch_is_the_same_on_every_layout():
    single = steps(23, micro=8, seed=3)[0]
    for mbs, micro, dp in [(2, 2, 2), (1, 2, 4), (4, 1, 2)]:
        ranks = steps(23, mbs=mbs, micro=micro, dp=dp, seed=3)
        for number, step in enumerate(single):
            assert real([rank[number] for rank in ranks]) == real([step])


def test_all_ranks_have_as_many_micro_batches_also_in_a_short_step():
    ranks = steps(9, mbs=1, micro=4, dp=2, multiple=2, seed=1)
    assert {len(rank[-1]) for rank in ranks} == {2}


@pytest.mark.parametrize(("num_samples", "fillers"), [(3, 1), (4, 0), (5, 1), (6, 0), (7, 0), (8, 0)])
def test_a_group_is_filled_only_as_far_as_the_schedule_asks(num_samples, fillers):
    ((step,),) = steps(num_samples, micro=8, multiple=4, smallest=2)
    assert [place >= 0 for place in step] == [True] * num_samples + [False] * fillers


def test_epochs_differ_and_repeat():
    first, again, second = (steps(16, micro=4, seed=1, epoch=e)[0] for e in (0, 0, 1))
    assert first == again != second


def test_resuming_skips_exactly_the_trained_steps():
    assert steps(23, micro=4, seed=1, first=8)[0] == steps(23, micro=4, seed=1)[0][2:]


@pytest.mark.parametrize("drop_last", [False, True])
def test_resuming_with_other_steps_gives_what_remains(drop_last):
    before = steps(23, micro=2, seed=1, drop_last=drop_last)[0][:5]
    after = steps(23, micro=4, seed=1, first=10, drop_last=drop_last)[0]
    order = list(chain(*steps(23, micro=23, seed=1)[0]))
    assert list(chain(*before, *after)) == order[: 22 if drop_last else 23]


def test_drop_last_leaves_out_the_short_step():
    assert len(steps(23, micro=4, seed=1, drop_last=True)[0]) == 5
    assert len(steps(3, micro=4, seed=1, drop_last=True)[0]) == 1, "a lone short step is not dropped"


SHAPE = BatchShape(micro_batch_size=1, num_micro_batches=4, data_parallel_size=1, data_parallel_rank=0)


def in_memory(order):
    return StepSampler(23, SHAPE, order=order)


def streamed(order):
    return StepStream([], SHAPE, 10, order=order)


@pytest.mark.parametrize("sampler", [in_memory, streamed])
@pytest.mark.parametrize(
    ("place", "now", "is_told"),
    [
        ({"samples": 8}, "seed 2", True),
        ({"samples": 8}, "seed 1", False),
        ({"samples": 8}, "", False),
        (
            {"samples": 8, "order": ""},
            "seed 2",
            False,
        ),  # of a stream of the user's
        ({"samples": 0}, "seed 2", False),  # nothing is skipped
        ({"samples": 8, "epoch_ended": True}, "seed 2", False),
    ],
)
def test_samples_in_another_order_are_told_of(sampler, place, now, is_told, caplog):
    place = RunPosition(
        **{"epoch_samples": 23, "step_samples": 4, "unit": "samples", "order": "seed 1", **place}
    )
    assert resume_position(place, sampler(now)).order == now
    expected = (
        "the checkpoint has its samples in another order (seed 1) than this run (seed 2): some samples of this epoch "
        "may be used twice or not at all"
    )
    assert [record.getMessage() for record in caplog.records] == [expected] * is_told


def test_an_epoch_that_is_done_has_no_order_but_a_stream_goes_on(caplog):
    place = RunPosition(epoch_samples=23, samples=23, step_samples=4, unit="samples", order="seed 1")
    resume_position(place, in_memory("seed 2"))
    assert not caplog.records
    resume_position(place, streamed("seed 2"))
    assert len(caplog.records) == 1


def test_a_new_sampler_has_the_order_of_the_first_epoch():
    shape = BatchShape(
        micro_batch_size=1,
        num_micro_batches=1,
        data_parallel_size=1,
        data_parallel_rank=0,
        group=1,
        smallest_group=1,
    )
    fresh = [index for (index,) in StepSampler(9, shape, seed=5)]
    assert fresh == [index for (index,) in steps(9, seed=5)[0]]
    for epoch in (0, 3):
        expected = torch.randperm(9, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
        assert [index for (index,) in steps(9, seed=5, epoch=epoch)[0]] == expected
    assert fresh == torch.randperm(9, generator=torch.Generator().manual_seed(5)).tolist()
