"""Errors about values name the file or the flag that sets them."""

import pytest

from mca_config.errors import UsageError
from mca_train.run.settings import check_run, load_values, make_settings
from mca_train.tasks import TASKS


@pytest.mark.parametrize(
    ("line", "flag", "expected"),
    [
        ("learning_rate: fast", ["--seq_length", "8"], "{file}: learning_rate "),
        ("seq_length: 8", ["--learning_rate", "fast"], "--learning_rate "),
        ("learning_rate: 1.0", ["--learning-rate", "fast"], "--learning_rate "),
    ],
)
def test_a_wrong_value_names_its_file_or_flag(line, flag, expected, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"output_dir: out\nmodel_name_or_path: model\n{line}\n")
    values, where = load_values(file, flag)
    with pytest.raises(UsageError) as error:
        make_settings(TASKS["sft"], values, where, early=True)
    assert str(error.value).startswith(expected.format(file=file))


def test_every_problem_of_a_file_with_flags_has_its_source(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: out\nmodel_name_or_path: model\nlearning_rate: fast\n")
    values, where = load_values(file, ["--seq_length", "x"])
    with pytest.raises(UsageError) as error:
        check_run(TASKS["sft"], values, where)
    lines = str(error.value).splitlines()
    assert lines[0] == f"{file} and the command line: 2 problems"
    assert {line.split()[0] for line in lines[1:]} == {f"{file}:", "--seq_length"}
