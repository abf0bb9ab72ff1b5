"""Documentation of the keys (help, schema, starter file, completion), compared with the real parser."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from mca_config.reference import update_document
from mca_train.cli import main
from mca_train.config.early_arguments import read_hf_fields
from mca_train.config.renamed_options import RENAMED
from mca_train.reference.commands import schema, starter
from mca_train.reference.keys import (
    REQUIRED,
    TABLES,
    declared_keys,
    format_default,
    task_keys,
    value_placeholder,
)
from mca_train.reference.program import program
from mca_train.tasks import TASKS

KINDS = sorted(TASKS)
HF = "Hugging Face's TrainingArguments"


def test_fields_read_from_the_source_are_those_of_the_class():
    import transformers

    read, real = (
        {
            key.name: (value_placeholder(key.hint), format_default(key.default), key.help)
            for key in declared_keys(cls, "")
        }
        for cls in (read_hf_fields(all_optimizers=False), transformers.TrainingArguments)
    )
    choices, complete = (each.pop("optim") for each in (read, real))
    assert read == real
    assert choices == ("{adamw_torch,adamw_torch_fused,sgd}", *complete[1:])  # those that Megatron has


@pytest.mark.parametrize("kind", KINDS)
def test_help_of_a_kind_has_every_key_that_it_takes(kind, capsys):
    assert main([kind, "--help"]) == 0
    text = capsys.readouterr().out
    flags = {word.removeprefix("--") for line in text.splitlines() for word in line.split()[:1]}
    names = {key.name for key in task_keys(TASKS[kind])}
    assert names <= flags
    assert ("dpo_beta" in names) == (kind == "dpo")
    assert {*REQUIRED, "tensor_model_parallel_size", "learning_rate", "lora_rank"} <= names
    assert "deepspeed" not in names  # refused, so not offered


@pytest.mark.parametrize("command", [[], *([name] for name in program().commands)], ids=" ".join)
def test_help_fits_in_120_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("command", [*KINDS, "plan"])
def test_help_has_one_line_for_each_option_in_a_wide_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("  --")]
    assert len(options) > 10
    assert [lines[number] for number in options if not lines[number + 1].startswith(" " * 8)] == []
    assert [lines[number] for number in options if lines[number + 2].startswith(" " * 8)] == []
    assert [
        line for line in lines if re.search(r"^ {8}.* \.\.\.($| \(default)", line)
    ] == []  # no text is cut


def test_help_has_the_width_of_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["sft", "--help"]) == 0
    meanings = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" " * 8)]
    assert 50 < max(map(len, meanings)) <= 60


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpu", [False, True])
def test_the_file_to_begin_with_is_a_run_with_and_without_its_marks(kind, gpu, tmp_path):
    from mca_train.run.settings import make_settings

    text = starter(TASKS[kind], "org/model", gpu=gpu)
    assert f"`mca-train plan {kind} run.yaml`" in text
    values = yaml.safe_load(text)
    if gpu:
        assert values.pop("bf16") is True  # refused by Hugging Face where there is none
    settings = make_settings(TASKS[kind], values | {"output_dir": str(tmp_path)}, "run.yaml")
    assert settings.data.model_name_or_path == "org/model"
    keys = set(re.findall(r"^# ([a-z_]+): ", text, re.MULTILINE))
    assert len(keys) > 5
    assert keys <= {key.name for key in task_keys(TASKS[kind])}


def test_init_writes_a_new_file_only(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    assert main(["init", "sft", "org/model", str(file)]) == 0
    assert yaml.safe_load(file.read_text())["model_name_or_path"] == "org/model"
    assert "would download the model org/model from the Hub" in capsys.readouterr().err
    assert main(["init", "sft", "org/model", str(file)]) == 2
    assert main(["init", "sftt", "org/model"]) == 2
    assert main(["init", "sft"]) == 2
    assert main(["init", "sft", "org/model", str(file / "below")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in errors[:1]] == [f"error: {file} exists"]
    assert "did you mean 'sft'?" in errors[1]
    assert "mca-train init sft models/qwen3" in errors[2]
    assert errors[-1].endswith("below: cannot be written (Not a directory); name another file")


@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        ("none", 2, "model none: no such directory; expected one with a config.json, or a model of the Hub"),
        ("./org/model", 2, "model ./org/model: no such directory"),
        ("/none/model", 2, "model /none/model: no such directory"),
        (".", 2, "model .: expected a directory with a config.json"),
        ("here", 0, ""),
    ],
)
def test_init_looks_whether_the_model_exists(model, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text("{}")
    assert main(["init", "sft", model, "run.yaml"]) == code
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == bool(said)
    assert (tmp_path / "run.yaml").exists() == (code == 0)


def test_the_schema_knows_the_keys_and_their_types(capsys):
    assert main(["schema", "dpo"]) == 0
    found = json.loads(capsys.readouterr().out)
    properties = found["properties"]
    assert properties["seq_length"]["type"] == "integer"
    assert {"type": "null"} in properties["max_train_samples"]["anyOf"]
    assert "hinge" in properties["dpo_loss"]["enum"]
    assert "cosine" in json.dumps(properties["lr_scheduler_type"])
    assert found["additionalProperties"] is False
    every = schema(TASKS.values())["properties"]
    assert set(properties) <= set(every)
    for text in (value["description"] for value in every.values() if "description" in value):
        assert "\n" not in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "learning_rate" in script
    assert "schema" in script


def test_bash_completes_commands_and_flags(capsys, tmp_path):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    ask = 'source "$0"; COMP_WORDS=(mca-train {}); COMP_CWORD={}; _mca_train; echo ${{COMPREPLY[@]}}'

    def completed(words, place):
        command = ["bash", "-c", ask.format(words, place), script]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert completed("pre", 1) == ["pretrain"]
    assert completed("dpo run.yaml --dpo_b", 3) == ["--dpo_beta"]
    assert completed("sft run.yaml --dpo_b", 3) == []


def test_completion_for_another_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "expected one of bash, zsh, fish, not 'tcsh'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "reported"),
    [
        ("cutoff_len", "is called seq_length here"),
        ("attn_implementation", "is called attention_backend here"),
        ("load_in_4bit", "quantized weights cannot be trained"),
        ("torch_dtype", "bf16 or fp16"),
        ("beta", "dpo_beta or kto_beta"),
        ("max_seq_length", "is called seq_length here"),
        ("stage", "the word after mca-train"),
        ("dataset_name", "train_file for a file, or datasets: [{path: org/name}] for a dataset of the Hub"),
        ("mask_history", "give rows with prompt and completion"),
        ("assistant_only_loss", "the answers of conversations are the targets"),
        ("interleave_probs", "set weight in the entries of datasets"),
        ("image_max_pixels", "preprocessor_config.json"),
        ("max_prompt_length", "at most seq_length tokens"),
        ("pref_ftx", "is called rpo_alpha here"),
        ("plot_loss", "loss.png is drawn"),
        ("num_layers_per_virtual_pipeline_stage", "num_layers / (pp x that number)"),
        ("load", "to start from its weights set model_name_or_path"),
        ("global_batch_size", "set gradient_accumulation_steps instead"),
    ],
)
def test_a_key_of_another_program_is_told_its_name_here(key, reported, run, capsys):
    assert main(["sft", run(**{key: 1})]) == 2
    assert f"{key}: " in (error := capsys.readouterr().err)
    assert reported in error


def test_other_programs_keys_are_no_keys_here_and_point_to_keys():
    names = {key.name for task in TASKS.values() for key in task_keys(task)}
    assert not names & set(RENAMED)
    for reported in RENAMED.values():
        if reported.startswith("is called "):
            assert reported.split()[2] in names, reported


def test_the_tables_of_the_documents_are_those_of_the_classes():
    docs = Path(__file__).parents[3] / "docs"
    texts = {page.relative_to(docs.parent): page.read_text() for page in docs.rglob("*.md")}
    stale = [str(page) for page, text in texts.items() if update_document(text, TABLES) != text]
    assert not stale, f"python -m mca_train.reference.keys {' '.join(stale)}"
    whole = "".join(texts.values())
    shown = {name for name in TABLES if f"<!-- {name} -->" in whole}
    assert shown == set(TABLES) - {"keys of pretrain", "keys of sft"}  # which have none of their own
    assert "`cutoff_len`" in whole
    for task in TASKS.values():
        keys = [key.name for key in task_keys(task) if key.group != HF]
        assert [key for key in keys if f"\n| `{key}` | " not in texts[Path("docs/keys.md")]] == []


@pytest.mark.parametrize(
    "name", ["plan", "data", "tokenize", "report", "init", "schema", "completion", "client"]
)
def test_help_of_a_command_is_its_own(name, capsys):
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: mca-train {name} ")
    assert f"  mca-train {name} " in text.partition("examples:")[2]
