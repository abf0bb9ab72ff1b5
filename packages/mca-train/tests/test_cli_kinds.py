"""Kinds of runs refuse what they cannot train with, before anything is read."""

import json
from pathlib import Path

import pytest

from mca_config.errors import McaError
from mca_train.cli import main

pytestmark = pytest.mark.usefixtures("own_threads")


def test_a_metric_of_preferences_can_choose_the_best_model(run, tmp_path):
    from mca_train.run.rules import check
    from mca_train.run.settings import load_values, make_settings
    from mca_train.tasks import TASKS

    values, where = load_values(Path(run(metric_for_best_model="eval_rewards/margins")), [])
    pairs = check(TASKS["dpo"], make_settings(TASKS["dpo"], values, where))
    assert not pairs.impossible
    with pytest.raises(McaError, match="mca-train sft evaluates loss, runtime"):
        check(TASKS["sft"], make_settings(TASKS["sft"], values, where)).require()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "set dpo_label_smoothing"),
        (
            {"data_format": "messages"},
            "data_format messages: mca-train dpo reads the columns of pairs, or alpaca or",
        ),
        ({"dpo_beta": 0}, "dpo_beta is 0.0; expected a positive number"),
        (
            {"dpo_label_smoothing": 0.1, "dpo_loss": "ipo"},
            "dpo_label_smoothing is for dpo_loss sigmoid, robust, exo_pair, not ipo",
        ),
        ({"dpo_loss": "exo_pair"}, "dpo_loss exo_pair needs dpo_label_smoothing above 0"),
        ({"dpo_loss": "aot"}, "dpo_loss is 'aot'; it sorts the pairs of a micro-batch"),
        ({"dpo_loss": "kto_pair"}, "it needs unpaired answers with a label; run mca-train kto"),
        (
            {"dpo_loss": "orpo", "reference_model_name_or_path": "m"},
            "dpo_loss orpo has no reference; remove",
        ),
        (
            {"lora_rank": 2, "lora_modules_to_save": ["model.norm"]},
            "set reference_model_name_or_path, or remove",
        ),
    ],
)
def test_what_pairs_cannot_be_trained_with_is_told_before_reading(run, changes, message, capsys):
    assert main(["dpo", run(**changes)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_reference_that_scores_is_no_language_model(run, kind, tmp_path):
    from mca_train.run.rules import check
    from mca_train.run.settings import load_values, make_settings
    from mca_train.tasks import TASKS

    (tmp_path / "reward").mkdir()
    path = Path(run(reference_model_name_or_path=str(tmp_path / "reward")))
    config = (tmp_path / "model" / "config.json").read_text()
    (tmp_path / "reward" / "config.json").write_text(config.replace("CausalLM", "SequenceClassification"))
    values, where = load_values(path, [])
    (reported,) = check(TASKS[kind], make_settings(TASKS[kind], values, where)).impossible
    assert reported.startswith(
        "reference_model_name_or_path: the reference has a sequence_classification head"
    )


def test_labels_without_names_are_those_of_the_model(run, tmp_path, capsys):
    from mca_train.run.rules import check
    from mca_train.run.settings import load_values, make_settings
    from mca_train.tasks import TASKS

    config = tmp_path / "model" / "config.json"
    names = json.dumps(
        {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}}
    )
    text = run(num_labels=2)
    config.write_text(config.read_text().replace('"architectures": ["Qwen3ForCausalLM"]', names[1:-1]))
    (tmp_path / "a.jsonl").write_text('{"text": "hello there", "label": "yes"}\n')
    assert main(["data", "classify", text]) == 0
    values, where = load_values(Path(text), [])
    found = check(TASKS["classify"], make_settings(TASKS["classify"], values, where)).run
    assert found.settings.data.names == ("no", "yes")
    assert main(["plan", "classify", run(labels=["yes", "no"])]) == 2
    assert (
        "labels: the model's are no, yes, in this order, not yes, no; name them so" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "pretrain",
            {"prompt_column": "q", "tools_column": "t"},
            "prompt_column, tools_column: mca-train pretrain does not read it; remove the key",
        ),
        ("dpo", {"text_column": "t"}, "text_column: mca-train dpo does not read it; remove the key"),
        ("reward", {"messages_column": "m"}, "messages_column: mca-train reward does not read it"),
        (
            "classify",
            {"completion_column": "a", "num_labels": 2},
            "completion_column: mca-train classify does",
        ),
        ("sft", {"image_folder": "pictures"}, "image_folder: a qwen3 model takes no images; remove the key"),
        (
            "sft",
            {"prompt_column": "q", "data_format": "messages"},
            "prompt_column: format messages does not read it; remove one of the two",
        ),
        (
            "dpo",
            {"prompt_column": "q", "data_format": "alpaca"},
            "prompt_column: format alpaca does not",
        ),
    ],
)
def test_columns_that_are_not_read_are_refused(run, kind, changes, message, capsys):
    assert main(["plan", kind, run(**changes)]) == 2
    assert message in capsys.readouterr().out


def test_columns_that_some_source_reads_are_taken(run, tmp_path, capsys):
    names = ("text", "messages", None)
    entries = [{"path": f"{tmp_path}/{name}.jsonl", "format": name} for name in names]
    changes = {"train_file": ..., "datasets": entries[:2], "text_column": "t", "messages_column": "m"}
    assert main(["plan", "sft", run(**changes)]) == 0
    changes["completion_column"] = "a"
    assert main(["plan", "sft", run(**changes)]) == 2
    assert "completion_column: format messages, text does not read it" in capsys.readouterr().out
    for more in ({"eval_file": f"{tmp_path}/c.jsonl"}, {"datasets": entries}):  # whose format is not named
        assert main(["plan", "sft", run(**{**changes, **more})]) == 0
    changes["datasets"] = [{**entries[0], "format": ["text"]}]
    assert main(["plan", "sft", run(**changes)]) == 0
    assert "format must be 'messages' or" in capsys.readouterr().out
    assert main(["plan", "dpo", run(prompt_column="q", tools_column="t", chosen_column="c")]) == 0


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "reward",
            {"train_file": ..., "datasets": [{"path": "a.jsonl", "format": "text"}]},
            "format text: mca-train reward reads",
        ),
        (
            "reward",
            {"lora_rank": 4, "lora_target_modules": ["q_prj", "k_proj"]},
            "target_modules: 'q_prj' names nothing of this qwen3 model; correct or remove it",
        ),
        ("reward", {"loss_chunk_size": 8}, "loss_chunk_size is not supported"),
        ("reward", {"center_rewards_coefficient": -1.0}, "center_rewards_coefficient is -1.0; expected"),
        ("classify", {}, "labels (or num_labels) is not set; single_label_classification needs at least 2"),
        ("classify", {"labels": ["a", "a"]}, "labels are a, a; expected every name once"),
        (
            "classify",
            {"num_labels": 2, "metric_for_best_model": "mean_absolute_error"},
            "single_label_classification has accuracy",
        ),
    ],
)
def test_what_scores_cannot_be_trained_with(run, kind, changes, message, capsys):
    assert main(["plan", kind, run(**changes)]) == 2
    reported = capsys.readouterr()
    assert message in reported.out + reported.err
