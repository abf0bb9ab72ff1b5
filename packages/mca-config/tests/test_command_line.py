"""Flags of argparse for commands without transformers."""

import argparse

import pytest

from mca_config import DistributingParallelArguments, MegatronArguments
from mca_config.command_line import add_arguments, from_namespace


def parse(*words: str, cls: type = DistributingParallelArguments) -> object:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, cls)
    return from_namespace(cls, parser.parse_args(words))


def test_flags_read_with_underscores_and_hyphens() -> None:
    expected = DistributingParallelArguments(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_layout="Et|tL",
        pipeline_model_parallel_size=2,
        moe_grouped_gemm=True,
        bias_dropout_fusion=False,
        moe_aux_loss_coeff=0.5,
        recompute_granularity="selective",
        recompute_modules=["mlp", "moe"],
        additional_configs={"softmax_scale": 0.1},
    )
    words = (
        "--tensor_model_parallel_size 2 --pipeline_model_parallel_layout Et|tL --pipeline_model_parallel_size 2 "
        "--moe_grouped_gemm --bias_dropout_fusion false --moe_aux_loss_coeff 0.5 "
        '--recompute_granularity selective --recompute_modules mlp moe --additional_configs {"softmax_scale":0.1}'
    ).split()
    assert parse(*words) == expected
    assert parse(*(word.replace("_", "-") if word.startswith("--") else word for word in words)) == expected


def test_absent_flags_leave_the_defaults() -> None:
    assert parse(cls=MegatronArguments) == MegatronArguments()


def test_some_of_the_flags_can_be_chosen() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, DistributingParallelArguments, ["tensor_model_parallel_size"])
    assert parser.parse_args(["--tensor-model-parallel-size", "4"]).tensor_model_parallel_size == 4
    assert "--fp8" not in parser.format_help()


@pytest.mark.parametrize(
    "words", [["--tensor_model_parallel_size", "x"], ["--fp8", "e5"], ["--moe_grouped_gemm", "maybe"]]
)
def test_a_wrong_value_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(argparse.ArgumentError):
        parse(*words)


def test_help_prints_for_every_flag() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, MegatronArguments)
    assert "--use-distributed-optimizer" in parser.format_help()
