"""Optimizer state on the host, as a plain Adam for Megatron's checkpoints and back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_models.megatron import platform
from mca_models.megatron.platform import FusedAdam
from mca_train.engine import offload
from mca_train.engine.offload import MASTER


class Hybrid:
    """Two offloaded parameters with copies in an AdamW, and one on the device in a fused Adam."""

    def __init__(self) -> None:
        self.params = [torch.nn.Parameter(torch.full((2,), float(i), dtype=torch.bfloat16)) for i in range(3)]
        copies = [torch.nn.Parameter(torch.full((2,), 10.0 + i)) for i in range(2)]
        self.param_to_inner_param = dict(zip(self.params, [*copies, self.params[2]], strict=True))
        self.inner_param_to_orig_param = {inner: own for own, inner in self.param_to_inner_param.items()}
        self.param_groups = [
            {"params": self.params[:1], "lr": 0.5},
            {"params": self.params[1:], "lr": 0.25},
        ]
        self.sub_optimizers: list[Any] = [torch.optim.AdamW(copies), FusedAdam(self.params[2:])]
        self.synced = 0
        self.built = 0

    def moments(self) -> None:
        """Give all but the second parameter a state after seven steps."""
        for number, inner in ((0, self.param_to_inner_param[self.params[0]]), (1, self.params[2])):
            state = {
                name: torch.full((2,), value + number)
                for name, value in (("exp_avg", 3.0), ("exp_avg_sq", 5.0))
            }
            self.sub_optimizers[number].state[inner] = state
        self.sub_optimizers[0].state[self.param_to_inner_param[self.params[0]]]["step"] = torch.tensor(7.0)
        self.sub_optimizers[1].param_groups[0]["step"] = 6

    def _sync_sub_optimizers_state_to_hdo(self) -> None:
        self.synced += 1

    def _init_sub_optimizers(self) -> None:
        self.built += 1


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> Hybrid:
    platform.prepare()
    import megatron.core.optimizer.cpu_offloading as upstream

    monkeypatch.setattr(upstream, "HybridDeviceOptimizer", Hybrid)
    return Hybrid()


def single(hybrid: Any, **more: Any) -> Any:
    return SimpleNamespace(
        optimizer=hybrid, config=SimpleNamespace(**{offload._PRECISION_AWARE: True}), **more
    )


@pytest.mark.parametrize("chained", [False, True])
def test_a_hybrid_is_built_again_if_its_groups_have_other_parameters(hybrid: Hybrid, chained: bool) -> None:
    own: Any = single(hybrid)
    whole = SimpleNamespace(chained_optimizers=[single(object()), own]) if chained else own
    offload.rebuild_hybrids(whole)
    assert hybrid.built == 0
    hybrid.param_groups[1]["params"] = [*hybrid.params[1:], torch.zeros(1)]
    offload.rebuild_hybrids(whole)
    assert hybrid.built == 1


@pytest.mark.parametrize("distributed", [False, True])
def test_a_plain_adam_has_the_state_of_all_parameters(hybrid: Hybrid, distributed: bool) -> None:
    hybrid.moments()
    own: Any = single(hybrid, **({"buffers": []} if distributed else {}))
    with offload.as_adam(own, loading=False):
        plain = own.optimizer
        assert isinstance(plain, FusedAdam) and getattr(own.config, offload._PRECISION_AWARE) is False
        assert [(group["lr"], group["step"]) for group in plain.param_groups] == [(0.5, 7), (0.25, 7)]
        keys = [param for group in plain.param_groups for param in group["params"]]
        expected = [*hybrid.param_to_inner_param.values()] if distributed else hybrid.params
        assert all(key is right for key, right in zip(keys, expected, strict=True))
        states = [{name: value.tolist() for name, value in plain.state[key].items()} for key in keys]
    zero = {"exp_avg": [0, 0], "exp_avg_sq": [0, 0]}
    assert states == [
        {"exp_avg": [3, 3], "exp_avg_sq": [5, 5]},
        zero,
        {"exp_avg": [4, 4], "exp_avg_sq": [6, 6]},
    ]
    assert own.optimizer is hybrid and getattr(own.config, offload._PRECISION_AWARE) is True
    assert hybrid.synced == 0, "nothing was loaded"


@pytest.mark.parametrize("distributed", [False, True])
def test_a_loaded_state_goes_back_to_host_and_device(hybrid: Hybrid, distributed: bool) -> None:
    hybrid.moments()
    own: Any = single(hybrid, **({"buffers": []} if distributed else {}))
    copies = [*hybrid.param_to_inner_param.values()]
    with offload.as_adam(own, loading=True):
        plain = own.optimizer
        assert [copy.tolist()[0] for copy in copies] == [0, 1, 2], "the weights are loaded already"
        for number, key in enumerate(param for group in plain.param_groups for param in group["params"]):
            plain.state[key] = {
                "exp_avg": torch.full((2,), 20.0 + number),
                "exp_avg_sq": torch.full((2,), 30.0 + number),
            }
        for group in plain.param_groups:
            group["step"] = 12
        for number in range(2):
            (copies if distributed else hybrid.params)[number].data.fill_(40.0 + number)
    assert [param.tolist()[0] for param in hybrid.params] == [40, 41, 2]
    assert [copy.tolist()[0] for copy in copies] == [40, 41, 2]
    first, second = hybrid.sub_optimizers
    found = [
        (float(state["exp_avg"][1]), float(state["exp_avg_sq"][1]), float(state.get("step", -1)))
        for state in (first.state[copies[0]], first.state[copies[1]], second.state[hybrid.params[2]])
    ]
    assert found == [(20, 30, 12), (21, 31, 12), (22, 32, -1)]
    assert second.param_groups[0]["step"] == 12 and "step" not in first.param_groups[0]
    assert hybrid.synced == 1 and own.optimizer is hybrid


def test_a_hybrid_that_took_no_step_is_an_adam_of_zeros_without_one(hybrid: Hybrid) -> None:
    own: Any = single(hybrid)
    with offload.as_adam(own, loading=False):
        plain = own.optimizer
        assert all("step" not in group for group in plain.param_groups)
        assert not any(value.any() for state in plain.state.values() for value in state.values())
        assert [value.dtype for value in plain.state[hybrid.params[0]].values()] == [torch.float32] * 2


def test_a_failed_load_leaves_the_hybrid_as_it_was(hybrid: Hybrid) -> None:
    own: Any = single(hybrid)
    with pytest.raises(KeyError), offload.as_adam(own, loading=True):
        raise KeyError
    assert own.optimizer is hybrid and hybrid.synced == 0


@pytest.mark.parametrize("fails", [False, True])
def test_weights_that_changed_go_to_all_copies(hybrid: Hybrid, fails: bool) -> None:
    seen: list[Any] = []

    def reload() -> None:
        seen.append(own.optimizer)
        if fails:
            raise KeyError

    own: Any = single(hybrid, reload_model_params=reload)
    if fails:
        with pytest.raises(KeyError):
            offload.reload_main_params(own)
    else:
        offload.reload_main_params(own)
        assert [each.tolist()[0] for each in hybrid.param_to_inner_param.values()] == [0, 1, 2]
    (stand_in,) = seen
    assert not isinstance(stand_in, Hybrid) and stand_in.param_groups is hybrid.param_groups
    assert own.optimizer is hybrid


def test_main_parameters_in_transformer_engines_adam_are_refreshed(hybrid: Hybrid) -> None:
    kept, new = hybrid.params[:2]
    stored: list[Any] = []
    inner = SimpleNamespace(
        param_groups=[{"params": [kept]}, {"params": [new]}],
        state={kept: {MASTER: torch.zeros(2)}, new: {}},
        set_scaled_state=lambda *values: stored.append(values),
    )
    own: Any = single(inner)
    plain: Any = single(SimpleNamespace(param_groups=[{"params": [kept]}], state={kept: {MASTER: 1}}))
    offload._reload_te_main_params(SimpleNamespace(chained_optimizers=[own, plain]))  # type: ignore[arg-type]
    ((param, name, value),) = stored
    assert param is kept and name == MASTER and value.dtype == torch.float32
    setattr(own.config, offload._PRECISION_AWARE, False)
    assert not offload.is_precision_aware(own)


def test_the_state_of_transformer_engines_adam_is_created_for_each_parameter() -> None:
    asked: list[Any] = []
    optimizer = SimpleNamespace(
        param_groups=[{"params": ["a", "b"]}, {"params": ["c"]}],
        initialize_state=lambda param, *, store_param_remainders: asked.append(
            (param, store_param_remainders)
        ),
    )
    offload.init_precision_aware_state(optimizer, "more")
    assert asked == [("a", False), ("b", False), ("c", False)]
