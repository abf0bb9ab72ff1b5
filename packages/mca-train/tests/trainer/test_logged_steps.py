"""Records of each step, what a log has, and who may replace the reference."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_train.data.token_dataset import Mixture
from mca_train.trainer import dpo, kto, logger, reference
from mca_train.trainer.dpo import DpoTrainer, ExtraColumns
from mca_train.trainer.kto import KtoTrainer
from mca_train.trainer.logger import Logger
from mca_train.trainer.reference import ReferenceModel, _require_adapter_reference, resolve_reference


class Notes(list[Any]):
    """Calls, in order."""

    def call(self, name: str, result: Any = None) -> Any:
        return lambda *values, **more: self.append((name, *values, *more.values())) or result


def made(notes: Notes, *, sources: bool = True, **more: Any) -> Any:
    @contextmanager
    def finishing() -> Any:
        notes.append("finishing")
        yield
        notes.append("finished")

    totals = SimpleNamespace(grad_norm=None, rate=0.0, updates=2, without_targets=1)
    source = SimpleNamespace(end_step=notes.call("sources"), flush=lambda: {"loss/a": 4.0})
    values = {
        "metrics": SimpleNamespace(end_step=notes.call("metrics"), flush=lambda: {"accuracy": 0.5}),
        "_aux_losses": SimpleNamespace(flush=lambda: {"mtp_1_loss": 3.0}),
        "_sources": source if sources else None,
        "_progress": SimpleNamespace(totals=totals, started_at_step=4),
        "_hf": SimpleNamespace(state=SimpleNamespace(global_step=4), log=notes.call("log")),
        "_checkpoints": SimpleNamespace(finishing_on_error=finishing),
        "_watch": SimpleNamespace(
            after_step=notes.call("after"), logs=lambda report, optimizer, step: {"tokens_per_second": step}
        ),
        "_require_counts": notes.call("counts"),
        "add_up": notes.call("add up"),
    }
    return SimpleNamespace(**(values | more))


@pytest.mark.parametrize(("updated", "had_targets"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("sources", [False, True])
@pytest.mark.parametrize(
    ("done", "assumed", "compares"), [(4, [1.0], True), (5, [1.0], False), (4, [], False)]
)
def test_a_step_is_recorded_and_its_count_compared_once(
    updated: bool,
    had_targets: bool,
    sources: bool,
    done: int,
    assumed: list[float],
    compares: bool,
    monkeypatch: Any,
) -> None:
    notes = Notes()
    monkeypatch.setattr(logger.groups, "sum_over_data", lambda own: own * 2)
    each = made(notes, sources=sources)
    each._hf.state.global_step = done
    engine: Any = SimpleNamespace(assumed_counts=assumed, optimizer="optimizer")
    result: Any = SimpleNamespace(grad_norm=1.5, updated=updated, had_targets=had_targets)
    loss: Any = SimpleNamespace(targets=torch.tensor(6.0))
    Logger.end_step(each, result, loss, 0.25, engine)
    totals = each._progress.totals
    assert (totals.grad_norm, totals.rate) == (1.5, 0.25)
    assert (totals.updates, totals.without_targets) == (2 + updated, 1 + (not had_targets))
    compared = [("counts", [12.0], done + 1, engine)] if compares else []
    expected = [("metrics",), *([("sources",)] if sources else []), "finishing"]
    assert notes == [*expected, ("after", result, loss, "optimizer", done + 1), *compared, "finished"]


@pytest.mark.parametrize("losses", [[], [2.0, 4.0]])
@pytest.mark.parametrize("norm", [None, 0.0, 1.5])
@pytest.mark.parametrize(("images", "audio"), [(0, 0), (7, 0), (0, 9)])
@pytest.mark.parametrize("sources", [False, True])
def test_a_log_has_what_the_steps_had(
    losses: list[float], norm: float | None, images: int, audio: int, sources: bool
) -> None:
    notes = Notes()
    report = SimpleNamespace(losses=losses, mean=3.0, image_tokens=images, audio_tokens=audio)
    each = made(notes, sources=sources, meter=SimpleNamespace(flush=lambda: report))
    each._progress.totals.grad_norm, each._progress.totals.rate = norm, 0.25
    engine: Any = SimpleNamespace(optimizer="optimizer")
    Logger.log_step(each, engine)
    expected = {"accuracy": 0.5, "mtp_1_loss": 3.0, "learning_rate": 0.25, "tokens_per_second": 4}
    expected |= {"loss": 3.0} if losses else {}
    expected |= {} if norm is None else {"grad_norm": norm}
    expected |= {"image_tokens": images} if images else {}
    expected |= {"audio_tokens": audio} if audio else {}
    expected |= {"loss/a": 4.0} if sources else {}
    assert notes == [("add up", report, engine), "finishing", "finished", ("log", expected)]


class Adapted(SimpleNamespace):
    """A model with an adapter."""


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in (reference, dpo):
        monkeypatch.setattr(module, "PeftModels", Adapted)
    adapter = SimpleNamespace(modules_to_save=())
    return Adapted(chunks=["chunk"], config=SimpleNamespace(vocab_size=10), adapter=adapter)


@pytest.mark.parametrize(("tokenizer", "tokens"), [(None, 10), ("abc", 3), ("a" * 12, 10)])
def test_another_model_is_checked_and_taken(
    adapted: Any, tokenizer: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    monkeypatch.setattr(
        reference, "_differences", lambda own, model, count: notes.append((own, model, count)) or []
    )
    other: Any = SimpleNamespace(chunks=["chunk"], config="own", reject_hidden_adapter=notes.call("hidden"))
    assert resolve_reference(adapted, other, tokenizer) is other
    assert notes == [("hidden",), ("own", adapted.config, tokens)]
    assert resolve_reference(adapted, None, None) is None
    monkeypatch.setattr(reference, "_differences", lambda *_: ["one", "two"])
    with pytest.raises(McaError, match=r"^reference: 2 problems"):
        resolve_reference(adapted, other, tokenizer)


@pytest.mark.parametrize("kept", [False, True])
def test_the_trained_model_is_its_own_reference_without_its_adapter_or_before_it_is_trained(
    adapted: Any, kept: bool
) -> None:
    base: Any = SimpleNamespace(chunks=adapted.chunks)
    assert resolve_reference(adapted, base, None, kept=kept) is None, "the base model of the adapter"
    plain: Any = SimpleNamespace(chunks=["own"])
    for model in (adapted, plain):
        if kept:
            assert resolve_reference(model, model, None, kept=True) is model
        else:
            with pytest.raises(McaError, match="reference is the trained model itself"):
                resolve_reference(model, model, None)


def test_a_base_model_that_changes_is_no_reference(adapted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "adapter_reference_problems", lambda args: [args] if args else [])
    _require_adapter_reference(adapted, None, "kto")  # type: ignore[arg-type]
    with pytest.raises(McaError, match="a problem"):
        _require_adapter_reference(adapted, "a problem", "kto")  # type: ignore[arg-type]
    with pytest.raises(McaError, match=r"^kto needs a reference: pass one, or a model with a LoRA adapter"):
        _require_adapter_reference(SimpleNamespace(), None, "kto")  # type: ignore[arg-type]
    adapted.adapter.modules_to_save = ("lm_head",)
    with pytest.raises(McaError, match="modules_to_save trains parts of the base model"):
        _require_adapter_reference(adapted, None, "kto")  # type: ignore[arg-type]


@pytest.mark.parametrize("replays", [False, True])
def test_a_reference_runs_with_its_own_output_and_routers(
    replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    for name in ("preserved_rng", "preserved_output"):
        monkeypatch.setattr(reference, name, lambda *_, name=name: nullcontext(notes.append(name)))
    each = ReferenceModel.__new__(ReferenceModel)
    each._model = SimpleNamespace(chunks=[])  # type: ignore[assignment]
    each._replays, each._outputs = replays, ["old"]  # type: ignore[list-item]
    each._set_output = notes.call("output")  # type: ignore[method-assign]
    each._frozen = lambda: nullcontext(notes.append("frozen"))  # type: ignore[method-assign]

    def evaluate(batch: Any) -> None:
        notes.append(batch)
        each._outputs.append(("sums", batch))

    each._pipeline = SimpleNamespace(  # type: ignore[assignment]
        params_gathered=lambda: nullcontext(notes.append("gathered")), evaluate=evaluate
    )
    batch: Any = SimpleNamespace(without_routed_experts=lambda: "plain")
    found = each.log_probs(batch)
    run = batch if replays else "plain"
    assert found == [("sums", run)]  # type: ignore[comparison-overlap]
    assert notes == ["preserved_rng", "preserved_output", "gathered", "frozen", ("output",), run]


@pytest.mark.parametrize(
    ("own", "trained", "replays"),
    [("routers", "routers", True), ("routers", "others", False), (None, "routers", False), ("a", None, True)],
)
def test_a_reference_takes_the_experts_of_samples_if_it_has_the_same_routers(
    own: Any, trained: Any, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference.RoutedExperts, "from_config", lambda config: config)
    monkeypatch.setattr(reference, "preserved_output", lambda *_: nullcontext())
    monkeypatch.setattr(reference, "Pipeline", lambda chunks, keep: chunks)
    monkeypatch.setattr(ReferenceModel, "_set_output", lambda each: None)
    models: list[Any] = [SimpleNamespace(config=config, chunks=[config]) for config in (own, trained)]
    made = ReferenceModel(models[0], 8, trained=models[1] if trained else None)
    assert made._replays is replays and made._pipeline == [own]
    assert made._adapted is None
    assert ReferenceModel(models[0], 8, without_adapter=True)._adapted is models[0]


@pytest.mark.parametrize("given", [None, "other"])
def test_a_run_of_pairs_without_a_reference_takes_its_own_model(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    monkeypatch.setattr(reference, "_require_adapter_reference", notes.call("check"))
    monkeypatch.setattr(
        ReferenceModel, "__init__", lambda self, *words, **more: vars(self).update(at=(words, more))
    )
    args: Any = SimpleNamespace(loss_chunk_size=8)
    model: Any = "model"
    made: Any = ReferenceModel.for_trained(model, given, args, "dpo_loss ipo")
    assert made.at == ((given or "model", 8), {"without_adapter": given is None, "trained": "model"})
    assert notes == ([] if given else [("check", "model", args, "dpo_loss ipo")])


def test_log_probabilities_come_from_the_reference_or_the_dataset() -> None:
    each: Any = SimpleNamespace(_precomputes=True)
    batch: Any = SimpleNamespace(values=torch.tensor([[9.0, 1], [9, 2], [9, 3], [9, 4]], dtype=torch.float64))
    pairs = DpoTrainer._reference_logps(each, batch)
    assert (pairs.chosen.tolist(), pairs.rejected.tolist()) == ([1, 3], [2, 4])
    assert pairs.chosen.dtype == torch.float32
    batch.values = None
    with pytest.raises(McaError, match="this dataset did not exist when the trainer was created"):
        DpoTrainer._reference_logps(each, batch)


@pytest.mark.parametrize(
    ("precomputes", "has_reference", "dataset", "fails"),
    [
        (True, False, "plain", True),
        (True, True, "plain", False),
        (False, False, "plain", False),
        (True, False, "columns", False),
        (True, False, None, False),
    ],
)
def test_a_new_dataset_needs_a_new_trainer(
    precomputes: bool, has_reference: bool, dataset: str | None, fails: bool
) -> None:
    notes = Notes()
    columns = ExtraColumns.__new__(ExtraColumns)
    each: Any = SimpleNamespace(
        _precomputes=precomputes,
        _reference="reference" if has_reference else None,
        train_dataset=columns if dataset == "columns" else dataset,
        _precompute_log_probs=notes.call("computed"),
    )
    if fails:
        with pytest.raises(McaError, match="this dataset did not exist"):
            DpoTrainer.before_training(each)
    else:
        DpoTrainer.before_training(each)
    assert notes == ([] if fails else [("computed",)])


@pytest.mark.parametrize(("samples", "group", "words"), [(4, 8, None), (1, 8, "has only one"), (4, 1, "kto")])
def test_answers_are_paired_with_those_of_other_samples_of_a_step(
    samples: int, group: int, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kto, "KtoKlPairs", lambda *values: values)
    each: Any = SimpleNamespace(args="arguments", get_total_train_batch_size=lambda args: group)
    dataset: Any = [*range(samples)]
    if words is None:
        assert KtoTrainer._add_kl_pairs(each, dataset, 5) == (dataset, group, 5)  # type: ignore[comparison-overlap]
        return
    with pytest.raises(McaError, match=words):
        KtoTrainer._add_kl_pairs(each, dataset, 5)


@pytest.mark.parametrize(
    ("is_mixture", "metric_names", "token_values", "names"),
    [
        (True, (), None, ("web", "code")),
        (True, ("accuracy",), None, None),
        (True, (), "values", None),
        (False, (), None, None),
    ],
)
def test_sources_have_losses_of_their_own_if_the_loss_is_that_of_tokens(
    is_mixture: bool,
    metric_names: tuple[str, ...],
    token_values: str | None,
    names: tuple[str, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logger, "SourceLosses", lambda *given: given)
    dataset: Any = Mixture.__new__(Mixture) if is_mixture else object()
    if is_mixture:
        monkeypatch.setattr(Mixture, "names", ("web", "code"), raising=False)
    ranks = SimpleNamespace(device="cpu")
    hf = SimpleNamespace(metric_names=metric_names, token_values=token_values, ranks=ranks)
    own: Any = SimpleNamespace(_hf=hf)
    assert Logger._new_source_losses(own, dataset) == ((names, "cpu") if names else None)
