"""Log-probabilities of a reference over a dataset: rows that are computed, number of saves, and their places."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mca_config.errors import McaError
from mca_train.trainer import dpo, reference
from mca_train.trainer.dpo import DpoTrainer, ExtraColumns, RowSubset
from mca_train.trainer.reference import ReferenceModel, _differences, warn_trl_differences


class Dataset:
    def __init__(self, count: int) -> None:
        self.lengths = np.arange(count)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"chosen_values": torch.tensor([-1.0]), "number": index}


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A trainer with a global evaluation batch of two, and what its file holds."""
    made: Any = SimpleNamespace(
        args=SimpleNamespace(output_dir=tmp_path, global_eval_batch_size=2, overwrite_output_dir=False),
        _output=SimpleNamespace(has_claimed=False),
        _is_stopping=False,
        saved=None,
        computed=[],
        written=0,
        free=0,
    )

    def write(known: Any) -> None:
        made.written += 1

    def compute(_: Any, dataset: Any, rows: Any) -> Any:
        made.computed.append(rows.tolist())
        return np.stack([rows + 0.5, rows + 0.25], 1)

    made._compute_log_probs = compute
    monkeypatch.setattr(
        dpo, "ReferenceLogProbs", lambda *_: SimpleNamespace(read=lambda: made.saved, write=write)
    )
    monkeypatch.setattr(dpo, "run_on_first_rank_unwrapped", lambda call: call())
    monkeypatch.setattr(dpo, "require_free", lambda *_, **__: setattr(made, "free", made.free + 1))
    return made


@pytest.mark.parametrize(
    ("samples", "parts"), [(1, 1), (63, 1), (64, 2), (95, 2), (96, 3), (639, 19), (640, 20), (1000, 20)]
)
def test_a_save_comes_after_sixteen_steps_and_at_most_twenty_times(
    samples: int, parts: int, trainer: Any
) -> None:
    columns = DpoTrainer._with_log_probs(trainer, None, Dataset(samples), "train", "name")  # type: ignore[arg-type]
    assert (len(trainer.computed), trainer.written, trainer.free) == (parts, parts, 1)
    assert [row for rows in trainer.computed for row in rows] == list(range(samples))
    last = columns[samples - 1]
    assert last["chosen_values"].tolist() == [-1, samples - 0.5]
    assert last["rejected_values"].tolist() == [samples - 0.75] and last["number"] == samples - 1


def test_only_rows_that_a_file_lacks_are_computed(trainer: Any) -> None:
    trainer.saved = np.array([[1.0, 2.0], [np.nan, 2.0], [3.0, np.nan], [4.0, 5.0]])
    columns = DpoTrainer._with_log_probs(trainer, None, Dataset(4), "train", "name")  # type: ignore[arg-type]
    assert trainer.computed == [[1, 2]] and trainer.free == 0
    assert [float(columns[row]["rejected_values"]) for row in range(4)] == [2, 1.25, 2.25, 5]
    trainer.saved, trainer.computed = np.ones((4, 2)), []
    DpoTrainer._with_log_probs(trainer, None, Dataset(4), "train", "name")  # type: ignore[arg-type]
    assert trainer.computed == []
    trainer.saved, trainer._output.has_claimed = None, True
    DpoTrainer._with_log_probs(trainer, None, Dataset(4), "train", "name")  # type: ignore[arg-type]
    assert trainer.free == 0, "a run that trains has claimed the directory"
    trainer._is_stopping, trainer.computed = True, []
    with pytest.raises(dpo._Stopped):
        DpoTrainer._with_log_probs(trainer, None, Dataset(640), "train", "name")  # type: ignore[arg-type]
    assert len(trainer.computed) == 1


def test_each_sequence_of_the_rows_has_a_number(trainer: Any) -> None:
    taken: list[Any] = []

    def evaluation(subset: Any) -> Any:
        taken.append(subset)
        return "loader", None

    trainer._data = SimpleNamespace(loaders=SimpleNamespace(evaluation=evaluation))
    trainer._report_progress, trainer.ranks = (lambda loader: iter([])), None
    model: Any = SimpleNamespace(
        dataset_log_probs=lambda steps, samples, sides, ranks: torch.arange(samples * sides).view(
            samples, sides
        )
    )
    rows = np.array([3, 1])
    found = DpoTrainer._compute_log_probs(trainer, model, Dataset(5), rows)  # type: ignore[arg-type]
    assert found.tolist() == [[6, 7], [2, 3]]
    (subset,) = taken
    assert isinstance(subset, RowSubset) and len(subset) == 2 and subset.lengths.tolist() == [[3], [1]]
    assert [subset[0][f"{side}_values"][-1].item() for side in ("chosen", "rejected")] == [7, 8]
    assert isinstance(subset._dataset, ExtraColumns) and len(subset._dataset) == 5


def test_an_appended_number_is_kept_to_the_bit() -> None:
    columns = ExtraColumns(Dataset(1), np.array([[1 / 3]]), ["chosen"])  # type: ignore[arg-type]
    assert columns[0]["chosen_values"].tolist() == [-1.0, 1 / 3]


def test_log_probabilities_go_to_the_number_of_their_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples of two sequences: the last sample is in no step, and a filler repeats the first."""
    monkeypatch.setattr(reference.groups, "sum_over_replicas", lambda total: total)
    monkeypatch.setattr(reference, "counted_sequences", lambda micro: micro.counted)

    def micro(numbers: list[float], counted: list[bool]) -> Any:
        return SimpleNamespace(values=torch.tensor(numbers)[:, None], counted=torch.tensor(counted))

    model = ReferenceModel.__new__(ReferenceModel)
    outputs = {
        "first": [(torch.tensor([-1.0, -2.0]), micro([1, 2], [True, True]))],
        "second": [
            (torch.tensor([-3.0, -4.0]), micro([3, 4], [True, True])),
            (torch.tensor([-1.0, torch.nan]), micro([0, 0], [False, False])),
        ],
    }
    model.log_probs = lambda batch: outputs[batch]  # type: ignore[method-assign,assignment,index]
    ranks: Any = SimpleNamespace(device=torch.device("cpu"))
    found = model.dataset_log_probs(iter(["first", "second"]), 3, 2, ranks)  # type: ignore[arg-type]
    assert found.dtype == torch.float64
    assert found[:2].tolist() == [[-1, -2], [-3, -4]] and bool(found[2].isnan().all())


@pytest.mark.parametrize(("rows", "labels", "problems"), [(9, None, 1), (10, None, 0), (9, 2, 0)])
def test_a_reference_has_a_row_for_each_token(
    rows: int, labels: int | None, problems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "reference_problems", lambda *_: [])
    config: Any = SimpleNamespace(head=SimpleNamespace(num_labels=labels), vocab_size=rows)
    assert len(list(_differences(config, config, 10))) == problems


@pytest.mark.parametrize(
    ("attention", "hidden", "words"),
    [
        (0.0, 0.0, ""),
        (0.1, 0.0, "(attention_dropout 0.1)"),
        (0.1, 0.2, "(attention_dropout 0.1, hidden_dropout 0.2)"),
    ],
)
def test_dropout_that_trl_disables_is_logged(
    attention: float, hidden: float, words: str, caplog: Any
) -> None:
    model: Any = SimpleNamespace(megatron=SimpleNamespace(attention_dropout=attention, hidden_dropout=hidden))
    warn_trl_differences(model)
    assert [words in each.getMessage() for each in caplog.records] == ([True] if words else [])


@pytest.mark.parametrize(("values", "is_trained"), [([0.0, 0.0], False), ([0.0, 1.0], True)])
def test_an_adapter_that_is_trained_is_no_initial_reference(
    values: list[float], is_trained: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(reference, "PeftModels", SimpleNamespace)
    named = {
        "a.lora_A.weight": torch.ones(2),
        "a.lora_B.weight": torch.tensor(values),
        "b.lora_B.weight": torch.zeros(2),
    }
    rates = SimpleNamespace(attention_dropout=0.0, hidden_dropout=0.0)
    adapter = SimpleNamespace(dropout=0.0)
    model: Any = SimpleNamespace(megatron=rates, adapter=adapter, adapter_parameters=named.items)
    warn_trl_differences(model, without_adapter=True)
    assert ["already trained" in each.getMessage() for each in caplog.records] == [True] * is_trained


def test_a_stream_has_no_rows_to_compute(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpo, "is_stream", lambda dataset: True)
    with pytest.raises(McaError, match="not a stream"):
        DpoTrainer._with_log_probs(trainer, None, Dataset(1), "train", "name")  # type: ignore[arg-type]
