"""Output of ``mca-train plan`` for kinds of runs and their own keys."""

import json

import pytest

from mca_train.cli import main

pytestmark = pytest.mark.usefixtures("own_threads")


def test_kto_with_one_sample_in_a_step_is_refused_before_anything_is_read(run, capsys):
    path = run(per_device_train_batch_size=1)
    assert main(["plan", "kto", path]) == 2
    said = "kto needs other samples in a step for the KL estimate, but a step has one sample"
    assert said in capsys.readouterr().out
    assert main(["kto", path]) == 2
    assert said in capsys.readouterr().err
    for words in (["--gpus", "2"], ["--gradient_accumulation_steps", "2"]):
        assert main(["plan", "kto", path, *words]) == 0
        capsys.readouterr()


def test_a_reference_that_is_computed_first_is_planned_beside_the_weights_alone(run, tmp_path, capsys):
    def stage(**changes):
        path = run(per_device_eval_batch_size=1, gradient_accumulation_steps=2, **changes)
        assert main(["plan", "dpo", path, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["stages"]
        return found

    named = {"reference_model_name_or_path": str(tmp_path / "model")}
    held, first = stage(**named), stage(**named, precompute_ref_log_probs=True)
    assert first["reference"] == 0 < held["reference"] < first["beforehand"]
    assert first["total"] == held["total"] - held["reference"]
    adapted = named | {"precompute_ref_log_probs": True, "lora_rank": 1, "seq_length": 2}
    of_adapter = stage(**adapted, per_device_train_batch_size=1)
    assert of_adapter["total"] == of_adapter["weights"] + of_adapter["beforehand"]
    assert main(["plan", "dpo", run(**adapted)]) == 0
    assert "beforehand   precompute_ref_log_probs" in capsys.readouterr().out


def test_sgd_keeps_a_number_of_a_parameter_with_momentum_alone(run, capsys):
    for changes, numbers in (
        ({}, 2),
        ({"optimizer": "sgd"}, 0),
        ({"optimizer": "sgd", "sgd_momentum": 0.9}, 1),
    ):
        assert main(["plan", "sft", run(**changes), "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["stages"]
        assert found["optimizer"] == 4 * numbers * found["parameters"]
