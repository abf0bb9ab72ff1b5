import inspect
from types import SimpleNamespace

import pytest

from mca_config import TrainingArguments
from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_train.config import early_arguments
from mca_train.trainer import rules
from mca_train.trainer.rules import RULES, TrainerSetup, check, require_no_upload
from mca_train.trainer.trainer import McaTrainer


def reject_unsupported(arguments, given, kind=McaTrainer, model=None, dataset=None):
    """Check a trainer of a small language model in fp32."""
    head = SimpleNamespace(num_labels=None)
    subject = TrainerSetup(
        model=model
        or SimpleNamespace(
            chunks=[],
            args=arguments,
            config=SimpleNamespace(dtype="float32", head=head, layout=ParallelLayout()),
            reject_hidden_adapter=lambda: None,
        ),
        args=arguments,
        trainer=object.__new__(kind),
        base=McaTrainer,
        parameters=given,
        train_dataset=dataset,
    )
    check(subject, RULES)


@pytest.fixture
def arguments(tmp_path):
    from mca_config import TrainingArguments

    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True)


def test_what_is_not_followed_is_refused_all_at_once(arguments):
    given = {"compute_metrics": print, "model_init": print, "optimizers": None}
    with pytest.raises(McaError) as error:
        reject_unsupported(arguments, given)
    for word in ("compute_metrics", "model_init"):
        assert word in str(error.value)
    assert "optimizers" not in str(error.value)


def test_problems_of_several_rules_are_one_error(arguments, monkeypatch):
    """Without any one line of the table, its text is missing."""
    monkeypatch.setattr(
        early_arguments, "find_spec", lambda _: None
    )  # a new Megatron has Muon where its package is installed
    output = arguments.output_dir
    arguments = TrainingArguments(
        output_dir=output,
        use_cpu=True,
        label_smoothing_factor=0.1,
        optimizer="muon",
        tensor_model_parallel_size=2,
        lr_scheduler_kwargs={"bad": 1},
    )

    class Mine(McaTrainer):
        wants_logits = True

        def create_scheduler(self):
            return None

    other = TrainingArguments(output_dir=output, use_cpu=True)
    model = SimpleNamespace(
        chunks=[],
        args=other,
        config=SimpleNamespace(
            dtype="float16", head=SimpleNamespace(num_labels=None), layout=ParallelLayout()
        ),
        reject_hidden_adapter=lambda: None,
    )
    with pytest.raises(McaError) as error:
        reject_unsupported(arguments, {"model_init": print}, Mine, model, iter([]))
    for text in (
        "model_init is not supported",
        "Mine overrides create_scheduler",
        "tensor_model_parallel_size 2 (the model has 1)",
        "optimizer muon needs",
        "with lr_scheduler_kwargs {",
        "label_smoothing_factor is not supported with wants_logits",
        "train_dataset is a stream",
    ):
        assert sum(text in problem for problem in error.value.problems) == 1, (text, error.value.problems)


def test_methods_that_are_never_called_are_refused(arguments):
    class Mine(McaTrainer):
        def get_train_dataloader(self):
            return []

        def create_optimizer(self):
            return None

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return 0.0

    with pytest.raises(McaError) as error:
        reject_unsupported(arguments, {}, Mine)
    reported = str(error.value)
    assert (
        "Mine overrides get_train_dataloader, which is never called (pass the samples as train_dataset"
        in reported
    )
    assert "Mine overrides create_optimizer, which is never called (the optimizer is Megatron's" in reported
    assert (
        "Mine.compute_loss has Hugging Face's parameters (it is compute_loss(self, output, batch)" in reported
    )


@pytest.mark.parametrize(
    "name",
    [
        "_clip_grad_norm",
        "_get_num_items_in_batch",
        "_inner_training_loop",
        "_load_best_model",
        "_load_from_checkpoint",
        "_maybe_log_save_evaluate",
        "_prepare_input",
        "_save",
        "compute_loss_context_manager",
    ],
)
def test_steps_of_the_loop_of_hugging_face_are_refused(arguments, name):
    assert hasattr(McaTrainer, name), "a method of Hugging Face"
    kind = type("Mine", (McaTrainer,), {name: lambda self, *values, **options: None})
    with pytest.raises(McaError, match=f"Mine overrides {name}, which is never called .(override|set|read) "):
        reject_unsupported(arguments, {}, kind)


@pytest.mark.parametrize("value", ["end", "checkpoint", "false"])
def test_wandb_is_not_given_a_model_without_weights(value, monkeypatch):
    from transformers.integrations.integration_utils import WandbLogModel

    class WandbCallback:
        _log_model = WandbLogModel(value)

    if value == "false":
        require_no_upload([WandbCallback()])
        return
    with pytest.raises(McaError, match="WANDB_LOG_MODEL: WandbCallback would upload a model without weights"):
        require_no_upload([WandbCallback()])


@pytest.mark.parametrize("value", [True, False, None])
def test_dvclive_is_not_given_a_model_without_weights(value):
    other, callback = (type(name, (), {"_log_model": value}) for name in ("OtherCallback", "DVCLiveCallback"))
    require_no_upload([other(), type("DVCLiveCallback", (), {})()])
    if not value:
        require_no_upload([callback()])
        return
    with pytest.raises(McaError, match="HF_DVCLIVE_LOG_MODEL: DVCLiveCallback would upload a model without"):
        require_no_upload([other(), callback()])


def test_a_misspelt_keyword_of_train_is_an_error():
    with pytest.raises(TypeError, match="resume_from_checkpont"):
        object.__new__(McaTrainer).train(resume_from_checkpont="runs/checkpoint-2")


def test_a_cpu_beside_a_gpu_is_asked_for_elsewhere(arguments, monkeypatch):
    from mca_train.run.train import _without_device

    monkeypatch.setattr(rules.platform, "device_type", lambda: "cuda")
    for ask in (lambda: reject_unsupported(arguments, {}), lambda: _without_device({"use_cpu": True})):
        with pytest.raises(
            McaError, match=r"use_cpu is not supported with a GPU: .* set MCA_DEVICE=cpu in the environment"
        ):
            ask()
    assert _without_device({}) == {"use_cpu": True}, "of the process that starts ranks"


def test_defaults_of_the_training_arguments_pass(arguments):
    reject_unsupported(arguments, {})


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (
            {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True},
            "needs Transformer Engine's Adam",
        ),
        ({"optimizer": "muon"}, "optimizer muon needs .* Python 3.12"),
    ],
)
def test_an_optimizer_that_cannot_be_built_here_is_refused_before_training(
    wish, reason, tmp_path, monkeypatch
):
    from mca_config import TrainingArguments

    monkeypatch.setattr(early_arguments, "find_spec", lambda _: None)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **wish)
    with pytest.raises(McaError, match=reason):
        reject_unsupported(args, {})


@pytest.mark.parametrize(
    ("version", "refused"), [("0.16.1", True), ("0.17.1", True), ("0.18.2rc1", True), ("0.19.0", False)]
)
def test_muon_needs_a_megatron_that_splits_each_layer_by_its_own_heads(
    version, refused, tmp_path, monkeypatch
):
    from mca_config import TrainingArguments

    monkeypatch.setattr(early_arguments, "find_spec", lambda _: object())
    monkeypatch.setattr(early_arguments, "version", lambda _: version)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, optimizer="muon")
    assert ["needs megatron-core 0.19" in line for line in early_arguments.optimizer_problems(args)] == [
        True
    ] * refused


def test_offloading_is_a_precision_aware_optimizer(tmp_path):
    from mca_config import TrainingArguments

    wish = {
        "use_precision_aware_optimizer": True,
        "use_distributed_optimizer": True,
        "optimizer_cpu_offload": True,
    }
    reject_unsupported(TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **wish), {})


def test_parameters_of_hugging_face_are_named_one_by_one():
    parameters = inspect.signature(McaTrainer).parameters
    assert {*rules._PARAMETERS} < {*parameters}
    assert all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    with pytest.raises(TypeError, match="'modle'"):
        McaTrainer(modle=1)


@pytest.mark.parametrize(("given", "scale"), [({}, 65536), ({"initial_loss_scale": 1024.0}, 1024)])
def test_fp16_starts_at_hugging_faces_loss_scale(given, scale, tmp_path):
    import torch

    from mca_config import TrainingArguments
    from mca_train.engine.optimizer import optimizer_settings

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, fp16=True, **given)
    assert optimizer_settings(args, torch.float16)["initial_loss_scale"] == scale


def test_masters_are_whole_whatever_holds_them(tmp_path):
    """Remainders beside weights in bf16 would go into a checkpoint in the place of fp32 weights."""
    import torch

    from mca_config import TrainingArguments
    from mca_train.engine.optimizer import optimizer_settings

    precise = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=True, **precise)
    assert optimizer_settings(args, torch.bfloat16)["store_param_remainders"] is False


def test_values_of_a_later_dataset_are_not_taken_for_kept_log_probabilities():
    from mca_train import DpoTrainer

    trainer = object.__new__(DpoTrainer)
    trainer._precomputes, trainer._reference = True, None
    for later in ([{"chosen_values": [0.5]}], {"some": [{}]}):
        with pytest.raises(McaError, match="this dataset did not exist when the trainer was created"):
            trainer.evaluate(later)
    trainer.train_dataset = [{"chosen_values": [0.5]}]
    with pytest.raises(McaError, match="create a new trainer with it as train_dataset"):
        trainer.before_training()
