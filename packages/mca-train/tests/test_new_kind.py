"""A new kind of run is its own class and one entry of the table: everything else follows."""

import json
from dataclasses import dataclass, field

import pytest
from tokenizers_for_tests import byte_tokenizer

from mca_config.training_checks import GREATER_IS_BETTER
from mca_train.cli import main
from mca_train.config.arguments import DataArguments
from mca_train.data.encoding import tokenize_answer
from mca_train.run.early_rules import TIMES
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_stream, load_tokenized
from mca_train.tasks.task import AnswerTask, Example


@dataclass(kw_only=True)
class EchoData(DataArguments):
    said_column: str = field(default="said", metadata={"help": "Column with what is said."})


@dataclass(kw_only=True)
class EchoArguments:
    echo_weight: float = field(default=1.0, metadata={"help": "Weight of what is said."})


class Echo(AnswerTask):
    name = "echo"
    summary = "on what was said: said"
    data_arguments = EchoData
    task_arguments = EchoArguments
    required_content = "anything said"
    example = Example(rows="rows with `said`", task_lines="echo_weight: 0.5\n")

    @property
    def metric_names(self):
        return ("echoes",)

    def encoder(self, names, tokenizer, data, key):
        return lambda row: [tokenize_answer(tokenizer, "", row[data.said_column], data.seq_length)]

    def surely_has_target(self, tokenizer, data):
        return lambda row: bool(row[data.said_column])

    def problems(self, settings):
        if settings.own.echo_weight < 0:
            yield f"echo_weight is {settings.own.echo_weight}; expected 0 or more"


@pytest.fixture(autouse=True)
def echo(monkeypatch):
    monkeypatch.setitem(TASKS, Echo.name, Echo())
    return TASKS[Echo.name]


def test_the_help_names_it(capsys):
    assert main(["--help"]) == 0
    reported = capsys.readouterr().out
    assert "|echo [CONFIG.yaml] [--key value ...]\n" in reported
    assert "  echo        on what was said: said\n" in reported


def test_a_configuration_to_begin_with_says_what_its_rows_are(capsys):
    assert main(["init", "echo", "org/model"]) == 0
    written = capsys.readouterr().out
    assert "# rows with `said`\n" in written
    assert "\necho_weight: 0.5\n" in written


def test_a_word_that_is_nearly_its_name_is_told_so(capsys):
    assert main(["ecco", "run.yaml"]) == 2
    assert "unknown command 'ecco'; did you mean 'echo'?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["plan", "echo"], ["plan"]], ids=["named", "known-by-its-key"])
def test_a_plan_knows_its_keys_and_what_it_evaluates(words, run, capsys):
    path = run(echo_weight="0.5", said_column="text", metric_for_best_model="eval_echoes")
    assert main([*words, path]) == 0, capsys.readouterr()
    assert "activations" in capsys.readouterr().out
    assert main([*words, path, "--echo-weight", "-1", "--metric_for_best_model", "x"]) == 2
    reported = capsys.readouterr().out
    assert "echo_weight is -1.0; expected 0 or more" in reported
    assert "metric_for_best_model is 'x'; mca-train echo evaluates loss, " in reported


def test_it_is_known_of_every_metric_whether_greater_is_better():
    known = {name for task in TASKS.values() if task.name != Echo.name for name in task.metric_names}
    assert {*GREATER_IS_BETTER} == {"loss", *TIMES, *known}


def test_its_keys_are_foreign_to_the_other_kinds_and_theirs_to_it(run, capsys):
    assert main(["plan", "sft", run(echo_weight=0.5, said_column="text")]) == 2
    reported = capsys.readouterr().err
    assert "echo_weight: for mca-train echo, not sft; remove the key" in reported
    assert "said_column: for mca-train echo, not sft; remove the key" in reported
    assert main(["plan", "echo", run(dpo_beta=0.5, echo_weight="much")]) == 2
    reported = capsys.readouterr().err
    assert "dpo_beta: for mca-train dpo, not echo; remove the key" in reported
    assert "echo_weight must be a number, not 'much'" in reported


def test_its_rows_become_samples_in_memory_and_streamed(echo, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"said": said}) + "\n" for said in ("one", "", "three")))
    tokenizer, data = byte_tokenizer(), EchoData(model_name_or_path="m", seq_length=4)
    stored = load_tokenized(echo, [str(path)], tokenizer, data)
    eos = tokenizer.eos_token_id
    assert [len(stored[n]["input_ids"]) for n in range(len(stored))] == [4, 4]
    assert stored[0]["labels"][-1] == eos != stored[1]["labels"][-1]
    streamed = list(load_stream(echo, [str(path)], tokenizer, data, seed=None))
    assert [row["input_ids"].tolist() for row in streamed] == [
        stored[n]["input_ids"].tolist() for n in range(len(stored))
    ]
