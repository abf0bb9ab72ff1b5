"""The order of streamed rows."""

from mca_train.data.streams import FileRows


def order(seed: int | None, epoch: int = 0) -> list[int]:
    rows = FileRows([("a.jsonl", [{"n": n} for n in range(20)])], "train_file", seed=seed, buffer_size=20)
    rows.set_epoch(epoch)
    return [row["n"] for row in rows]  # type: ignore[misc]


def test_each_seed_and_epoch_has_its_order():
    orders = [order(seed, epoch) for seed in (1, 65, 1 + 2**31, -1) for epoch in (0, 1)]
    assert len({tuple(each) for each in orders}) == 8
    assert all(sorted(each) == list(range(20)) for each in orders)
    assert order(1, 1) == orders[1] != list(range(20))
    assert order(None, 1) == list(range(20))


def first(seed: int | None, size: int = 20, limit: int | None = None) -> list[int]:
    parts = [("a.jsonl", [{"n": n} for n in range(20)])]
    rows = FileRows(parts, "train_file", seed=seed, buffer_size=size, limit=limit)
    return [row["n"] for row in rows]  # type: ignore[misc]


def test_the_first_pass_has_the_order_of_epoch_0():
    assert first(1) == first(1 + 2**32) == order(1, 0)
    assert first(None, limit=5) == [0, 1, 2, 3, 4] == sorted(first(1, limit=5))
    assert first(1, size=1) == list(range(20))
