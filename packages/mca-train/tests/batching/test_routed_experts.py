"""The column ``routed_experts``: sliced like the tokens, padded by -1, and checked."""

import re

import pytest
import torch

from mca_config.errors import McaError
from mca_config.model.moe import Moe
from mca_models.megatron.features.router_replay import RoutedExperts
from mca_train.batching.collate import CollatorFormat, ExpertBatching, PadCollator, StepCollator

LENGTHS = (3, 8)


class Config:
    """Fields of a model's configuration that are read: 3 layers, of which the last 2 have experts."""

    num_layers, model_type = 3, "tiny"
    moe = Moe(num_moe_experts=50, moe_layer_freq=(0, 1, 1))

    def is_moe_layer(self, layer):
        return layer > 0


class Dense(Config):
    moe = None


def experts(tokens, start=0):
    """Return experts t + start and t + start + 20 + l of token t in layer l, so that all positions differ."""
    first = torch.arange(start, start + tokens)
    return torch.stack([torch.stack([first, first + 20 + layer], 1) for layer in range(2)], 1)


def samples(**changes):
    made = [
        {"input_ids": torch.arange(n) + 1, "routed_experts": experts(n, 10 * i)}
        for i, n in enumerate(LENGTHS)
    ]
    made[1] |= changes
    return [(sample, True) for sample in made]


def collate(rows, **options):
    settings = {"collate": PadCollator(0), "micro_batch_size": 2, "experts": ExpertBatching(config=Config())}
    return StepCollator(**(settings | options))(rows)


def test_experts_are_at_their_tokens():
    (micro,) = collate(samples()).micro_batches
    assert micro.routed_experts.dtype == torch.int16
    assert micro.routed_experts[0, :3].tolist() == experts(3).tolist()
    assert (micro.routed_experts[0, 3:] == -1).all()
    assert micro.routed_experts[1].tolist() == experts(8, 10).tolist()


@pytest.mark.parametrize("packed", [False, True])
def test_context_parallel_ranks_get_the_experts_of_their_tokens(packed):
    for rank in range(2):
        options = {"context_parallel_size": 2, "context_parallel_rank": rank, "multiple": 4, "packed": packed}
        (micro,) = collate(samples(), **options).micro_batches
        for ids, first, segments in zip(
            micro.input_ids.flatten(),
            micro.routed_experts.flatten(0, 1),
            micro.segments.flatten(),
            strict=True,
        ):
            number = int(segments)
            expected = experts(1, int(ids) - 1 + 10 * number)[0] if ids else torch.full((2, 2), -1)
            assert first.tolist() == expected.tolist()


def test_layers_without_experts_may_be_among_them():
    every = torch.cat([torch.zeros(8, 1, 2, dtype=torch.int64), experts(8, 10)], 1)
    (micro,) = collate(samples(routed_experts=every)).micro_batches
    assert micro.routed_experts[1].tolist() == experts(8, 10).tolist()


def test_sides_of_a_pair_have_their_own():
    pair = {f"{side}_{name}": x for side in ("chosen", "rejected") for name, x in samples()[1][0].items()}
    (micro,) = collate([(pair, True)]).micro_batches
    assert micro.routed_experts.shape == (2, 8, 2, 2)


def test_the_checksum_covers_experts():
    assert collate(samples()).checksum == collate(samples()).checksum
    assert collate(samples()).checksum != collate(samples(routed_experts=experts(8, 11))).checksum


def shifted(features):
    assert all("routed_experts" not in feature for feature in features)
    rows = [torch.as_tensor(feature["input_ids"]) for feature in features]
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([row[:-1] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "labels": pad([row[1:] for row in rows], batch_first=True),
        "attention_mask": (ids > 0).long(),
    }


def test_a_users_collator_need_not_know_them():
    format = CollatorFormat(labels_are_shifted=True)
    (micro,) = collate(samples(), collate=shifted, collator_format=format).micro_batches
    assert micro.routed_experts[1].tolist() == experts(7, 10).tolist()
    with pytest.raises(McaError, match="data_collator made a row of 2 tokens of a sample with 3"):
        collate(samples(), collate=shifted)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("rows", "checks", "message"),
    [
        (
            samples(routed_experts=experts(7)),
            {},
            "has shape [7, 2, 2] for 8 tokens; expected [8, layers, topk]",
        ),
        (samples(routed_experts=experts(8)[:, :1]), {}, "the 2 layers that have experts or all 3"),
        (samples(routed_experts=experts(8)[..., :1]), {}, "has 1 experts per token and layer"),
        (samples(routed_experts=experts(8, 25)), {}, "has expert 53; expected 0 to 49"),
        (samples(routed_experts=experts(8) * 0), {}, "has [0, 0] as the experts of a token"),
        (samples(), {"config": Dense()}, "needs a model with experts, but tiny is dense; remove it"),
        ([*samples(), ({"input_ids": torch.arange(4)}, True)], {}, "which other samples have"),
        ([({"input_ids": torch.arange(4)}, True)], {"required": True}, "which this trainer requires"),
    ],
)
def test_wrong_experts_are_one_error(rows, checks, message, packed):
    with pytest.raises(McaError, match=re.escape(message)):
        collate(rows, packed=packed, experts=ExpertBatching(**({"config": Config()} | checks)))


def test_the_shape_of_the_fake_model_is_as_described():
    assert RoutedExperts.from_config(Config()) == RoutedExperts((1, 2), 3, 2, 50)


def test_columns_of_a_hugging_face_dataset_are_lists():
    from datasets import Dataset

    rows = [{name: x.tolist() for name, x in sample.items()} for sample, _ in samples()]
    (micro,) = collate([(row, True) for row in Dataset.from_list(rows)]).micro_batches
    assert micro.routed_experts.tolist() == collate(samples()).micro_batches[0].routed_experts.tolist()


@pytest.mark.parametrize("count", [1, 2])
def test_padding_behind_a_pack_has_no_experts(count):
    (micro,) = collate(samples()[:count], packed=True, length=24).micro_batches
    is_padding = micro.input_ids[0] == 0
    assert is_padding.sum() == 24 - sum(LENGTHS[:count])
    assert (micro.routed_experts[0, is_padding] == -1).all()
    assert (micro.routed_experts[0, ~is_padding] >= 0).all()
