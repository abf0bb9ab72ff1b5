"""One loss scale of the optimizers of dense parameters and of experts."""

from types import SimpleNamespace
from typing import Any

import pytest

from mca_train.engine.optimizer import _share_loss_scale


@pytest.mark.parametrize(("dense", "experts"), [(False, False), (True, False), (False, True), (True, True)])
def test_an_overflow_anywhere_lowers_the_scale_of_both_once(dense: bool, experts: bool) -> None:
    updates: list[bool] = []

    class Scaler:
        def update(self, overflowed: bool) -> None:
            updates.append(overflowed)

    def single(overflowed: bool) -> Any:
        one: Any = SimpleNamespace(grad_scaler=Scaler())

        def prepare_grads() -> bool:
            one.grad_scaler.update(overflowed)
            return overflowed

        one.prepare_grads = prepare_grads
        return one

    chain: Any = SimpleNamespace(chained_optimizers=[single(dense), single(experts)])
    _share_loss_scale(chain)
    first, second = chain.chained_optimizers
    assert first.grad_scaler is second.grad_scaler
    assert chain.prepare_grads() is (dense or experts)
    assert updates == [dense or experts] and "update" not in vars(first.grad_scaler)


@pytest.mark.parametrize("scalers", [["own"], [None, None], []])
def test_one_scale_or_none_is_not_shared(scalers: list[str | None]) -> None:
    singles = [SimpleNamespace(grad_scaler=scaler) for scaler in scalers]
    chain: Any = SimpleNamespace(chained_optimizers=singles) if singles else SimpleNamespace()
    _share_loss_scale(chain)
    assert not hasattr(chain, "prepare_grads") and [each.grad_scaler for each in singles] == scalers
    without: Any = SimpleNamespace(chained_optimizers=[SimpleNamespace(), SimpleNamespace()])
    _share_loss_scale(without)
    assert not hasattr(without, "prepare_grads")


def test_the_scale_is_updated_again_after_an_error() -> None:
    class Scaler:
        def update(self, overflowed: bool) -> None: ...

    def fail() -> bool:
        raise KeyError

    scaler = Scaler()
    chain: Any = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(grad_scaler=scaler, prepare_grads=fail) for _ in range(2)]
    )
    _share_loss_scale(chain)
    with pytest.raises(KeyError):
        chain.prepare_grads()
    assert not vars(scaler)
