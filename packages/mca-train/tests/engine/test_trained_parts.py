"""Parts of a model that a run trains, on each rank, and their parameter groups."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config import TrainingArguments
from mca_config.errors import McaError
from mca_models.megatron import platform
from mca_train.engine import optimizer
from mca_train.engine.optimizer import select_trained_parts

NAMES = ("language", "vision", "audio", "projector")


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **changes)


class Model:
    """A parameter of each part on this rank, of which the user froze some, and a buffer."""

    def __init__(self, frozen: tuple[str, ...] = ()) -> None:
        self.config = SimpleNamespace(layout="layout", vision="vision")
        self.params = {name: torch.nn.Parameter(torch.zeros(1), name not in frozen) for name in NAMES}
        self.second = torch.nn.Parameter(torch.zeros(1))
        self.trained: Any = None
        self.chunks = [SimpleNamespace()]

    def local_params(self) -> Iterator[tuple[Any, torch.Tensor]]:
        for name, tensor in (*self.params.items(), ("language", self.second), ("vision", torch.zeros(1))):
            yield SimpleNamespace(param=name), tensor

    def train_parts(self, parts: Any) -> None:
        self.trained = parts
        for tensor in (*self.params.values(), self.second):
            tensor.requires_grad_(tensor.mca_part in parts)


@pytest.fixture
def other_ranks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of parameters that other ranks train of each part asked for."""
    found: list[float] = []

    def largest(value: float, device: str) -> float:
        assert device == "device"
        return max(value, found.pop(0))

    monkeypatch.setattr(optimizer.groups, "max_over_ranks", largest)
    monkeypatch.setattr(optimizer.groups, "current_ranks", lambda layout: SimpleNamespace(device="device"))
    monkeypatch.setattr(optimizer, "model_part", lambda param, config: param)
    monkeypatch.setattr(optimizer, "absent_parts", lambda args, config: iter(()))
    monkeypatch.setattr(
        optimizer, "trained_parts", lambda args, config: frozenset(set(NAMES) - set(args.freeze))
    )
    return found


@pytest.mark.parametrize(
    ("user", "others", "language"),
    [((), (1.0, 0.0, 0.0, 0.0), True), (("language",), (0.0,) * 4, False), (NAMES, (0.0,) * 4, True)],
)
def test_what_a_user_froze_within_a_trained_part_stays_frozen(
    user: tuple[str, ...], others: tuple[float, ...], language: bool, other_ranks: list[float], tmp_path: Path
) -> None:
    """A part that no rank trains anything of is not one that the user froze something of."""
    model: Any = Model(user)
    if user == NAMES:
        model.second.requires_grad_(False)
    other_ranks.extend(others)
    select_trained_parts(model, arguments(tmp_path, freeze=["audio"]))
    assert model.trained == {"language", "vision", "projector"} and other_ranks == []
    found = {name: tensor.requires_grad for name, tensor in model.params.items()}
    assert found == {"language": language, "vision": True, "audio": False, "projector": True}
    assert model.second.requires_grad
    assert [tensor.mca_part for tensor in model.params.values()] == [*NAMES]


def test_parts_stay_as_they_are_without_the_key(other_ranks: list[float], tmp_path: Path) -> None:
    model: Any = Model(("vision",))
    select_trained_parts(model, arguments(tmp_path))
    assert model.trained is None and model.second.mca_part == "language"


def test_an_absent_part_is_an_error(
    other_ranks: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "absent_parts", lambda args, config: iter(["no such part"]))
    with pytest.raises(McaError, match="no such part"):
        select_trained_parts(Model(), arguments(tmp_path))  # type: ignore[arg-type]


@pytest.mark.parametrize(("frozen", "wrong"), [(["vision"], "vision"), (["audio"], None)])
def test_an_adapter_keeps_its_parts(
    frozen: list[str],
    wrong: str | None,
    other_ranks: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Adapted(Model):
        rules = "rules"

    monkeypatch.setattr(optimizer, "PeftModels", Adapted)
    monkeypatch.setattr(optimizer, "adapter_parts", lambda rules, config: {"vision", "language"})
    model: Any = Adapted()
    if wrong is None:
        select_trained_parts(model, arguments(tmp_path, freeze=frozen))
        assert model.trained is None
        return
    with pytest.raises(McaError, match=f"freeze: the adapter is on {wrong}; remove it from freeze"):
        select_trained_parts(model, arguments(tmp_path, freeze=frozen))


@pytest.mark.parametrize(
    ("changes", "asks"),
    [({}, False), ({"audio_learning_rate": 1e-4}, True), ({"overlap_param_gather": True}, True)],
)
@pytest.mark.parametrize("has_vision", [False, True])
def test_trained_parts_are_asked_for_only_if_an_option_needs_them(
    changes: dict[str, Any], asks: bool, has_vision: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = Model()
    model.config.vision = "vision" if has_vision else None
    monkeypatch.setattr(optimizer, "_trained_media_parts", lambda model: {"audio"})
    monkeypatch.setattr(optimizer, "trained_problems", lambda args, parts, adapted: [(args, parts, adapted)])
    args = arguments(tmp_path, use_distributed_optimizer=True, overlap_grad_reduce=True, **changes)
    found = list(optimizer._problems(model, args, adapted=True))
    assert found == ([(args, {"audio"}, True)] if asks and has_vision else [])  # type: ignore[comparison-overlap]


def test_media_parts_are_those_that_any_rank_trains(other_ranks: list[float]) -> None:
    model: Any = Model()
    tower = torch.nn.ParameterList([torch.zeros(1) for _ in range(3)])
    for part, tensor in zip(("audio", "projector", None), tower, strict=True):
        if part:
            tensor.mca_part = part  # type: ignore[attr-defined]
    tower[0].requires_grad_(False)
    model.chunks = [SimpleNamespace(), SimpleNamespace(vision_model=tower)]
    other_ranks.extend([0.0, 0.0, 0.0])
    assert optimizer._trained_media_parts(model) == {"vision", "projector"}
    model.chunks = [SimpleNamespace()]
    other_ranks.extend([0.0, 1.0, 0.0])
    assert optimizer._trained_media_parts(model) == {"audio"}


def test_each_rate_that_differs_makes_a_group(tmp_path: Path) -> None:
    platform.prepare()
    from megatron.core.optimizer import OptimizerConfig

    config = OptimizerConfig(optimizer="adam", lr=1e-3)
    args = arguments(
        tmp_path,
        learning_rate=1e-3,
        vision_learning_rate=1e-4,
        audio_learning_rate=1e-3,
        projector_learning_rate=2e-3,
    )
    overrides = optimizer.param_group_overrides(args, config)["config_overrides"]
    rates = {key.predicate.name: value for key, value in overrides.items() if key.predicate}
    found = {name: value for name, value in rates.items() if name.startswith("mca_")}
    assert found == {"mca_vision": {"max_lr": 1e-4}, "mca_projector": {"max_lr": 2e-3}}
    marked, plain = torch.zeros(1), torch.zeros(1)
    marked.mca_part = "vision"  # type: ignore[attr-defined]
    predicates = {key.predicate.name: key.predicate for key in overrides if key.predicate}
    assert [predicates["mca_vision"](each) for each in (marked, plain)] == [True, False]
    assert not predicates["mca_projector"](marked)
    same = arguments(tmp_path, learning_rate=1e-3, vision_learning_rate=1e-3)
    assert optimizer.param_group_overrides(same, config) == {}
    assert len(overrides) > len(found), "Megatron's own groups are kept"
