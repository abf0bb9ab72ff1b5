"""The training arguments with transformers: parsing of every kind, the interplay with HF's, batch sizes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import HfArgumentParser

from mca_config import (
    DistributingParallelArguments,
    McaError,
    MegatronArguments,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from mca_config.training_checks import _ON, IGNORED, REFUSED, hf_problems

GIVEN: dict[str, Any] = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "moe_aux_loss_coeff": 0.01,
    "sequence_parallel": True,
    "recompute_granularity": "selective",
    "recompute_modules": ["mlp", "layernorm"],
    "additional_configs": {"batch_p2p_sync": False},
}
TRAINING: dict[str, Any] = {
    **GIVEN,
    "use_cpu": True,
    "use_distributed_optimizer": True,
    "learning_rate": 0.001,
}
ONLY_EVALUATION: dict[str, Any] = {"logging_strategy": "no", "eval_strategy": "steps"}
BEST: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps"}
CLASSES = [
    (DistributingParallelArguments, GIVEN),
    (MegatronArguments, GIVEN),
    (TrainingArguments, TRAINING),
    (Seq2SeqTrainingArguments, TRAINING),
]


def flags(given: dict[str, Any], separator: str) -> list[str]:
    words: list[str] = []
    for name, value in given.items():
        words.append("--" + name.replace("_", separator))
        if isinstance(value, list):
            words += value
        elif value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


@pytest.mark.parametrize(("cls", "given"), CLASSES, ids=[cls.__name__ for cls, _ in CLASSES])
def test_every_way_of_parsing_gives_the_same(cls: type, given: dict[str, Any], tmp_path: Path) -> None:
    as_json, as_yaml = tmp_path / "args.json", tmp_path / "args.yaml"
    as_json.write_text(json.dumps(given))
    as_yaml.write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in given.items()))
    parser = HfArgumentParser(cls)
    parsed = [
        parser.parse_args_into_dataclasses(flags(given, "_"), look_for_args_file=False)[0],
        parser.parse_args_into_dataclasses(flags(given, "-"), look_for_args_file=False)[0],
        parser.parse_dict(given)[0],
        parser.parse_json_file(as_json)[0],
        parser.parse_yaml_file(as_yaml)[0],
    ]
    for args in parsed:
        assert {name: getattr(args, name) for name in given} == given
        assert args.layout().tp == args.layout().pp == 2


@pytest.mark.parametrize("cls", [cls for cls, _ in CLASSES])
def test_no_flags_change_nothing(cls: Any) -> None:
    (args,) = HfArgumentParser(cls).parse_args_into_dataclasses([], look_for_args_file=False)
    declared = MegatronArguments() if isinstance(args, MegatronArguments) else DistributingParallelArguments()
    names = {field.name for field in dataclasses.fields(declared)} - {"optimizer"}
    assert {name: getattr(args, name) for name in names} == {name: getattr(declared, name) for name in names}


def test_a_switch_can_be_turned_off() -> None:
    parser = HfArgumentParser(MegatronArguments)
    words = ["--moe_grouped_gemm", "false", "--bias_dropout_fusion"]
    (args,) = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    assert (args.moe_grouped_gemm, args.bias_dropout_fusion, args.apply_rope_fusion) == (False, True, None)


def test_an_unknown_flag_or_key_is_an_error() -> None:
    parser = HfArgumentParser(TrainingArguments)
    with pytest.raises(ValueError, match="--no_such_flag"):
        parser.parse_args_into_dataclasses(["--no_such_flag", "1"], look_for_args_file=False)
    with pytest.raises(ValueError, match="no_such_key"):
        parser.parse_dict({"no_such_key": 1})


def training(**given: Any) -> TrainingArguments:
    return TrainingArguments(use_cpu=True, **given)


def test_the_three_levels_are_one_hierarchy() -> None:
    args = training()
    assert isinstance(args, MegatronArguments) and isinstance(args, DistributingParallelArguments)
    assert isinstance(args, transformers.TrainingArguments)
    assert isinstance(Seq2SeqTrainingArguments(use_cpu=True), transformers.Seq2SeqTrainingArguments)


def test_bf16_accumulates_gradients_in_fp32_unless_told_not_to() -> None:
    assert training(bf16=True).ddp_config_overrides() == {"grad_reduce_in_fp32": True}
    assert (
        training(bf16=True, accumulate_allreduce_grads_in_fp32=False).accumulate_allreduce_grads_in_fp32
        is False
    )
    assert training().accumulate_allreduce_grads_in_fp32 is None


FOLLOWED = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
warmup_steps optim weight_decay adam_beta1 adam_beta2 adam_epsilon gradient_accumulation_steps max_grad_norm
label_smoothing_factor bf16 fp16 tf32 activation_checkpointing gradient_checkpointing logging_strategy logging_steps
logging_first_step include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project
trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay
per_device_eval_batch_size eval_on_start save_only_model save_strategy save_steps save_total_limit
load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor train_sampling_strategy
ddp_backend ddp_timeout do_train do_eval resume_from_checkpoint
"""
"""Fields of transformers that a run follows, or whose values are looked at."""


def test_every_field_of_the_installed_transformers_is_known() -> None:
    there = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    known = {*FOLLOWED.split(), *IGNORED}
    assert there <= known | {*REFUSED, *_ON}, "say what a run does with it"
    assert not known & REFUSED.keys()


def test_settings_that_are_all_off_are_not_refused() -> None:
    args = training()
    args.fsdp_config = {"min_num_params": 0, "xla": False}  # as transformers 5.2 fills it by itself
    assert not hf_problems(args)
    args.fsdp_config["xla"] = True
    assert [line.partition(" ")[0] for line in hf_problems(args)] == ["fsdp_config"]


@pytest.mark.parametrize("name", ["warmup_ratio", "logging_dir"])
def test_what_has_left_transformers_is_refused_where_it_is_still_a_field(name: str) -> None:
    args = training()
    setattr(args, name, 0.5)
    assert [line for line in hf_problems(args) if line.startswith(f"{name} is not supported")]


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_recomputes_every_layer(name: str) -> None:
    if name not in {field.name for field in dataclasses.fields(transformers.TrainingArguments)}:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    args = training(**{name: True})
    assert args.transformer_config_overrides() == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    assert not args.gradient_checkpointing
    assert training(**{name: True}, recompute_granularity="selective").recompute_method is None


def test_full_determinism_is_asked_of_megatron_too() -> None:
    assert training(full_determinism=True).transformer_config_overrides() == {"deterministic_mode": True}
    assert training().deterministic_mode is None


def test_optim_chooses_the_optimizer() -> None:
    assert training().optimizer == "adam"
    assert training(optim="adamw_torch").optimizer == "adam"
    assert training(optim="sgd").optimizer == "sgd"
    assert training(optim="adafactor", optimizer="muon").optimizer == "muon"
    for name in ("adafactor", "adamw_torch_8bit", "adamw_torch_4bit"):
        with pytest.raises(McaError, match=f"optim {name} is not supported by Megatron"):
            training(optim=name)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bf16": True, "fp16": True}, "bf16 excludes fp16"),
        (
            {"full_determinism": True, "deterministic_mode": False},
            "full_determinism needs deterministic_mode",
        ),
        ({"deepspeed": "ds.json"}, "deepspeed is not supported"),
        ({"fsdp": "full_shard"}, "fsdp is not supported"),
        ({"torch_compile": True}, "torch_compile is not supported"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is not supported"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1"),
        ({"overlap_param_gather": True}, "overlap_param_gather needs"),
        ({"torch_compile_backend": "inductor"}, "torch_compile_backend is not supported"),
        ({"torch_compile_mode": "default"}, "torch_compile_mode is not supported"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is not supported"),
        ({"push_to_hub": True}, "push_to_hub is not supported"),
        ({"accelerator_config": {"split_batches": True}}, r"accelerator_config \(split_batches\) is not"),
        ({"accelerator_config": '{"even_batches": false}'}, r"accelerator_config \(even_batches\) is not"),
        ({"accelerator_config": "accelerate.json"}, r"accelerator_config \(accelerate.json\) is not"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices cannot be off"),
        ({"skip_memory_metrics": False}, "skip_memory_metrics cannot be off"),
        ({"debug": "underflow_overflow"}, "debug is not supported"),
        ({"ddp_bucket_cap_mb": 25}, "ddp_bucket_cap_mb is not supported .*ddp_bucket_size"),
        ({"save_on_each_node": True}, "save_on_each_node is not supported"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint is not supported"),
        ({"do_predict": True}, "do_predict is not supported"),
        ({"label_names": ["x"]}, "label_names is not supported"),
        ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers is not supported"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy group_by_length is not"),
        ({"learning_rate": 1e38}, r"learning_rate must be at most 1e\+30, not 1e\+38"),
        ({"decoupled_lr": 1e38}, r"decoupled_lr must be at most 1e\+30"),
        ({"min_lr": 1.0}, "min_lr 1.0 is above learning_rate 5e-05; lower it"),
        ({"decoupled_min_lr": 1e-4}, "decoupled_min_lr needs decoupled_lr"),
        (
            {"decoupled_lr": 1e-4, "learning_rate": 0.0},
            "decoupled_lr follows the schedule of learning_rate",
        ),
        (
            {"projector_learning_rate": 1e-3, "learning_rate": 0.0},
            "projector_learning_rate follows the schedule of learning_rate",
        ),
        (
            {"decoupled_lr": 1e-6, "min_lr": 1e-5},
            "min_lr 1e-05 is above decoupled_lr 1e-06; set decoupled_min_lr",
        ),
        (
            {"decoupled_lr": 1e-6, "decoupled_min_lr": 1e-5},
            "decoupled_min_lr 1e-05 is above decoupled_lr 1e-06",
        ),
        ({"initial_loss_scale": 8.0}, "initial_loss_scale needs fp16"),
        ({"fp16": True, "optimizer": "muon"}, "optimizer muon excludes fp16"),
        ({"fp16": True, "check_for_nan_in_grad": True}, "check_for_nan_in_grad with fp16 needs loss_scale"),
        ({"bf16": True, "loss_scale": 8.0}, "loss_scale needs fp16"),
        ({"log_level": "loud"}, "log_level is 'loud'; expected one of detail, debug"),
        ({"log_level_replica": "foo"}, "log_level_replica is 'foo'"),
        ({"report_to": "foo"}, "report_to is 'foo'; expected none, all or some of"),
    ],
)
def test_what_megatron_cannot_is_refused_before_anything_starts(given: dict[str, Any], words: str) -> None:
    with pytest.raises(McaError, match=words):
        training(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -0.1),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("adam_beta1", -0.5),
        ("adam_beta2", 1.5),
        ("adam_epsilon", -1.0),
        ("weight_decay", -1.0),
        ("max_grad_norm", -1.0),
        ("min_lr", -1.0),
        ("warmup_steps", -1),
        ("label_smoothing_factor", 1.5),
        ("num_train_epochs", 0.0),
        ("num_train_epochs", -2.0),
        ("dataloader_num_workers", -1),
        ("save_steps", -1),
        ("initial_loss_scale", 0.0),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_numbers_that_mean_nothing_are_refused(name: str, value: float) -> None:
    with pytest.raises(McaError, match=f"arguments: {name} must be .*, not {value}"):
        training(**{name: value}, fp16="loss_scale" in name)


def test_a_package_that_reports_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.integrations, "get_available_reporting_integrations", lambda: ["mlflow"])
    with pytest.raises(McaError, match="report_to wandb needs the package wandb, which is not installed"):
        training(report_to=["mlflow", "wandb"])


@pytest.mark.parametrize(
    "given",
    [
        {"max_steps": 5, "num_train_epochs": 0},
        {"max_grad_norm": 0.0, "learning_rate": 0.0, "adam_epsilon": 0.0},
        {"ddp_find_unused_parameters": False},
        {"accelerator_config": {"split_batches": False}},
        {"report_to": "none", "log_level": "debug"},
    ],
)
def test_what_says_what_is_done_anyway_is_accepted(given: dict[str, Any]) -> None:
    training(**given)


@pytest.mark.parametrize(
    ("pp", "group", "steps", "fits"),
    [
        (2, None, 1, False),
        (2, None, 2, True),
        (2, None, 3, False),
        (4, None, 8, True),
        (2, 3, 5, True),
        (2, 3, 4, False),
    ],
)
def test_virtual_pipelining_wants_enough_micro_batches(
    pp: int, group: int | None, steps: int, fits: bool
) -> None:
    given = {
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": 2,
        "microbatch_group_size_per_vp_stage": group,
        "gradient_accumulation_steps": steps,
    }
    if fits:
        training(**given)
        return
    with pytest.raises(McaError, match=f"gradient_accumulation_steps {steps} must be at least"):
        training(**given)


def test_a_layout_string_counts_as_virtual_pipelining() -> None:
    given = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|t|tL"}
    with pytest.raises(McaError, match="gradient_accumulation_steps 1"):
        training(**given)
    assert training(**given, gradient_accumulation_steps=2).layout().vpp == 2


def test_batch_sizes_count_replicas_not_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    args = training(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=5,
        per_device_eval_batch_size=4,
    )
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 16)
    assert args.data_parallel_size == 4
    assert args.global_train_batch_size == 3 * 5 * 4
    assert args.global_eval_batch_size == 16
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 6)
    with pytest.raises(McaError, match="6 ranks"):
        args.data_parallel_size  # noqa: B018


def test_a_process_drives_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    args = training(per_device_train_batch_size=3)
    args._n_gpu = 8
    assert args.n_gpu == 1
    assert args.train_batch_size == 3


def test_arguments_survive_a_dict_and_a_copy() -> None:
    args = training(**GIVEN, bf16=True, optim="sgd")
    again = TrainingArguments(**args.to_dict())
    assert {name: getattr(again, name) for name in GIVEN} == GIVEN
    assert again.optimizer == "sgd"
    assert json.loads(args.to_json_string())["tensor_model_parallel_size"] == 2
    assert dataclasses.replace(args, seed=1).layout() == args.layout()


@pytest.mark.parametrize("as_json", [False, True])
def test_only_text_of_numbers_in_lr_scheduler_kwargs_becomes_numbers(as_json: bool, tmp_path: Path) -> None:
    given = {
        "min_lr": "1e-6",
        "num": "-4",
        "power": " .5",
        "list": ["2e-1"],
        "decay_type": "1-sqrt",
        "on": True,
    }
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, lr_scheduler_kwargs=json.dumps(given) if as_json else given
    )
    expected = {"min_lr": 1e-6, "num": -4, "power": 0.5, "list": [0.2], "decay_type": "1-sqrt", "on": True}
    assert args.lr_scheduler_kwargs == expected
    assert given["min_lr"] == "1e-6", "the caller's mapping is unchanged"


def test_secrets_do_not_print() -> None:
    assert "secret" not in repr(training(hub_token="secret"))
    assert "tensor_model_parallel_size=None" in repr(training())


@pytest.mark.parametrize(
    ("metric", "given", "greater"),
    [
        ("mean_absolute_error", None, False),
        ("eval_kl", None, False),
        ("eval_held_out_mean_absolute_error", None, False),
        ("rewards/margins", None, True),
        ("eval_held_out_loss", None, False),
        ("bleu", None, True),  # not mca's: as Hugging Face has it
        ("mean_absolute_error", True, True),
        ("accuracy", False, False),
    ],
)
def test_which_model_is_the_best_one(metric: str, given: bool | None, greater: bool, tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=tmp_path, metric_for_best_model=metric, greater_is_better=given)
    assert args.greater_is_better is greater


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logging_steps": 2.5}, "logging_steps must be a whole number or below 1, not 2.5"),
        ({"logging_steps": 0}, "logging_steps must be above 0 with logging_strategy steps, not 0"),
        ({"save_steps": 1.5}, "save_steps must be a whole number or below 1, not 1.5"),
        ({"eval_strategy": "steps", "eval_steps": 2.5}, "eval_steps must be a whole number or below 1"),
        ({"lr_scheduler_type": "greedy"}, "greedy follows the evaluation loss, but eval_strategy is no"),
        ({"dataloader_prefetch_factor": 2}, "needs dataloader_num_workers above 0"),
        ({"load_best_model_at_end": True}, "is true, but eval_strategy is no; set it"),
        (BEST | {"save_strategy": "epoch"}, "set save_strategy to steps or best"),
        (
            BEST | {"eval_steps": 3, "save_steps": 4},
            "save_steps is 4, but load_best_model_at_end needs a multiple",
        ),
        (BEST | {"logging_steps": 3, "save_steps": 4}, "needs a multiple of logging_steps (3)"),
        (
            BEST | {"eval_steps": 0.1, "save_steps": 4},
            "save_steps is 4 and eval_steps 0.1, one a number of steps",
        ),
        (ONLY_EVALUATION | {"logging_steps": 0}, "above 0 with eval_strategy steps, not 0; set eval_steps"),
        (
            ONLY_EVALUATION | {"logging_steps": 2.5},
            "logging_steps must be a whole number or below 1, not 2.5",
        ),
        (BEST | {"eval_steps": 0.1, "save_steps": 0.25}, "needs a multiple of eval_steps (0.1)"),
    ],
)
def test_contradictions_of_intervals_are_named_with_the_fix(given, message, tmp_path):
    with pytest.raises(McaError) as caught:
        TrainingArguments(output_dir=str(tmp_path), **given)
    assert message in str(caught.value)
    with pytest.raises(ValueError):  # Hugging Face rejects them too
        transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (BEST | {"eval_steps": 5, "save_steps": 0}, "save_steps is 0, so no checkpoint is written"),
        (BEST | {"save_steps": float("inf")}, "save_steps must be at least 0, not inf"),
        ({"eval_strategy": "steps", "eval_steps": float("inf")}, "eval_steps must be at least 0, not inf"),
    ],
)
def test_intervals_without_an_end_or_a_checkpoint_are_rejected(given, message, tmp_path):
    with pytest.raises(McaError) as caught:
        TrainingArguments(output_dir=str(tmp_path), **given)
    assert message in str(caught.value)


def test_the_best_model_needs_a_metric(tmp_path):
    with pytest.raises(McaError, match="save_strategy best needs metric_for_best_model; set it"):
        TrainingArguments(output_dir=str(tmp_path), save_strategy="best", eval_strategy="epoch")
    for given in ({"load_best_model_at_end": True}, {"lr_scheduler_type": "reduce_lr_on_plateau"}):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), save_strategy="best", eval_strategy="epoch", **given
        )
        assert arguments.metric_for_best_model == "loss"


@pytest.mark.parametrize(
    "given",
    [
        BEST | {"eval_steps": 0.1, "save_steps": 0.3},
        BEST | {"eval_steps": 2, "save_steps": 4},
        BEST | {"eval_strategy": "epoch", "save_strategy": "best"},
        BEST | {"eval_strategy": "epoch", "save_strategy": "epoch", "save_steps": 7},
        {"load_best_model_at_end": True, "save_strategy": "no"},
        {"logging_strategy": "no", "logging_steps": 0},
        {"eval_steps": 2.5},
    ],
)
def test_intervals_that_hugging_face_accepts_are_accepted(given, tmp_path):
    TrainingArguments(output_dir=str(tmp_path), **given)
    transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)
