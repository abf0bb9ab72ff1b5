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
    assert updates == [dense or experts]
