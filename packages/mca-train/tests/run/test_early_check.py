"""Errors of usage are reported before torch and transformers are imported, as the checks after the imports do."""

import argparse
import contextlib
import inspect
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import fields
from pathlib import Path

import pyarrow
import pytest
import yaml
from pyarrow import ipc, parquet
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR
from transformers.trainer_utils import SchedulerType

from mca_config.errors import McaError
from mca_train.cli import _fails_on_first_rank
from mca_train.config import early_arguments as checks
from mca_train.config.early_arguments import early_arguments
from mca_train.lr_schedule import schedule_problems
from mca_train.plan.options import PlanOptions
from mca_train.run.early_rules import read_columns
from mca_train.run.rules import check
from mca_train.run.settings import check_run, load_values, make_settings, plan_problems
from mca_train.tasks import TASKS

HEAVY = ("torch", "transformers", "megatron", "datasets")

BEST = ("--load_best_model_at_end", "--eval_file", "a.jsonl")
USAGES = (
    (
        ["launch", "sft", "RUN"],
        "unknown command 'launch'; mca-train KIND run.yaml starts the ranks of this machine",
    ),
    (
        ["train", "RUN"],
        "unknown command 'train'; name a kind of run: pretrain, sft, dpo, kto, reward, classify",
    ),
    (["sft", "--learing_rate", "1"], "did you mean --learning_rate?"),
    (["sft", "none.yaml"], "configuration file none.yaml does not exist"),
    (["sft", "broken.yaml"], "broken.yaml is not valid YAML"),
    (["sft", "RUN", "--learning-rte", "1"], "did you mean --learning_rate?"),
    (["sft", "RUN", "--learning_rate", "fast"], "learning_rate must be a number, not 'fast'"),
    (["sft", "RUN", "--eval_strategy", "often"], "eval_strategy must be no or steps or epoch, not 'often'"),
    (["sft", "RUN", "--bf16", "--fp16"], "bf16 excludes fp16"),
    (["sft", "RUN", "--fsdp", "full_shard"], "fsdp is not supported"),
    (["sft", "RUN", "--model_name_or_path", "none"], "model_name_or_path: directory none does not exist"),
    (["sft", "RUN", "--train_file", "none.jsonl"], "train_file: file none.jsonl does not exist"),
    (
        ["sft", "RUN", "--model_name_or_path", "shards"],
        "shards: 1 of 2 files named in model.safetensors.index",
    ),
    (["sft", "RUN", "--resume_from_checkpoint", "gone"], "resume_from_checkpoint: gone does not exist"),
    (["sft", "RUN", "--output_dir", "model"], "output_dir: model is where the run reads model"),
    (
        ["sft", "RUN", "--tensor_model_parallel_size", "3"],
        "cannot be divided by tensor_model_parallel_size 3",
    ),
    (["sft", "RUN", "--eval_strategy", "steps"], "eval_strategy is steps, but eval_file is not set"),
    (["dpo", "RUN", "--dpo_beta", "-1"], "dpo_beta is -1.0; expected a positive number"),
    (["kto", "RUN", "--undesirable_weight", "-1"], "undesirable_weight is -1.0; expected 0 or more"),
    (["reward", "RUN", "--loss_chunk_size", "8"], "loss_chunk_size is not supported with a sequence-class"),
    (
        ["classify", "RUN", "--num_labels", "2", "--metric_for_best_model", "margin"],
        "classify evaluates loss",
    ),
    (
        ["sft", "RUN", "--optim", "adafactor"],
        "optim adafactor is not supported by Megatron; expected adamw_torch, ",
    ),
    (["sft", "RUN", "--report_to", "wnadb"], "report_to is 'wnadb'; expected none, all or some of azure_ml"),
    (["sft", "RUN", "--report_to", "clearml"], "report_to clearml needs the package clearml"),
    (
        ["sft", "RUN", "--lr_scheduler_type", "cosine", "--lr_scheduler_kwargs", '{"num_cycle": 2}'],
        "lr_scheduler_type cosine has no num_cycle; expected some of num_cycles",
    ),
    (
        ["sft", "RUN", "--lr_scheduler_kwargs", "{power: 2}"],
        "is '{power: 2}'; expected a mapping",
    ),
    (
        ["sft", "RUN", "--lr_scheduler_type", "polynomial", "--lr_scheduler_kwargs", '{"lr_end": 1}'],
        "lr_end (1) must be smaller than initial lr",
    ),
    (
        ["sft", "RUN", "--lr_scheduler_type", "warmup_stable_decay"],
        "set num_decay_steps in lr_scheduler_kwargs",
    ),
    (
        ["plan", "sft", "RUN", "--lr_scheduler_type", "cosine_with_min_lr"],
        "One of min_lr or min_lr_rate should be set",
    ),
    (
        ["sft", "RUN", "--lr_scheduler_type", "reduce_lr_on_plateau"],
        "lr_scheduler_type reduce_lr_on_plateau follows the evaluation loss, but eval_strategy is no; set it",
    ),
    (
        [
            *("plan", "sft", "RUN", "--lr_scheduler_type", "greedy", "--eval_strategy", "steps"),
            *("--lr_scheduler_kwargs", '{"patients": 2}'),
        ],
        "lr_scheduler_type greedy has no patients; expected some of cooldown",
    ),
    (
        ["sft", "RUN", *BEST, "--eval_strategy", "steps", "--eval_steps", "3", "--save_steps", "4"],
        "save_steps is 4, but load_best_model_at_end needs a multiple of eval_steps (3)",
    ),
    (
        ["sft", "RUN", *BEST, "--eval_strategy", "epoch"],
        "save_strategy is steps and eval_strategy epoch, but load_best_model_at_end chooses among evaluated",
    ),
    (["sft", "RUN", "--save_strategy", "best"], "save_strategy best needs metric_for_best_model; set it"),
    (
        ["sft", "RUN", "--save_strategy", "best", "--metric_for_best_model", "loss"],
        "save_strategy is best, but eval_strategy is no, so no checkpoint is the best",
    ),
    (["sft", "RUN", "--logging_steps", "2.5"], "logging_steps must be a whole number or below 1, not 2.5"),
    (["sft", "RUN", "--dataloader_prefetch_factor", "2"], "needs dataloader_num_workers above 0"),
    (["sft", "RUN", "--lora_rank", "4", "--lora_target_modules", "q_prj"], "['q_prj'] matches no linear"),
    (["plan", "sft", "RUN", "--lora_rank", "4", "--lora_target_modules", "q_prj"], "matches no linear"),
    (
        [
            "sft",
            "RUN",
            "--model_name_or_path",
            "qwen-vl",
            "--lora_rank",
            "4",
            "--lora_target_modules",
            "q_prj",
        ],
        "['q_prj'] matches no linear",
    ),
    (["sft", "RUN", "--model_name_or_path", "qwen-vl", "--freeze", "audio"], "freeze: audio: a qwen2_5_vl"),
    (["sft", "RUN", "--freeze", "vision"], "model has one part; remove the key"),
    (["sft", "RUN", "--train_file", "wrong.parquet"], "train_file: columns body; expected 'messages'"),
    (["dpo", "RUN", "--train_file", "wrong.arrow"], "train_file: no column 'chosen' (columns: body)"),
    (["sft", "RUN", "--train_file", "wrong.jsonl"], "train_file: columns body, title; expected 'messages'"),
    (["sft", "RUN", "--eval_file", "wrong.jsonl"], "eval_file: columns body, title; expected 'messages'"),
    (["pretrain", "RUN", "--train_file", "wrong.jsonl"], "train_file: wrong.jsonl: no column 'text'"),
    (["dpo", "RUN"], "train_file: no column 'chosen' (columns: text)"),
    (["reward", "RUN"], "train_file: no column 'chosen' (columns: text)"),
    (["kto", "RUN"], "train_file: no column 'label' (columns: text); set label_column"),
    (["kto", "RUN", "--train_file", "pairs.jsonl"], "; these are rows of mca-train dpo or reward"),
    (
        ["kto", "RUN", "--nproc_per_node", "1", "--per_device_train_batch_size", "1"],
        "a step has one sample; raise gradient_accumulation_steps",
    ),
    (
        ["sft", "RUN", "--model_name_or_path", "half", "--check_for_nan_in_grad", "true"],
        "check_for_nan_in_grad with fp16 needs loss_scale",
    ),
    (["classify", "RUN", "--num_labels", "2"], "train_file: no column 'label' (columns: text)"),
    (["data", "sft", "RUN", "--train_file", "wrong.jsonl"], "train_file: columns body, title"),
    (["tokenize", "RUN", "--train_file", "wrong.jsonl"], "no column 'text' (columns: body, title)"),
    (["plan", "sft", "RUN", "--gpus", "2", "--device", "h100"], "--device h100: expected h100-80, h200"),
    (["plan", "sft", "none.yaml", "--device", "h100"], "--device h100: expected h100-80, h200"),
    (["plan", "sft", "RUN", "--seq_lenth", "64"], "did you mean --seq_length?"),
    (
        ["plan", "sft", "RUN", "--model_name_or_path", "none"],
        "model_name_or_path: directory none does not exist",
    ),
    (["plan", "sft", "RUN", "--gpus", "2", "--tensor_model_parallel_size", "3"], "this run is impossible:"),
    (
        ["plan", "sft", "RUN", "--gpus", "2", "--json", "--search", "--streaming"],
        "streaming needs max_steps",
    ),
    (["data", "sft", "RUN", "--train_file", "none.jsonl"], "file none.jsonl does not exist"),
    (["tokenize", "RUN", "--train_file", "none.jsonl"], "file none.jsonl does not exist"),
)


@pytest.mark.parametrize(
    ("keys", "reported"),
    [
        (
            {"fp8": "e4m3"},
            ["fp8: needs Transformer Engine, which is not installed; install mca-models[te] on"],
        ),
        (
            {"attention_backend": "flash", "transformer_impl": "transformer_engine"},
            ["transformer_impl transformer_engine, attention_backend flash: needs Transformer Engine"],
        ),
        (
            {"additional_configs": {"moe_router_fusion": True}},
            ["moe_router_fusion: needs Transformer Engine"],
        ),
        ({"attention_backend": "local"}, []),
        ({"transformer_impl": "local"}, []),
    ],
)
@pytest.mark.parametrize("installed", [False, True])
def test_options_of_transformer_engine_need_it(keys, reported, installed, monkeypatch, tmp_path):
    args = early_arguments()(output_dir=str(tmp_path), **keys)
    monkeypatch.setattr(checks, "find_spec", lambda name: object() if installed else None)
    found = list(checks.engine_problems(args))
    assert len(found) == len([] if installed else reported)
    assert all(line.startswith(start) for line, start in zip(found, reported, strict=False))


def test_muon_is_checked_before_heavy_imports(run, monkeypatch):
    monkeypatch.setattr(checks, "version", lambda name: "0.16.1")
    values, where = load_values(Path(run(optimizer="muon")), [])
    with pytest.raises(McaError, match="optimizer muon needs megatron-core"):
        check_run(TASKS["sft"], values, where)


VISION = Path(__file__).parents[3] / "mca-models" / "tests" / "data" / "vision_configs"


def _write_arrow(table, path, new=ipc.new_stream):
    with new(path, table.schema) as writer:
        writer.write_table(table)


def test_wrong_usage_is_reported_before_heavy_imports(run, tmp_path):
    """Run every usage in one process and look at its modules at the end."""
    file = run(model_name_or_path="model", train_file="a.jsonl", output_dir="out")
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "wrong.jsonl").write_text('{"body": "x"}\n\n{"title": "y", "body": "z"}\n')
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    table = pyarrow.table({"body": ["x"]})
    parquet.write_table(table, tmp_path / "wrong.parquet")
    _write_arrow(table, tmp_path / "wrong.arrow")
    (tmp_path / "half").mkdir()
    half = json.loads((tmp_path / "model" / "config.json").read_text()) | {"dtype": "float16"}
    (tmp_path / "half" / "config.json").write_text(json.dumps(half))
    shutil.copytree(tmp_path / "model", tmp_path / "shards")
    (tmp_path / "shards" / "a.safetensors").touch()
    names = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps(names))
    (tmp_path / "qwen-vl").mkdir()
    (tmp_path / "qwen-vl" / "config.json").write_text((VISION / "qwen2.5-vl-72b.json").read_text())
    commands = [[file if word == "RUN" else word for word in words] for words, _ in USAGES]
    code = f"""
import contextlib, io, json, sys
from mca_train.cli import main
found = []
for words in {commands!r}:
    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
        code = main(words)
    found.append([code, text.getvalue(), [name for name in {HEAVY!r} if name in sys.modules]])
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    for (words, message), (exit_code, error, heavy) in zip(USAGES, json.loads(done.stdout), strict=True):
        assert (exit_code, heavy) == (2, []), (words, error)
        assert message in error, words


def test_the_first_rank_of_torchrun_reports_before_heavy_imports(run, tmp_path):
    """The start itself is left to the ranks: after a restart `output_dir` has the checkpoints of this run."""
    file = run(lr_scheduler_kwargs={"power": 1}, ddp_timeout=1)
    (tmp_path / "out" / "checkpoint-3").mkdir(parents=True)
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}
    code = f"import sys; from mca_train.cli import main; main(['sft', {file!r}]); "
    code += f"print([name for name in {HEAVY!r} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert done.stdout == "[]\n"
    error = f"error: {file}: lr_scheduler_kwargs: lr_scheduler_type linear has no power; remove lr_scheduler_kwargs\n"
    assert done.stderr == error


@pytest.mark.parametrize("rank", [0, 1, 4])  # 4: the first of another machine
def test_other_ranks_leave_the_report_to_the_first(rank, run, tmp_path, monkeypatch):
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "8", "LOCAL_RANK": str(rank % 4)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    given = (
        "sft",
        TASKS["sft"],
        *load_values(Path(run(lr_scheduler_kwargs={"power": 1})), []),
        argparse.Namespace(),
    )
    with pytest.raises(McaError, match="has no power") if rank == 0 else contextlib.nullcontext():
        assert not _fails_on_first_rank(*given)


def test_columns_are_those_of_all_rows_of_files_that_can_be_read_quickly(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('\ufeff{"a": 1}\n{"b": 2, "a": 3}\n', encoding="utf-8")
    assert read_columns(str(rows), "train_file") == ("a", "b")
    text = tmp_path / "rows.txt"
    text.write_text("words")
    assert read_columns(str(text), "train_file") == ("text",)
    table = pyarrow.table({"a": [1], "b": [{"c": 2}]})
    parquet.write_table(table, tmp_path / "table.parquet")
    _write_arrow(table, tmp_path / "stream.arrow")
    _write_arrow(table, tmp_path / "file.arrow", ipc.new_file)
    for name in ("table.parquet", "stream.arrow", "file.arrow"):
        assert read_columns(str(tmp_path / name), "train_file") == ("a", "b"), name
    for name, content in (
        ("torn.arrow", "ARROW1"),
        ("list.json", "[1]\n"),
        ("torn.jsonl", '{"a": '),
        ("rows.parquet", "PAR1"),
        ("a.csv", "a\n"),
    ):
        (tmp_path / name).write_text(content)
        assert read_columns(str(tmp_path / name), "train_file") is None, name
    assert read_columns("https://example.org/rows.jsonl", "train_file") is None


def test_names_of_loggers_and_settings_of_schedules_are_those_of_transformers():
    assert checks.known_integrations() == tuple(INTEGRATION_TO_CALLBACK)
    available = get_available_reporting_integrations()
    installed = {name for name in INTEGRATION_TO_CALLBACK if checks.is_installed(name)}
    assert installed >= {*available}
    assert installed - {*available} <= {"kubeflow", "dagshub", "flyte"}
    functions = checks.schedule_functions()
    assert len(functions) >= 8
    for name, function in functions.items():
        declared = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType[name]]).parameters
        assert {*inspect.signature(function).parameters} == {*declared}, name


def test_modules_of_a_tower_are_known_where_it_is_trained(tmp_path):
    (tmp_path / "config.json").write_text((VISION / "qwen2.5-vl-72b.json").read_text())
    values = {"model_name_or_path": str(tmp_path), "lora_rank": 2, "lora_target_modules": ["qkv"]}

    def problems(**others):
        return plan_problems(TASKS["sft"], values | others, "", PlanOptions())

    assert not problems(freeze=["language", "projector"])
    assert "['qkv'] matches no linear" in problems()[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"freeze": ["vision", "projector", "language"]}, "are all parts, so no parameter would be trained"),
        ({"vision_learning_rate": 1e-6, "freeze": [], "lora_rank": 2}, "an adapter has one learning rate"),
        ({"vision_learning_rate": 1e-6}, "vision_learning_rate: vision is frozen"),
    ],
)
def test_parts_that_cannot_be_trained_are_reported_early(keys, message, tmp_path):
    (tmp_path / "config.json").write_text((VISION / "qwen2.5-vl-72b.json").read_text())
    (problem,) = plan_problems(TASKS["sft"], {"model_name_or_path": str(tmp_path)} | keys, "", PlanOptions())
    assert message in problem


SCHEDULES = (
    ("linear", {}, {}),
    ("cosine", {"num_cycles": "two"}, {"warmup_steps": 0.1}),
    ("cosine", {"num_cycles": "two"}, {}),
    ("cosine", {"num_cycles": "two"}, {"warmup_steps": 10}),
    ("cosine_with_restarts", {"num_cycles": 0}, {}),
    ("polynomial", {"lr_end": 1.0}, {}),
    ("polynomial", {"power": None}, {}),
    ("inverse_sqrt", {"timescale": 0}, {}),
    ("cosine_with_min_lr", {}, {}),
    ("cosine_with_min_lr", {"min_lr": 1e-6, "min_lr_rate": 0.1}, {}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-6}, {"warmup_steps": 2}),
    ("cosine_warmup_with_min_lr", {}, {"max_steps": 10}),
    ("warmup_stable_decay", {}, {}),
    ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "square"}, {}),
    ("warmup_stable_decay", {"num_decay_steps": 4}, {"max_steps": 10}),
)


@pytest.mark.parametrize(("schedule", "settings", "others"), SCHEDULES)
def test_values_of_a_schedule_are_checked_as_transformers_does(schedule, settings, others, run):
    path = Path(run(lr_scheduler_type=schedule, lr_scheduler_kwargs=settings, **others))
    values = yaml.safe_load(path.read_text())
    early, full = (make_settings(TASKS["sft"], values, "", early=early).training for early in (True, False))
    problems = list(checks.schedule_value_problems(early))
    assert problems == list(schedule_problems(full))
    correct = schedule == "linear" or (settings, others) == ({"num_decay_steps": 4}, {"max_steps": 10})
    correct = correct or settings in ({"min_lr": 1e-6}, {"num_cycles": 0})
    assert len(problems) == (0 if correct else 1)


CORRECT = {
    "polynomial": {"lr_end": 1e-7},
    "cosine_with_min_lr": {"min_lr": 1e-6, "num_cycles": 0.5},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 1e-2},
    "warmup_stable_decay": {"num_decay_steps": 10, "num_stable_steps": 5, "decay_type": "1-sqrt"},
    "reduce_lr_on_plateau": {"factor": 0.5, "min_lr": [1e-6], "mode": "max"},
    "greedy": {"min_lr": [1e-6], "smooth": True},
}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}


@pytest.mark.parametrize("schedule", [kind.value for kind in SchedulerType])
def test_correct_schedules_have_no_problem_and_no_warning(schedule, run):
    for settings in {"{}": {}, str(CORRECT.get(schedule)): CORRECT.get(schedule, {})}.values():
        if not settings and schedule in (
            "cosine_with_min_lr",
            "cosine_warmup_with_min_lr",
            "warmup_stable_decay",
        ):
            continue  # these need a setting
        values = yaml.safe_load(
            Path(
                run(lr_scheduler_type=schedule, lr_scheduler_kwargs=settings, max_steps=-1, **EVALUATED)
            ).read_text()
        )
        early, full = (
            make_settings(TASKS["sft"], values, "", early=early).training for early in (True, False)
        )
        for warmup, steps in itertools.product((0, 1, 10, 0.1, 0.9999, 5000), (-1, 20, 20000)):
            for training, problems in (
                (early, checks.schedule_value_problems),
                (full, schedule_problems),
            ):
                training.warmup_steps, training.max_steps = warmup, steps
                with warnings.catch_warnings(record=True, action="always") as warned:
                    found = list(problems(training))
                # a polynomial decay over no steps divides by 0 at the end of the run
                without_decay = schedule == "polynomial" and (warmup, steps) == (0.9999, 20)
                assert (bool(found), warned) == (without_decay, []), (warmup, steps)


NUMBERS = "{min_lr: 1e-6, num_cycles: '2'}"


@pytest.mark.parametrize("flags", [[], ["--lr_scheduler_kwargs", '{"min_lr": "1e-6", "num_cycles": "2"}']])
def test_the_text_of_a_number_in_lr_scheduler_kwargs_is_a_number(flags, run, tmp_path):
    file = Path(run(lr_scheduler_type="cosine_with_min_lr"))
    if not flags:
        file.write_text(f"{file.read_text()}\nlr_scheduler_kwargs: {NUMBERS}\n")
    values, where = load_values(file, flags)
    for early in (True, False):
        training = make_settings(TASKS["sft"], values, where, early=early).training
        found = training.lr_scheduler_kwargs
        assert found == {"min_lr": 1e-6, "num_cycles": 2}
        assert [*map(type, found.values())] == [float, int]
    assert not [*checks.schedule_value_problems(training), *schedule_problems(training)]


@pytest.mark.parametrize(
    ("schedule", "settings", "message"),
    [
        ("warmup_stable_decay", {}, "num_decay_steps is missing; set num_decay_steps in lr_scheduler_kwargs"),
        (
            "polynomial",
            {"lr_end": "low"},
            "lr_end is 'low'; expected a number; set lr_end in lr_scheduler_kwargs",
        ),
        ("cosine", {"num_cycles": None}, "num_cycles is None; expected a number; set num_cycles in"),
        ("inverse_sqrt", {"timescale": -5}, "the schedule cannot be computed ("),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 4, "num_cycles": ".inf"},
            "num_cycles is '.inf'; expected",
        ),
        ("polynomial", {"lr_end": 1}, "; change lr_scheduler_kwargs, learning_rate or warmup_steps"),
    ],
)
def test_wrong_values_of_a_schedule_are_named_with_the_fix(schedule, settings, message, run):
    file = run(lr_scheduler_type=schedule, lr_scheduler_kwargs=settings, warmup_steps=10)
    values = yaml.safe_load(Path(file).read_text())
    for early, problems in ((True, checks.schedule_value_problems), (False, schedule_problems)):
        (problem,) = problems(make_settings(TASKS["sft"], values, "", early=early).training)
        assert message in problem


def test_a_rate_that_is_not_finite_is_a_problem(run):
    values = yaml.safe_load(Path(run(lr_scheduler_type="warmup_stable_decay", max_steps=20)).read_text())
    values["lr_scheduler_kwargs"] = {"num_decay_steps": 4, "min_lr_ratio": math.inf}
    for early, problems in ((True, checks.schedule_value_problems), (False, schedule_problems)):
        (problem,) = problems(make_settings(TASKS["sft"], values, "", early=early).training)
        assert "the rate of step 20 is inf" in problem


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "bad"}, "mode bad is unknown"),
        ({"patience": "long"}, "patience is 'long'; expected a number; set patience"),
        ({"factor": 1.5}, "Factor should be < 1.0"),
        ({"min_lr": [1e-6, 1e-7]}, "expected 1 min_lrs, got 2"),
    ],
)
def test_values_of_a_schedule_that_follows_a_metric_are_checked_as_torch_does(
    schedule, settings, message, run
):
    file = run(lr_scheduler_type=schedule, lr_scheduler_kwargs=settings, **EVALUATED)
    values = yaml.safe_load(Path(file).read_text())
    for early, problems in ((True, checks.schedule_value_problems), (False, schedule_problems)):
        (problem,) = problems(make_settings(TASKS["sft"], values, "", early=early).training)
        assert message in problem


def test_schedules_that_follow_a_metric_have_the_settings_of_the_installed_classes():
    installed = {"REDUCE_ON_PLATEAU": ReduceLROnPlateau, "GREEDY": GreedyLR}
    for name, kind in checks.metric_schedules().items():
        assert {*inspect.signature(kind).parameters} == {*inspect.signature(installed[name]).parameters}
    assert checks.metric_schedules().keys() == installed.keys()


def test_some_values_of_schedules_are_wrong_and_all_schedules_with_settings_are_checked():
    assert {name.upper() for name, *_ in SCHEDULES} == {*checks.schedule_functions()}


RUNS = {
    "correct": {},
    "enumerations": {
        "lr_scheduler_type": "cosine",
        "save_strategy": "no",
        "optim": "sgd",
        "log_level": "debug",
    },
    "an optimizer of Megatron": {"optimizer": "adam", "optim": "adafactor"},
    "no optimizer": {"optim": "adamw"},
    "derived": {"gradient_checkpointing": True, "full_determinism": True, "metric_for_best_model": "loss"},
    "pipeline": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1},
    "a wrong pipeline": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "gradient_accumulation_steps": 3,
    },
    "wrong keys": {"seq_lenth": 1, "learning_rate": "fast", "adam_beta2": 2},
    "wrong sizes": {"tensor_model_parallel_size": 3, "train_file": "/none.jsonl", "max_eval_samples": 2},
    "other folders": {"adapter_name_or_path": "/none", "resume_from_checkpoint": "/none"},
    "a torn config.json": {"model_name_or_path": "torn"},
}


@pytest.mark.parametrize("name", RUNS)
def test_early_messages_are_those_of_the_full_check(name, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    file = tmp_path / run(**RUNS[name])
    values = yaml.safe_load(file.read_text())

    def message(report):
        try:
            report()
        except McaError as error:
            return str(error)
        return None

    task = TASKS["sft"]
    full = message(lambda: check(task, make_settings(task, values, str(file))).require())
    assert message(lambda: check_run(task, *load_values(file, []))) == full
    valid = ("correct", "enumerations", "an optimizer of Megatron", "derived", "pipeline")
    assert (full is None) == (name in valid)


CHANGED_BY_HUGGING_FACE = {
    "accelerator_config",
    "activation_checkpointing",
    "dataloader_pin_memory",
    "debug",
    "disable_tqdm",
    "gradient_checkpointing",
    "report_to",
    "use_cpu",
}
"""Fields without a rule that is checked early."""


@pytest.mark.parametrize("name", ["correct", "enumerations", "derived", "pipeline"])
def test_early_arguments_have_the_values_of_the_full_ones(name, run):
    values = yaml.safe_load(Path(run(**RUNS[name])).read_text())
    task = TASKS["sft"]
    early, full = (make_settings(task, values, "run.yaml", early=early).training for early in (True, False))
    differing = {
        field.name
        for field in fields(full)
        if hasattr(early, field.name) and getattr(early, field.name) != getattr(full, field.name)
    }
    assert differing <= CHANGED_BY_HUGGING_FACE
