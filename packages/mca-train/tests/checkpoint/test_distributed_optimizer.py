"""Shards of a distributed optimizer, which are joined to full tensors, on simulated ranks in one process."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mca_models.megatron import platform
from mca_train.checkpoint import distributed_optimizer
from mca_train.checkpoint.distributed_optimizer import _empty_full, _gather_full, bucket_shares, states

RANKS, SIZE, OFFSET = 4, 12, 100
"""A bucket of twelve elements on each of four ranks, from position 100 of its buffer."""


def bucket() -> Any:
    return SimpleNamespace(grad_data=torch.zeros(RANKS * SIZE), offset=OFFSET)


@pytest.mark.parametrize(
    ("start", "stop", "shares"),
    [
        (0, 12, {0: (0, 12)}),
        (12, 13, {1: (0, 1)}),
        (5, 12, {0: (0, 7)}),
        (5, 13, {0: (0, 7), 1: (7, 8)}),
        (10, 40, {0: (0, 2), 1: (2, 14), 2: (14, 26), 3: (26, 30)}),
        (36, 48, {3: (0, 12)}),
    ],
)
def test_a_parameter_is_on_the_ranks_whose_stretch_it_meets(
    start: int, stop: int, shares: dict[int, tuple[int, int]]
) -> None:
    assert bucket_shares(bucket(), OFFSET + start, OFFSET + stop, RANKS) == shares


class Group:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return RANKS


@pytest.fixture
def mail(monkeypatch: pytest.MonkeyPatch) -> dict[int, Tensor]:
    """Messages to the owner by sender; global ranks are those of the group plus 50."""
    sent: dict[int, Tensor] = {}

    def exchange(operations: list[Any]) -> None:
        for operation, tensor, peer, group in operations:
            if operation == "send":
                sent[group.rank()] = tensor.clone()
                sent[-1] = torch.tensor(peer)
            else:
                tensor.copy_(sent.pop(peer - 50))

    dist = SimpleNamespace(
        P2POp=lambda *values: values,
        isend="send",
        irecv="receive",
        get_global_rank=lambda group, rank: rank + 50,
        batch_isend_irecv=None,
    )
    monkeypatch.setattr(distributed_optimizer, "dist", dist)
    monkeypatch.setattr(distributed_optimizer, "_exchange", exchange)
    return sent


def shard(rank: int, shares: dict[int, tuple[int, int]], whole: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Return the optimizer of one rank, which holds its share of ``whole``."""
    start, stop = shares.get(rank, (0, 0))
    own = {name: tensor.flatten()[start:stop].clone() for name, tensor in whole.items()}
    held = own["param"].to(dtype)
    main = {"step": torch.tensor(3.0), "skipped": 7, **own}
    if dtype == torch.float32:
        main["param"] = torch.full_like(held, -1.0)  # as Transformer Engine's Adam leaves it
    return SimpleNamespace(
        data_parallel_group=Group(rank),
        _get_main_param_and_optimizer_states=lambda param: main,
        optimizer=SimpleNamespace(param_groups=[{}, {"params": [None, None, held]}]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("start", "shape", "owner"),
    [(0, (3, 4), 0), (5, (2, 4), 0), (10, (5, 6), 1), (11, (2, 1), 0), (8, (7, 2), 1)],
)
def test_the_rank_with_most_of_a_parameter_joins_its_state(
    start: int, shape: tuple[int, int], owner: int, dtype: torch.dtype, mail: dict[int, Tensor]
) -> None:
    torch.manual_seed(0)
    shares = bucket_shares(bucket(), OFFSET + start, OFFSET + start + shape[0] * shape[1], RANKS)
    whole = {name: torch.randn(shape) for name in ("exp_avg", "exp_avg_sq", "param")}
    param: Any = SimpleNamespace(numel=lambda: shape[0] * shape[1], shape=shape)

    def gather(rank: int) -> dict[str, Tensor]:
        made = shard(rank, shares, whole, dtype)
        made.model_param_group_index_map = _ByIdentity(param)
        return _gather_full(made, param, shares)

    for rank in sorted(range(RANKS), key=lambda rank: rank == owner):
        found = gather(rank)
        if rank != owner:
            assert found == {}
            assert (rank in mail) == (rank in shares) and (rank not in shares or int(mail[-1]) == owner + 50)
    assert list(found) == ["exp_avg", "exp_avg_sq", "param"]
    assert all(torch.equal(found[name], whole[name]) for name in found)
    assert all(tensor.dtype == torch.float32 for tensor in found.values()) and not mail.keys() - {-1}


class _ByIdentity:
    """Index of the only parameter."""

    def __init__(self, param: Any) -> None:
        self._param = param

    def __getitem__(self, param: Any) -> tuple[int, int]:
        assert param is self._param
        return 1, 2


@pytest.mark.parametrize(
    ("own", "keys"),
    [
        ({"exp_avg": 1, "param": 1}, ["exp_avg", "param"]),
        ({"exp_avg": 1}, ["exp_avg", "param"]),
        ({"param": 1}, ["exp_avg", "exp_avg_sq", "param"]),
        ({}, ["exp_avg", "exp_avg_sq", "param"]),
    ],
)
def test_a_rank_asks_for_what_it_has_or_for_adams_state(
    own: dict[str, int], keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed_optimizer, "_local_shards", lambda optimizer, param: own)
    param: Any = torch.zeros(2, 3, dtype=torch.bfloat16)
    found = _empty_full(None, param)  # type: ignore[arg-type]
    assert list(found) == keys
    assert {(tensor.shape, tensor.dtype) for tensor in found.values()} == {((2, 3), torch.float32)}


@pytest.mark.parametrize("is_loading", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_states_are_numbered_over_all_buffers(
    is_loading: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three parameters in two buffers: rank 0 has the first and the second, rank 1 the second and the third."""
    platform.prepare()
    from megatron.core.dist_checkpointing import ShardedTensor

    params = [torch.nn.Parameter(torch.zeros(2, 4, dtype=torch.bfloat16)) for _ in range(3)]
    model = {
        f"name {n}": ShardedTensor.from_rank_offsets(f"name {n}", param, replica_id=(1, 2, n))
        for n, param in enumerate(params)
    }
    first = SimpleNamespace(
        buckets=[None, bucket()],
        param_index_map={params[0]: (OFFSET, OFFSET + 8, 1), params[1]: (OFFSET + 8, OFFSET + 16, 1)},
    )
    second = SimpleNamespace(buckets=[bucket()], param_index_map={params[2]: (OFFSET + 16, OFFSET + 24, 0)})
    monkeypatch.setattr(
        distributed_optimizer,
        "_gather_full",
        lambda optimizer, param, shares: {"exp_avg": torch.ones(2, 4)} if rank == min(shares) else {},
    )
    monkeypatch.setattr(
        distributed_optimizer, "_empty_full", lambda optimizer, param: {"param": torch.zeros(2, 4)}
    )
    made: Any = SimpleNamespace(
        data_parallel_group=Group(rank), buffers=[first, second], distributed_optimizer_instance_id=9
    )
    found = states(made, model, is_loading)
    has = ({0: {0, 1}, 1: {1, 2}} if is_loading else {0: {0, 1}, 1: {2}})[rank]
    name = "param" if is_loading else "exp_avg"
    assert found.keys() == {0, 1, 2} and {number for number, state in found.items() if state} == has
    for number in has:
        entry = found[number][name]
        assert entry.key == f"optimizer.state.{name}.name {number}"
        assert (entry.replica_id, entry.dtype) == ((1, 2, 9), torch.float32)


def test_only_distributed_optimizers_take_the_method_and_only_within_the_block() -> None:
    plain, split = SimpleNamespace(), SimpleNamespace(gbuf_ranges=[])
    chain: Any = SimpleNamespace(chained_optimizers=[plain, split])
    name = "sharded_param_state_fully_reshardable"
    with pytest.raises(KeyError), distributed_optimizer.per_parameter_states(chain):
        assert getattr(split, name).func is states and getattr(split, name).args == (split,)
        assert not hasattr(plain, name)
        raise KeyError
    assert not hasattr(split, name)
    with distributed_optimizer.per_parameter_states(split):  # type: ignore[arg-type]
        assert hasattr(split, name)
