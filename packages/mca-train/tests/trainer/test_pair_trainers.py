"""Trainers of preferences: what they are made of, and which datasets they compute a reference for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_train.losses.preference import KtoLoss, PreferenceLoss
from mca_train.trainer import dpo, kto, scores
from mca_train.trainer.dpo import DpoTrainer, ExtraColumns
from mca_train.trainer.kto import KtoTrainer
from mca_train.trainer.scores import RewardTrainer


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of the parts that trainers are made of, in order; a trainer has the attributes of its options."""
    found: list[Any] = []
    args = SimpleNamespace(loss_chunk_size=8, train_sampling_strategy="random")
    plain = {"model": "model", "args": args, "processing_class": "tokenizer", "eval_dataset": None}
    ranks = SimpleNamespace(device=torch.device("cpu"), data_parallel_size=1)
    plain |= {"train_dataset": "train", "ranks": ranks}
    monkeypatch.setattr(
        kto.McaTrainer, "__init__", lambda self, **options: vars(self).update(plain | options)
    )
    for module in (dpo, kto):
        monkeypatch.setattr(
            module,
            "resolve_reference",
            lambda *given, **more: found.append(("resolve", *given, *more.values())) or given[1],
        )
        monkeypatch.setattr(module.ReferenceModel, "for_trained", lambda *given: ("made of", *given))
    monkeypatch.setattr(kto.ReferenceModel, "__init__", lambda self, *given: setattr(self, "given", given))
    for module in (dpo, kto, scores):
        monkeypatch.setattr(
            module,
            "warn_trl_differences",
            lambda *given, **more: found.append(("warn", *given, *more.values())),
        )
    return found


@pytest.mark.parametrize("reference", [None, "other"])
def test_kto_has_a_reference_or_the_model_without_its_adapter(
    reference: Any, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KtoTrainer, "_add_kl_pairs", lambda self, dataset, length: (dataset, length))
    options: Any = {"eval_dataset": {"a": 1, "b": 2}, "pack_length": 5}
    made: Any = KtoTrainer(reference=reference, **options)
    assert calls == [
        ("resolve", "model", reference, "tokenizer"),
        ("warn", "model", reference is None),
    ]
    assert made._reference == ("made of", "model", reference, made.args, "kto")
    assert made._policy.given == ("model", 8) and made.kto == KtoLoss() and float(made._kl) == 0
    assert made.train_dataset == ("train", 5) and made.eval_dataset == {"a": (1, 5), "b": (2, 5)}
    loss: Any = "loss"
    made = KtoTrainer(reference=reference, loss=loss)
    assert (made.kto, made.train_dataset, made.eval_dataset) == ("loss", ("train", None), None)


@pytest.mark.parametrize(("strategy", "warns"), [("random", True), ("sequential", False)])
def test_kto_warns_of_shuffled_rows(
    strategy: str, warns: bool, calls: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(KtoTrainer, "_add_kl_pairs", lambda self, dataset, length: dataset)
    options: Any = {"args": SimpleNamespace(loss_chunk_size=None, train_sampling_strategy=strategy)}
    KtoTrainer(**options)
    assert ["kl is estimated with the answers of neighboring rows" in each for each in caplog.messages] == [
        True
    ] * warns


def test_kto_needs_values_and_samples_that_it_knows() -> None:
    trainer: Any = SimpleNamespace()
    batch: Any = SimpleNamespace(kl_batch=None, values=None)
    with pytest.raises(McaError, match="kto: this dataset did not exist when the trainer was created"):
        KtoTrainer.before_forward(trainer, batch)
    with pytest.raises(
        McaError, match="a sample of the dataset has no 'values'; expected 1 for a good answer"
    ):
        KtoTrainer.compute_loss(trainer, torch.zeros(1), batch)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("reference", [None, "other"])
@pytest.mark.parametrize("needs", [False, True])
def test_dpo_has_a_reference_if_its_loss_needs_one(
    needs: bool, reference: Any, kept: bool, calls: list[Any]
) -> None:
    loss: Any = SimpleNamespace(needs_reference=needs, kind="simpo")
    if kept and not needs:
        with pytest.raises(
            McaError, match="precompute_ref_log_probs: dpo_loss simpo has no reference; remove"
        ):
            DpoTrainer(reference=reference, preference=loss, precompute_ref_log_probs=True)
        return
    made: Any = DpoTrainer(reference=reference, preference=loss, precompute_ref_log_probs=kept)
    used = reference or ("model" if kept else None)  # before training, a model is its own reference
    assert calls == [
        ("resolve", "model", reference, "tokenizer", kept),
        ("warn", "model", needs and used is None),
    ]
    assert made._reference == (("made of", "model", used, made.args, "dpo_loss simpo") if needs else None)
    assert made.preference is loss and made._precomputes is kept
    assert DpoTrainer().preference == PreferenceLoss()


@pytest.mark.parametrize(("coefficient", "centering"), [(None, 0.0), (0.25, 0.25)])
def test_a_reward_model_may_be_centered(
    coefficient: float | None, centering: float, calls: list[Any]
) -> None:
    assert RewardTrainer(center_rewards_coefficient=coefficient)._centering == centering
    assert calls == [("warn", "model")]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("dataset", "is_known"),
    [
        (None, True),
        ("name", True),
        ("columns", True),
        (["plain"], False),
        ({"a": "columns"}, True),
        ({"a": "columns", "b": ["plain"]}, False),
    ],
)
def test_an_evaluation_has_computed_columns_or_is_an_error(
    kept: bool, dataset: Any, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def column(name: Any) -> Any:
        return ExtraColumns.__new__(ExtraColumns) if name == "columns" else name

    given = (
        {key: column(name) for key, name in dataset.items()} if isinstance(dataset, dict) else column(dataset)
    )
    events: list[Any] = []
    monkeypatch.setattr(kto.McaTrainer, "evaluate", lambda self, *words: events.append(words) or {"a": 1.0})
    made = DpoTrainer.__new__(DpoTrainer)
    made._precomputes = kept
    monkeypatch.setattr(made, "_precompute_log_probs", lambda: events.append("computed"))
    if kept and not is_known:
        with pytest.raises(McaError, match="precompute_ref_log_probs: this dataset did not exist"):
            made.evaluate(given)
        assert events == []
    else:
        assert made.evaluate(given, "keys", "test") == {"a": 1.0}
        assert events == ["computed", (given, "keys", "test")]


@pytest.mark.parametrize("is_dict", [False, True])
def test_log_probabilities_of_all_datasets_are_computed_within_the_lock(
    is_dict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    events: list[Any] = []

    @contextmanager
    def locked() -> Any:
        events.append("lock")
        yield
        events.append("release")

    monkeypatch.setattr(dpo, "require_usable", lambda *given: events.append(("usable", *given)))
    model: Any = SimpleNamespace(name=lambda: "name")
    made: Any = DpoTrainer.__new__(DpoTrainer)
    vars(made).update(
        _reference=model,
        _precomputes=True,
        _output=SimpleNamespace(locked=locked),
        args=SimpleNamespace(output_dir=str(tmp_path)),
        model=SimpleNamespace(source="source"),
        train_dataset="train data",
        eval_dataset={"a": "first", "b": None} if is_dict else None,
    )
    monkeypatch.setattr(
        made, "_with_log_probs", lambda *given: events.append(given) or f"{given[1]} of {given[2]}"
    )
    made._precompute_log_probs()
    assert events == [
        ("usable", tmp_path, ["source"]),
        "lock",
        (model, "train data", "train", "name"),
        *([(model, "first", "eval_a", "name")] if is_dict else []),
        "release",
    ]
    assert made.train_dataset == "train data of train"
    assert made.eval_dataset == ({"a": "first of eval_a", "b": None} if is_dict else None)
    assert made._reference is None
    made._precompute_log_probs()
    made._reference, made._precomputes = model, False
    made._precompute_log_probs()
    made.release_first()
    assert len(events) == 4 + is_dict and made._reference is model
