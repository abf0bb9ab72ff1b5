import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mca_config.errors import McaError
from mca_train.cli import main

RECIPE = min((Path(__file__).parents[3] / "recipes").rglob("*.yaml"))

pytestmark = pytest.mark.usefixtures("own_threads")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["xyzzy", "c.yaml"], "unknown command 'xyzzy'; see mca-train --help"),
        (["pretrian", "c.yaml"], "unknown command 'pretrian'; did you mean 'pretrain'?"),
        (["sft"], "mca-train sft needs a configuration file"),
        (["sft", "--bf16"], "the command line: missing model_name_or_path, output_dir"),
        (
            [str(RECIPE)],
            f"name the kind of run first: mca-train KIND {RECIPE} (KIND: pretrain, sft, dpo, kto, reward, classify)",
        ),
        (["none.yaml"], "unknown command 'none.yaml'"),
        (["plan", "none.yaml"], "configuration file none.yaml does not exist"),
        (["plan", "/"], "configuration file / is a directory; name a YAML file"),
    ],
)
def test_wrong_usage_is_one_line_and_2(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "flag", "reported"),
    [
        ("sft", "--learing-rate=1", "unknown flag --learing_rate; did you mean --learning_rate?"),
        ("plan", "--dry_rn", "unknown flag --dry_rn; did you mean --dry_run?"),
        (
            "dpo",
            "--per_device_batch_size",
            "unknown flag --per_device_batch_size; did you mean --per_device_train_batch_size?",
        ),
        ("pretrain", "--lr", "--lr: is called learning_rate here; set that instead"),
        ("data", "--dpo_bta", "unknown flag --dpo_bta; did you mean --dpo_beta?"),
    ],
)
def test_a_misspelt_flag_without_a_file_is_named(command, flag, reported, capsys):
    assert main([command, flag]) == 2
    assert capsys.readouterr().err == f"error: mca-train {command}: {reported}\n"


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"learning_rte": 1}, [], "run.yaml: unknown key 'learning_rte'; did you mean 'learning_rate'?"),
        ({}, ["--seq_lenth", "2"], "command line: unknown flag --seq_lenth; did you mean --seq_length?"),
        (
            {"seq_lenth": 2},
            ["--seed", "1"],
            "command line: unknown key 'seq_lenth'; did you mean 'seq_length'?",
        ),
        ({}, ["--lr", "1"], "command line: --lr: is called learning_rate here"),
        ({}, ["--tensor-model-paralel-size", "2"], "did you mean --tensor_model_parallel_size?"),
        ({"per_device_batch_size": 1}, [], "did you mean 'per_device_train_batch_size'?"),
        ({"learning_rate": "fast"}, [], "learning_rate must be a number, not 'fast'"),
        ({"output_dir": ...}, [], "missing output_dir"),
        ({"overlap_param_gather": True}, [], "use_distributed_optimizer"),
        ({"seq_length": 1}, [], "seq_length is 1; expected at least 2"),
        ({"bf16": True, "fp16": True}, [], "bf16 excludes fp16"),
        ({"train_file": ...}, [], "train_file is not set"),
        ({"lora_rank": 2, "ckpt_format": "torch_dist"}, [], "an adapter is not written as torch_dist"),
        ({"eval_strategy": "steps"}, [], "eval_strategy is steps, but eval_file is not set"),
        ({"eval_on_start": True}, [], "eval_on_start is true, but eval_file is not set"),
        ({"do_eval": True}, [], "do_eval is true, but eval_file is not set"),
        ({"do_eval": False, "eval_file": "a.jsonl"}, [], "do_eval is false, but eval_file is set"),
        ({"max_eval_samples": 4}, [], "max_eval_samples is set, but eval_file is not"),
        ({"shuffle_buffer_size": 4}, [], "shuffle_buffer_size is for streaming"),
        (
            {"streaming": True, "max_steps": 1, "shuffle_buffer_size": 4},
            ["--train_sampling_strategy", "sequential"],
            "shuffle_buffer_size shuffles, but train_sampling_strategy is sequential",
        ),
        (
            {"streaming": True, "max_steps": 1, "tokenized_cache": "c"},
            [],
            "tokenized_cache keeps no samples of a stream",
        ),
        ({"do_train": False}, [], "do_train is false, but mca-train trains"),
        ({"adam_beta2": 1.5}, [], "adam_beta2 must be at least 0 and below 1, not 1.5"),
        ({"num_train_epochs": 0}, [], "num_train_epochs must be above 0"),
        ({}, ["--learning_rate", ".nan"], "learning_rate must be at least 0, not nan"),
        ({}, ["--save_strategy", "never"], "save_strategy must be no or steps"),
        ({"ddp_backend": "mpi"}, [], "ddp_backend is 'mpi'; ranks of this machine communicate over"),
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            [],
            "warmup_stable_decay with lr_scheduler_kwargs {}: ",
        ),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, [], "One of min_lr or min_lr_rate should be set"),
        (
            {},
            ["--lr_scheduler_kwargs", '{"foo":1}'],
            "lr_scheduler_type linear with lr_scheduler_kwargs {'foo': 1}",
        ),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": "x"}},
            [],
            "lr_scheduler_type poly",
        ),
        (
            {"metric_for_best_model": "accuracy"},
            [],
            "metric_for_best_model is 'accuracy'; mca-train pretrain eval",
        ),
        (
            {"load_best_model_at_end": True, "save_strategy": "epoch"},
            [],
            "load_best_model_at_end is true, but eval_strategy is no",
        ),
        (
            {"load_best_model_at_end": True, "save_strategy": "no"},
            [],
            "is true, but eval_strategy is no, so there is no best model",
        ),
        ({}, ["--eval_file"], "eval_file must be a list, not True; a flag without a value means true"),
    ],
)
def test_wrong_configurations_are_one_line_and_2(run, changes, flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", run(**changes), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_name_or_path": "/none"}, "model_name_or_path: directory /none does not exist"),
        ({"train_file": "/none.jsonl"}, "train_file: file /none.jsonl does not exist"),
        (
            {"train_file": "org/rows"},
            "org/rows does not exist; if it is a dataset of the Hub, set datasets: [{path: org/rows}]",
        ),
        ({"eval_file": "org/rows"}, "if it is a dataset of the Hub, save its rows to a file and name that"),
        ({"tensor_model_parallel_size": 3}, "tensor_model_parallel_size 3"),
        (
            {"tensor_model_parallel_size": 2, "nproc_per_node": 3},
            "= 2; start 2 or 4 (nproc_per_node, or --nproc-per-node of torchrun), or change a size",
        ),
        ({"output_dir": "model"}, "output_dir: model is where the run reads model, which it would overwrite"),
        ({"output_dir": "model/run"}, "output_dir: model/run is inside model, which the run reads"),
        ({"output_dir": "a.jsonl"}, "output_dir: a.jsonl is a file; set a directory"),
        ({"output_dir": "dangling"}, "output_dir: dangling is a broken link"),
        ({"output_dir": "/proc/none"}, "output_dir: /proc/none cannot be written"),
        ({"train_file": __file__}, "ends in '.py'"),
        (
            {"train_file": "/tmp"},
            "train_file: /tmp is a directory; name its files, or set datasets: [{path: /tmp}]",
        ),
        ({"eval_file": "/tmp"}, "eval_file: /tmp is a directory; name its files"),
        (
            {"train_file": "a/*.txt"},
            "file a/*.txt does not exist; patterns are not expanded in YAML; name the files, or set datasets: "
            "[{path: a}]",
        ),
        ({"eval_file": "/dev/null"}, "eval_file: /dev/null is a pipe, socket or device; name a file"),
        ({"eval_file": "/none.jsonl"}, "eval_file: file /none.jsonl does not exist"),
        ({"tokenizer_name_or_path": str(Path(__file__).parent)}, "set tokenizer_name_or_path"),
        ({"text_column": "words"}, "no column 'words' (columns: text); set text_column"),
        ({"adapter_name_or_path": "/none"}, "adapter_name_or_path: directory /none does not exist"),
        ({"attention_backend": "flash"}, "attention_backend flash needs transformer_impl transformer_engine"),
        ({"pipeline_model_parallel_size": 2, "overlap_p2p_comm": True}, "overlap_p2p_comm needs virtual"),
        ({"calculate_per_token_loss": False}, "calculate_per_token_loss cannot be false"),
        pytest.param(
            {"optimizer": "muon"},
            "optimizer muon needs",
            marks=pytest.mark.skipif(
                find_spec("emerging_optimizers") is not None, reason="muon is installed"
            ),
        ),
        ({"resume_from_checkpoint": "/none"}, "resume_from_checkpoint: /none does not exist"),
        ({"resume_from_checkpoint": True}, "resume_from_checkpoint: no complete checkpoint-<step> in"),
    ],
)
def test_what_cannot_be_run_as_asked_is_one_error_and_2(run, changes, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to("nothing")
    assert main(["pretrain", run(**{"model_name_or_path": "model"} | changes)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert any(line.startswith("error: ") for line in error)
    assert message in "\n".join(error)
    assert not (tmp_path / "out").exists()


def test_what_cannot_go_along_with_a_model_is_told_before_the_run(run, capsys, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "notes.md").symlink_to("nothing")
    of = {"model_name_or_path": str(tmp_path / "base")}
    assert main(["pretrain", run(**of)]) == 2
    assert "notes.md: a link to nothing; put the file itself there" in capsys.readouterr().err
    assert main(["sft", run(**of, lora_rank=4)]) == 2  # without a config.json
    assert "notes.md" not in capsys.readouterr().err, "an adapter takes no files of its base along"


def test_a_file_that_is_broken_is_a_failure(run, capsys, tmp_path):
    (tmp_path / "broken.jsonl").write_text("{")
    assert main(["pretrain", run(train_file=str(tmp_path / "broken.jsonl"))]) == 1
    assert "broken.jsonl cannot be read" in capsys.readouterr().err


def test_checkpoints_of_another_run_are_told_before_anything_is_read(run, capsys, tmp_path):
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-2" / "trainer_state.json").touch()
    (tmp_path / "out" / "train_log.jsonl").touch()
    assert main(["pretrain", run()]) == 2
    error = capsys.readouterr().err
    assert (
        f"output_dir: {tmp_path / 'out'} holds the checkpoints of another run (checkpoint-2); continue"
        in error
    )
    assert "reading" not in error


def test_an_output_dir_that_another_run_uses_is_told_before_anything_is_read(run, capsys, tmp_path):
    from mca_train.checkpoint.output_lock import OutputLock

    lock = OutputLock(tmp_path / "out")
    lock.take()
    assert main(["pretrain", run()]) == 1
    lock.release()
    error = capsys.readouterr().err
    assert f"error: output_dir: {tmp_path / 'out'} is used by another run (process " in error
    assert "reading" not in error


def test_the_backend_of_this_machine_may_be_named(run):
    from mca_models.megatron import platform
    from mca_train.run.rules import check
    from mca_train.run.settings import load_values, make_settings
    from mca_train.tasks import TASKS

    values, where = load_values(Path(run(ddp_backend=platform.backend())), [])
    settings = check(TASKS["sft"], make_settings(TASKS["sft"], values, where)).require().settings
    assert settings.training.ddp_backend is None


@pytest.mark.parametrize("words", [["--help"], ["sft", "--help"]])
def test_help_imports_nothing_heavy(words):
    code = (
        f"import sys; from mca_train.cli import main; main({words}); "
        "heavy = {'torch', 'transformers', 'numpy', 'datasets'}; "
        "heavy |= {'mca_train.losses.preference_options', 'mca_train.tasks.load'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert "examples:" in done.stdout


@pytest.mark.parametrize(
    ("where", "code", "reported"),
    [
        (">&-", 0, ""),
        (
            ">/dev/full",
            1,
            "standard output cannot be written (No space left on device); its output is lost",
        ),
        ("| true", 0, ""),
        ("2>&- >&- <&-", 0, ""),
    ],
)
def test_help_goes_where_it_can(where, code, reported):
    command = f"{shlex.quote(sys.executable)} -m mca_train --help {where}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (code, reported, "")


def test_an_unknown_optimizer_is_answered_with_those_of_megatron(run, capsys):
    assert main(["sft", run(), "--optim", "adamw"]) == 2
    reported = capsys.readouterr().err
    assert reported == "error: --optim is 'adamw'; expected adamw_torch, adamw_torch_fused or sgd\n"


def test_readme_and_docs_name_the_keys_of_the_data():
    from mca_train.config.arguments import DataArguments, LaunchArguments

    text = (Path(__file__).parents[3] / "docs" / "keys.md").read_text()
    for cls in (DataArguments, LaunchArguments):
        for name in cls.__dataclass_fields__:
            assert f"`{name}`" in text, name


def test_an_output_dir_that_is_tried_is_left_as_it_was(tmp_path):
    from mca_train.run.early_rules import require_writable

    require_writable(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(McaError, match=r"output_dir: .* cannot be written"):
            require_writable(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_all_that_is_wrong_with_a_run_is_told_at_once_and_the_plan_tells_the_same(run, capsys, tmp_path):
    wrong = {
        "train_file": "/none.jsonl",
        "eval_strategy": "steps",
        "tensor_model_parallel_size": 3,
        "resume_from_checkpoint": "/gone",
        "metric_for_best_model": "accuracy",
        "optimizer_cpu_offload": False,
    }
    path = run(**wrong)
    assert main(["sft", path]) == 2
    error = capsys.readouterr().err
    reported = [line.strip() for line in error.splitlines()[1:]]
    assert error.startswith(f"error: {path}: {len(reported)} problems\n")
    for words in ("file /none.jsonl", "eval_strategy is", "num_attention_heads 4", "/gone", "is 'accuracy'"):
        assert sum(words in line for line in reported) == 1, words
    assert main(["plan", "sft", path]) == 2
    impossible = [line.removeprefix("  - ") for line in capsys.readouterr().out.splitlines()[1:]]
    assert impossible == [line for line in reported if "/none" not in line and "/gone" not in line]
    del wrong["eval_strategy"], wrong["tensor_model_parallel_size"], wrong["metric_for_best_model"]
    assert main(["plan", "sft", run(**wrong)]) == 0
    out = capsys.readouterr().out
    assert "this run cannot start here:\n  - train_file: file /none.jsonl does not exist\n" in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["pretrain", "dpo"])
def test_an_unknown_key_leads_to_the_help_of_its_kind(kind, run, capsys):
    assert main([kind, run(zzzzzz=1)]) == 2
    assert f"unknown key 'zzzzzz'; mca-train {kind} --help lists the keys" in capsys.readouterr().err
    assert main([kind, "--zzzzzz", "1"]) == 2
    assert f"unknown flag --zzzzzz; mca-train {kind} --help lists the keys" in capsys.readouterr().err


def test_wrong_keys_and_wrong_values_are_told_together(run, capsys):
    wrong = {
        "seq_lenth": 3,
        "learning_rate": "fast",
        "lora_rank": 0,
        "dpo_beta": 0.1,
        "bf16": True,
        "fp16": True,
    }
    assert main(["sft", run(**wrong)]) == 2
    error = capsys.readouterr().err
    for words in (
        "unknown key 'seq_lenth'; did you mean 'seq_length'?",
        "learning_rate must be a number, not 'fast'",
        "lora_rank is 0; expected at least 1",
        "dpo_beta: for mca-train dpo, not sft; remove the key",
    ):
        assert error.count(words) == 1, words


@pytest.mark.parametrize(
    ("command", "changes", "flags", "message"),
    [
        ("plan", {}, ["--imges", "3"], "unknown flag --imges; did you mean --images?"),
        ("plan", {}, ["--serach", "--gpu", "8"], "unknown flag --serach; did you mean --search?"),
        ("plan", {}, ["--serach", "--gpu", "8"], "unknown flag --gpu; did you mean --gpus?"),
        ("plan", {}, ["--learning_rat", "1"], "unknown flag --learning_rat; did you mean --learning_rate?"),
        ("plan", {"gpus": 8}, [], "gpus: is a flag of mca-train plan (--gpus), no key of a run; remove it"),
        ("sft", {}, ["--dry_run"], "dry_run: is a flag of mca-train plan (--dry_run), no key of a run"),
        ("sft", {}, ["--serach"], "unknown flag --serach"),
    ],
)
def test_flags_of_a_plan_are_told_from_keys(run, command, changes, flags, message, capsys):
    assert main([command, run(**changes), *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--search", "--gpus", "2"]])
def test_a_plan_needs_no_output_dir_and_no_data(run, flags, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "pretrain", run(output_dir=..., train_file=...), *flags]) == 0
    assert "pretrain" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
