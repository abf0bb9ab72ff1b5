"""Distribution of samples by the model's needs, for any arguments of a trainer."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from mca_config import TrainingArguments
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_train.batching.collate import CollatorFormat, PadCollator
from mca_train.batching.packing import PackedDataset
from mca_train.trainer.loaders import Loaders


def loaders(folder: Path, layout: ParallelLayout, **made_with: Any) -> Loaders:
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=1, gradient_accumulation_steps=6, max_steps=1
    )
    ranks: Any = SimpleNamespace(
        layout=layout,
        device=torch.device("cpu"),
        data_parallel_size=1,
        data_parallel_rank=0,
        context_parallel_rank=0,
    )
    plain = {"sequence_parallel": False, "moe_token_dispatcher_type": "alltoall", "fp8": None}
    plain |= {"fp8_recipe": "delayed", "moe_pad_expert_input_to_capacity": False, "transformer_impl": "local"}
    megatron = SimpleNamespace(**(plain | made_with))
    return Loaders(args=args, ranks=ranks, megatron=megatron, collate=PadCollator(0), pad_token_id=0)


def widths(made: Loaders, dataset: Any) -> set[int]:
    """Return the widths of all rows of the two steps of an epoch."""
    loader, _ = made.train(dataset)
    return {batch.input_ids.shape[1] for step in loader for batch in step.micro_batches}


def test_the_model_says_what_rows_and_steps_must_be(tmp_path: Path) -> None:
    data = [{"input_ids": torch.arange(length)} for length in (9, *[5] * 11)]
    experts = ParallelLayout(expert_model_parallel_size=2)
    assert widths(loaders(tmp_path, experts), data) == {5, 9}
    assert widths(loaders(tmp_path, experts, moe_token_dispatcher_type="allgather"), data) == {9}
    assert widths(loaders(tmp_path, experts, moe_pad_expert_input_to_capacity=True), data) == {9}
    assert widths(loaders(tmp_path, ParallelLayout(), moe_pad_expert_input_to_capacity=True), data) == {5, 9}
    assert widths(loaders(tmp_path, ParallelLayout(), fp8="hybrid"), data) == {16}
    virtual = ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    _, sampler = loaders(tmp_path, virtual, microbatch_group_size_per_vp_stage=3).train(data)
    assert (sampler.shape.group, sampler.shape.smallest_group) == (3, 2)
    plain = ParallelLayout(pipeline_model_parallel_size=2)
    _, sampler = loaders(tmp_path, plain, microbatch_group_size_per_vp_stage=3).train(data)
    assert (sampler.shape.group, sampler.shape.smallest_group) == (1, 1)


def test_the_format_of_the_collator_reaches_the_labels(tmp_path: Path) -> None:
    made = replace(
        loaders(tmp_path, ParallelLayout()), collator_format=CollatorFormat(labels_are_shifted=True)
    )
    loader, _ = made.train([{"input_ids": torch.arange(5)}] * 6)
    for batch in next(iter(loader)).micro_batches:
        assert torch.equal(batch.labels, batch.input_ids)


def test_packs_of_the_client_are_not_packed_again(tmp_path: Path) -> None:
    samples = [{"input_ids": torch.arange(3)} for _ in range(6)]
    packs = PackedDataset(samples, 3)
    made = loaders(tmp_path, ParallelLayout())
    made.args.sequence_packing = True
    made = replace(made, pack_length=6)
    assert widths(made, packs) == {3}
    assert widths(made, samples) == {6}


def test_packs_of_a_list_that_has_grown_are_made_again(tmp_path: Path) -> None:
    samples = [{"input_ids": torch.arange(3)} for _ in range(2)]
    made = loaders(tmp_path, ParallelLayout())
    made.args.sequence_packing = True
    made = replace(made, pack_length=3)
    assert sum(step.num_samples for step in made.evaluation(samples)[0]) == 2
    samples.extend(samples)
    assert sum(step.num_samples for step in made.evaluation(samples)[0]) == 4


def test_packs_of_a_list_whose_samples_have_other_lengths_are_made_again(tmp_path: Path) -> None:
    samples = [{"input_ids": torch.arange(3)} for _ in range(4)]
    made = loaders(tmp_path, ParallelLayout())
    made.args.sequence_packing = True
    made = replace(made, pack_length=6)

    def num_packs() -> int:
        return len(made._pack(samples, "train_dataset", 1))

    assert num_packs() == 2
    samples[0] = {"input_ids": torch.arange(3) + 7}
    before = made._pack(samples, "train_dataset", 1)
    assert made._pack(samples, "train_dataset", 1) is before  # reads the new sample itself
    samples[:] = [{"input_ids": torch.arange(1)} for _ in samples]
    assert num_packs() == 1


def test_workers_draw_other_numbers_on_each_replica_and_after_a_resume(tmp_path: Path) -> None:
    made = loaders(tmp_path, ParallelLayout())
    loader, _ = made.train([{"input_ids": torch.arange(3)}])
    seeds = []
    for replica, *position in ((0, 0, 0), (0, 0, 8), (0, 1, 0), (1, 0, 0)):
        made.ranks.data_parallel_rank = replica
        for context_rank in range(2):
            made.ranks.context_parallel_rank = context_rank
            made.seed_workers(loader, *position)
            seeds.append(loader.generator.initial_seed())
    assert seeds[::2] == seeds[1::2], "ranks of one replica"
    assert len({*seeds}) == 4


def test_rows_have_few_lengths_where_attention_plans_each(tmp_path: Path) -> None:
    data = [{"input_ids": torch.arange(length)} for length in (9, 70, *[5] * 10)]
    made = loaders(tmp_path, ParallelLayout(), transformer_impl="transformer_engine")
    assert len(widths(made, data)) == 2
    made.ranks.device = torch.device("cuda")
    made.args.dataloader_pin_memory = False
    assert widths(made, data) <= {64, 128}


class Stream(IterableDataset[Any]):
    """Without samples: what stands against it is said before one is read."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("made_with", "reported"),
    [
        (
            {"moe_token_dispatcher_type": "allgather"},
            "moe_token_dispatcher_type allgather .* set it to alltoall",
        ),
        ({"moe_pad_expert_input_to_capacity": True}, "moe_pad_expert_input_to_capacity .* set it to false"),
    ],
)
def test_a_stream_is_refused_where_ranks_need_one_length(
    made_with: dict[str, Any], reported: str, tmp_path: Path
) -> None:
    with pytest.raises(McaError, match=reported):
        loaders(tmp_path, ParallelLayout(expert_model_parallel_size=2), **made_with).train(Stream())


def rounded_up(features: list[Any]) -> dict[str, torch.Tensor]:
    """Round up as Hugging Face's collators do with ``pad_to_multiple_of=8``."""
    width = max(len(feature["input_ids"]) for feature in features)
    features = [*features, {"input_ids": torch.zeros(width + -width % 8, dtype=torch.long)}]
    batch = PadCollator(0)(features)
    ids, lengths = batch["input_ids"][:-1], batch["num_tokens"][:-1]
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "labels": batch["labels"][:-1], "attention_mask": mask}


def test_a_collator_makes_no_row_longer_where_ranks_need_one_length(tmp_path: Path) -> None:
    data = [{"input_ids": torch.arange(length)} for length in (9, *[5] * 11)]
    experts = ParallelLayout(expert_model_parallel_size=2)
    assert widths(replace(loaders(tmp_path, experts), collate=rounded_up), data) == {8, 16}
    made = replace(loaders(tmp_path, experts, moe_token_dispatcher_type="allgather"), collate=rounded_up)
    with pytest.raises(
        McaError, match=r"data_collator made rows of 16 tokens, the longest sample has 9; .* pad_to_m"
    ):
        widths(made, data)
    assert widths(made, [{"input_ids": torch.arange(8)}, *data[1:]]) == {8}


def test_a_stream_that_was_dealt_out_already_is_refused(tmp_path: Path) -> None:
    from datasets import IterableDataset as Streamed
    from datasets.distributed import split_dataset_by_node

    made = loaders(tmp_path, ParallelLayout())
    whole = Streamed.from_generator(lambda: iter([{"input_ids": [1, 2, 3]}] * 12))
    part = split_dataset_by_node(whole, rank=0, world_size=2)
    made.train(whole)
    for read, name in ((made.train, "train_dataset"), (made.evaluation, "eval_dataset")):
        with pytest.raises(McaError, match=f"^{name} is one of 2 shards of a stream .split_dataset_by_node"):
            read(part)


@pytest.mark.parametrize(
    ("tp", "cp", "ep", "etp", "needs"),
    [
        (1, 1, 1, 1, False),
        (2, 1, 1, 2, False),
        (2, 2, 1, 2, False),
        (2, 1, 1, 1, False),
        (1, 2, 1, 2, True),
        (2, 1, 1, 4, True),
        (2, 1, 2, 1, True),
    ],
)
def test_experts_whose_ranks_have_other_samples_need_one_length(
    tp: int, cp: int, ep: int, etp: int, needs: bool, tmp_path: Path
) -> None:
    """A rank's tokens are those of its tensor ranks, so experts sharded over more ranks get other samples too."""
    layout = ParallelLayout(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    dispatched = {"moe_token_dispatcher_type": "allgather"}
    found = [
        loaders(tmp_path, layout, **made)._fixed_length_option()
        for made in ({}, dispatched, {"moe_pad_expert_input_to_capacity": True})
    ]
    options = [
        ("moe_token_dispatcher_type allgather", "alltoall"),
        ("moe_pad_expert_input_to_capacity", "false"),
    ]
    assert found == [None, *(options if needs else [None, None])]
