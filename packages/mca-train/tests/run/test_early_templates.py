"""The check for a chat template before ranks start."""

import json
from dataclasses import replace

import pytest

from mca_train.run.early_rules import column_problems
from mca_train.tasks import TASKS

LABELS = {"classify": {"num_labels": 2}}


@pytest.mark.parametrize(
    ("kind", "row", "template", "has_problem"),
    [
        ("sft", {"messages": []}, None, True),
        ("kto", {"messages": [], "label": True}, None, True),
        ("sft", {"messages": []}, "tokenizer_config.json", False),
        ("sft", {"messages": []}, "chat_template.jinja", False),
        ("sft", {"prompt": "a", "completion": "b"}, None, False),
        ("sft", {"prompt": [{}], "completion": [{}]}, None, True),
        ("dpo", {"chosen": [{}], "rejected": [{}]}, None, True),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, None, False),
        ("reward", {"instruction": "a", "chosen": "b", "rejected": "c"}, None, True),
        ("classify", {"messages": [], "label": 1}, None, True),
        ("classify", {"text": "a", "label": 1, "prompt": []}, None, False),
        ("pretrain", {"messages": [], "text": "a"}, None, False),
    ],
)
def test_conversations_need_a_chat_template(kind, row, template, has_problem, tmp_path):
    for name in ("tokenizer_config.json", "chat_template.jinja")[
        : 2 if template == "chat_template.jinja" else 1
    ]:
        given = {"chat_template": "x"} if template == name else {}
        (tmp_path / name).write_text(json.dumps(given))
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(row))
    task = TASKS[kind]
    data = task.data_arguments(
        model_name_or_path=str(tmp_path), train_file=[str(file)], **LABELS.get(kind, {})
    )
    mixed = replace(data, train_file=[], datasets=[{"path": str(file)}])
    expected = f"{tmp_path}: the tokenizer has no chat template; put a chat_template.jinja into its directory"
    for each in (data, mixed):
        found = [*column_problems(task, each)]
        assert [problem.partition(", or")[0] for problem in found] == [expected] * has_problem


def test_renamed_columns_of_an_entry_are_checked_for_a_chat_template(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"good": [{}], "rejected": [{}]}))
    entry = {"path": str(file), "columns": {"chosen": "good"}}
    task = TASKS["dpo"]
    data = task.data_arguments(model_name_or_path=str(tmp_path), datasets=[entry])
    assert "has no chat template" in next(column_problems(task, data))
