import errno
import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest

from mca_config.errors import UsageError
from mca_config.fields import build, cast
from mca_config.printable import suggestion
from mca_train.run.settings import parse_overrides, read_yaml


class Strategy(Enum):
    NO = "no"
    STEPS = "steps"


@dataclass
class Example:
    name: str
    rate: float = 0.1
    steps: int = 1
    fast: bool = False
    files: list[str] = field(default_factory=list)
    kind: Literal["a", "b"] | None = None
    ratio: float | str = 1.0
    when: Strategy | str = "no"


def make(values):
    def unknown(key, known):
        return f"unknown key '{key}'{suggestion(key, known, 'the manual lists them')}"

    return build([Example], values, where="c.yaml", unknown=unknown)[0]


def test_values_take_the_types_of_their_fields():
    made = make({"name": "n", "rate": "1e-4", "steps": "3", "fast": "true", "files": "x", "kind": "a"})
    assert made == Example("n", rate=1e-4, steps=3, fast=True, files=["x"], kind="a")
    assert make({"name": 5}).name == "5"
    assert make({"name": "n", "kind": None}).kind is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "n", "rte": 1}, "c.yaml: unknown key 'rte'; did you mean 'rate'?"),
        ({"name": "n", "zzzz": 1}, "c.yaml: unknown key 'zzzz'; the manual lists them"),
        ({}, "c.yaml: missing name"),
        ({"name": "n", "rate": "fast"}, "rate must be a number, not 'fast'"),
        ({"name": "n", "steps": 1.5}, "steps must be an integer, not 1.5"),
        ({"name": "n", "kind": "c"}, "kind must be 'a' or 'b' or null, not 'c'"),
        ({"name": "n", "fast": "maybe"}, "fast must be true or false, not 'maybe'"),
        ({"name": "n", "when": "never"}, "when must be no or steps, not 'never'"),
        ({"name": "n", "when": "stps"}, "when must be no or steps, not 'stps'; did you mean 'steps'?"),
        ({"name": "n", "when": True}, "when must be no or steps, not True; a flag without"),
        ({"name": "n", "files": {"a": 1}}, "files must be a list, not {'a': 1}"),
        ({"name": "n", "files": ["x", None]}, "files, entry 1, must be text, not null (no value)"),
        ({"name": "n", "steps": 10**400}, "steps must be an integer, not 1000"),
        ({"name": "n", "rate": 10**400}, "rate must be a number, not 1000"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(UsageError) as error:
        make(values)
    assert message in str(error.value)


def test_overrides():
    words = "--learning-rate 1e-4 --bf16 --files a b --name=x=y --off false".split()
    assert parse_overrides(words) == {
        "learning_rate": "1e-4",
        "bf16": True,
        "files": ["a", "b"],
        "name": "x=y",
        "off": False,
    }


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ('{"rate":0.10,"least":1e-05}', {"rate": 0.1, "least": 1e-05}),
        ("{rate:0.10}", {"rate:0.10": None}),
        ('{"rate":2.50,"on":[0.50]}', {"rate": 2.5, "on": [0.5]}),
        ('{"a":1,"a":2}', '{"a":1,"a":2}'),
        ("[0.50]", ["0.50"]),
    ],
)
def test_numbers_in_a_mapping_are_numbers(word, expected):
    assert parse_overrides(["--x", word]) == {"x": expected}


@pytest.mark.parametrize("words", [["stray"], ["--a", "1", "--a", "2"]])
def test_bad_overrides(words):
    with pytest.raises(UsageError):
        parse_overrides(words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("a: b\n  c: d", "not allowed here in line 2, column 4$"),
        ("- a", "top level is list"),
        ("a: 1\na: 2", "key 'a' is given twice"),
        ("output_dir: {{ OUT }}", "a key is a list or a mapping, not a word; quote the text with {{ }} or"),
        ("{{ x }}: 1", "a key is a list or a mapping"),
        ("? [a]\n: 1", "a key is a list or a mapping"),
        ("a: !!timestamp 2024-13-45", "month must be in 1..12"),
        ("a: " + "[" * 5000, "it is nested too deeply"),
    ],
)
def test_bad_yaml(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_yaml(file)


def test_missing_yaml(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        read_yaml(tmp_path / "none.yaml")


def test_a_file_that_cannot_be_read_or_is_read_once_is_named(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is a pipe or a device, but every rank reads it"):
        read_yaml(tmp_path / "pipe")
    file = tmp_path / "c.yaml"
    file.write_text("a: 1")

    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(UsageError, match=r"cannot be read: Permission denied$"):
        read_yaml(file)


WORDS = ["2024_11_23", "0123", "007", "12:30", "on", "1.10", "1.50e3", "0x1F", "2024-11-23", "2024-99-99"]


@pytest.mark.parametrize("word", WORDS)
def test_text_is_what_was_written(tmp_path, word):
    file = tmp_path / "c.yaml"
    file.write_text(f"name: {word}\nfiles: [{word}, {word}]\n")
    made = make(read_yaml(file))
    assert (made.name, made.files) == (word, [word, word])
    made = make(parse_overrides(["--name", word, "--files", word, word]))
    assert (made.name, made.files) == (word, [word, word])


def test_numbers_and_switches_are_read_from_what_was_written(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("name: n\nsteps: 0123\nrate: 1.50\nfast: on\nratio: 1_000.0\n")
    assert make(read_yaml(file)) == Example("n", steps=123, rate=1.5, fast=True, ratio=1000.0)
    words = "--name n --steps 0123 --rate 1.50 --fast yes".split()
    assert make(parse_overrides(words)) == Example("n", steps=123, rate=1.5, fast=True)


def test_values_inside_a_mapping_are_those_of_yaml(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("a: 1\nb: 1.5\nc: true\nd: {x: 0.50, y: [1.10]}\ne: [{x: 0.50}]\nf: .inf\ng: '0123'\n")
    read = read_yaml(file)
    assert read == {
        **{"a": 1, "b": 1.5, "c": True, "d": {"x": 0.5, "y": [1.1]}, "e": [{"x": "0.50"}]},
        **{"f": float("inf"), "g": "0123"},
    }


def test_a_union_prefers_the_value_as_it_is():
    assert cast("x", "cosine", float | str, words=True) == "cosine"
    assert cast("x", 0.5, float | str, words=True) == 0.5
    assert cast("x", {"a": 1}, dict[str, int] | str | None, words=True) == {"a": 1}


def test_a_bare_no_is_the_strategy_no(tmp_path):
    file = tmp_path / "c.yaml"
    for word in ("no", "No", "off", "OFF", "false"):
        file.write_text(f"name: n\nwhen: {word}\n")
        assert make(read_yaml(file)).when is Strategy.NO
        assert make({"name": "n"} | parse_overrides(["--when", word])).when is Strategy.NO
    assert make({"name": "n", "when": "steps"}).when is Strategy.STEPS
