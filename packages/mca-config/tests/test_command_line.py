"""Dataclasses as flags of commands without transformers."""

import argparse

import pytest

from mca_config import DistributingParallelArguments, MegatronArguments
from mca_config.errors import UsageError
from mca_config.parser import Parser, add_arguments, add_flag, add_operands, from_namespace
from mca_config.printable import first_line, fit_choices
from mca_config.program import Command, Program


def parse(*words: str, cls: type = DistributingParallelArguments) -> object:
    parser = Parser("tool")
    add_arguments(parser, cls)
    return from_namespace(cls, parser.read(words))


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
        additional_configs={"batch_p2p_sync": False},
    )
    words = (
        "--tensor_model_parallel_size 2 --pipeline_model_parallel_layout Et|tL --pipeline_model_parallel_size 2 "
        "--moe_grouped_gemm --bias_dropout_fusion false --moe_aux_loss_coeff 0.5 "
        '--recompute_granularity selective --recompute_modules mlp moe --additional_configs {"batch_p2p_sync":false}'
    ).split()
    assert parse(*words) == expected
    assert parse(*(word.replace("_", "-") if word.startswith("--") else word for word in words)) == expected


def test_a_parser_of_another_program_takes_both_spellings_too() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, DistributingParallelArguments)
    for flag in ("--tensor_model_parallel_size", "--tensor-model-parallel-size"):
        found = from_namespace(DistributingParallelArguments, parser.parse_args([flag, "2"]))
        assert found.tensor_model_parallel_size == 2


def test_absent_flags_leave_the_defaults() -> None:
    assert parse(cls=MegatronArguments) == MegatronArguments()


def test_some_of_the_flags_can_be_chosen() -> None:
    parser = Parser("tool")
    add_arguments(parser, DistributingParallelArguments, ["tensor_model_parallel_size"])
    assert parser.read(["--tensor-model-parallel-size", "4"]).tensor_model_parallel_size == 4
    assert "--fp8" not in parser.format_help()


@pytest.mark.parametrize(
    "words", [["--tensor_model_parallel_size", "x"], ["--fp8", "e5"], ["--moe_grouped_gemm", "maybe"]]
)
def test_a_wrong_value_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(*words)


def test_help_prints_for_every_flag() -> None:
    parser = Parser("tool")
    add_arguments(parser, MegatronArguments)
    assert "--use_distributed_optimizer" in parser.format_help()


def a_parser() -> Parser:
    parser = Parser("tool make", hint=lambda name: "; it is for the kitchen" if name == "salt" else "")
    parser.add_argument("path", metavar="PATH")
    add_flag(parser, "out_path", required=True)
    add_flag(parser, "count", hint=int)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--wet", action="store_true")
    choice.add_argument("--dry", action="store_true")
    return parser


@pytest.mark.parametrize(("words", "message"), [
    ("--out_pth a", "unknown flag --out_pth; did you mean --out_path?"),
    ("--out-pth a", "unknown flag --out_pth; did you mean --out_path?"),
    ("--xyzzy", "unknown flag --xyzzy; tool make --help lists the flags"),
    ("--salt 1", "unknown flag --salt; it is for the kitchen"),
    ("p -oup a", "unknown flag -oup; tool make --help lists the flags"),
    ("--out_pth a --cont 2", "2 problems\n  unknown flag --out_pth; did you mean --out_path?\n  unknown flag --cont"),
    ("--out-path a --out_path=b p", "--out_path is given twice"),
    ("p", "missing --out_path; see tool make --help"),
    ("--out_path a", "missing PATH; see tool make --help"),
    ("p q --out_path a", "unexpected argument 'q'; see tool make --help"),
    ("p --out_path a --count x", "--count must be an integer, not 'x'; see tool make --help"),
    ("p --out_path a --count", "--count needs a value; see"),
    ("p --out_path a --wet=1", "--wet takes no value, not '1'; see"),
    ("p --out_path a --wet --dry", "--dry excludes --wet; see"),
])  # fmt: skip
def test_wrong_words_are_answered_with_what_to_change(words: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        a_parser().read(words.split())
    assert message in str(raised.value)


def test_a_value_of_several_words_may_begin_with_a_hyphen() -> None:
    assert a_parser().read(["p", "--out_path", "-a b"]).out_path == "-a b"


def test_words_of_other_flags_are_left_over() -> None:
    parser = Parser("tool")
    add_operands(parser)
    add_flag(parser, "out_path")
    found, others = parser.read_known("run.yaml --rate 1 --out-path a --names x y".split())
    assert (found.operands, found.out_path) == (["run.yaml"], "a")
    assert others == "--rate 1 --names x y".split()


def a_program(default: str = "") -> Program:
    make = Command(
        usage="FILE", summary="makes it", text="Makes it.", flags=add_operands, examples=("make a",)
    )
    return Program(name="mca-config", text="A tool.", commands={"make": make, "burn": make}, default=default)


def test_a_program_answers_for_its_commands() -> None:
    program = a_program()
    general = program.help()
    assert program.answer([]) == program.answer(["--help"]) == program.answer(["brn", "-h"]) == general
    assert "usage: mca-config make|burn FILE\n\n" in general and "  make  makes it\n" in general
    own = program.answer(["make", "x", "--help"])
    assert own is not None and own.startswith("usage: mca-config make FILE\n\nMakes it.\n")
    assert own.endswith("examples:\n  mca-config make a\n")
    assert program.answer(["--version"]) == program.answer(["make", "-V"]) == "mca-config 0.1.0\n"
    assert program.find_command(["make", "-x"]) == ("make", ["-x"])
    assert a_program("make").find_command(["--x"]) == ("make", ["--x"])


@pytest.mark.parametrize(("word", "message"), [
    ("mak", "unknown command 'mak'; did you mean 'make'?"),
    ("xyzzy", "unknown command 'xyzzy'; see mca-config --help"),
    ("--hepl", "unknown flag --hepl; did you mean --help?"),
])  # fmt: skip
def test_an_unknown_command_is_answered_with_the_one_that_was_meant(word: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        a_program().find_command([word])
    assert str(raised.value) == message


LINES = [
    ("Short text. Second sentence.", "", "Short text. Second sentence."),
    ("First. " + "X" * 200, "", "First."),
    ("First. " + "X" * 105, "", "First. " + "X" * 105),  # 112 characters, the columns of 120 after the indent
    ("First. " + "X" * 106, "", "First."),
    ("First. " + "X" * 105, " (default: 1)", "First. (default: 1)"),
    ("word " * 30, " (default: 1)", "word " * 19 + "... (default: 1)"),
]


@pytest.mark.parametrize(("text", "ending", "line"), LINES)
def test_the_line_of_a_help_has_the_sentences_that_fit(text: str, ending: str, line: str) -> None:
    assert first_line(text, ending) == line


@pytest.mark.parametrize(
    ("column", "shown"), [(107, "{abc,def,ghi}"), (108, "{abc,...}"), (111, "{abc,...}")]
)
def test_choices_that_do_not_fit_in_a_line_of_a_help_are_left_out(column: int, shown: str) -> None:
    assert fit_choices("{abc,def,ghi}", column) == shown
