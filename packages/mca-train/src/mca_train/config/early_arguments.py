"""Training arguments before torch and transformers are imported, with the fields that transformers' source declares."""

import ast
import dataclasses
import enum
import typing
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mca_config.fields import alternatives, is_enum
from mca_config.training_checks import CheckedArguments, is_supported_optimizer
from mca_config.types import HfArguments
from mca_train.config.early_rules import integration_problems, schedule_key_problems

_CLASS, _WORDS, _OPTIMIZERS = "TrainingArguments", "ExplicitEnum", "OptimizerNames"
_FILES = ("debug_utils.py", "trainer_utils.py", "training_args.py")


class Choice(str, enum.Enum):  # noqa: UP042  (as transformers.utils.ExplicitEnum)
    """Base of the enumerations, whose members equal their values."""


@cache
def hf_fields(*, all_optimizers: bool = True) -> type:
    """Return a dataclass with the fields of Hugging Face's ``TrainingArguments``: names, types, defaults, help texts.

    They are read from the source of the installed transformers, with the enumerations of their choices: its import
    takes seconds, ``--help`` 0.2 s. If the source cannot be read in this way, return the class itself.

    Args:
        all_optimizers: False: among the choices of ``optim`` are only those that Megatron has.
    """
    try:
        return read_hf_fields(all_optimizers=all_optimizers)
    except Exception:  # the source of another version may differ in any way
        from mca_config.training import TrainingArguments

        return TrainingArguments


def read_hf_fields(*, all_optimizers: bool = True) -> type:
    """Return that dataclass from the source; any error means that the source is of another form."""
    found = find_spec("transformers")
    assert found is not None and found.origin is not None
    texts = [Path(found.origin).with_name(name).read_text(encoding="utf-8") for name in _FILES]
    classes = [node for text in texts for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    kept = [node for node in classes if node.name == _CLASS or _WORDS in map(ast.unparse, node.bases)]
    for node in kept:
        node.body = [each for part in node.body for each in _fields_and_constants(part)]
        node.decorator_list = []
        if node.name == _OPTIMIZERS:
            node.body = [
                part for part in node.body if all_optimizers or is_supported_optimizer(_constant(part))
            ]
    known = {_WORDS: Choice, "field": dataclasses.field, "Any": object, "Literal": typing.Literal}
    known |= {"ParallelismConfig": object, "trainer_log_levels": {}}
    exec(compile(ast.Module([*kept], []), str(found.origin), "exec"), known)
    return dataclasses.dataclass(typing.cast(type, known[_CLASS]))


def _fields_and_constants(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the fields and constants of a class; all values of a constant that depends on the machine."""
    if isinstance(node, ast.AnnAssign):
        yield node
    elif isinstance(node, ast.Assign | ast.If):
        inner = (each for each in ast.walk(node) if isinstance(each, ast.Assign))
        yield from (each for each in inner if isinstance(each.value, ast.Constant))


def _constant(node: ast.stmt) -> str:
    """Return the value of an enumeration's member."""
    return (
        str(node.value.value) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) else ""
    )


@cache
def early_arguments() -> type:
    """Return a class with the fields of `mca_config.TrainingArguments` and its checks that need no import of torch.

    Hugging Face's own checks are missing.
    """
    read = hf_fields()
    if issubclass(read, CheckedArguments):
        return read  # the source of this transformers has another form; the class itself is imported
    enumerations = {
        name: kind
        for name, hint in typing.get_type_hints(read).items()
        for kind in alternatives(hint)
        if is_enum(kind)
    }

    @dataclasses.dataclass(kw_only=True)
    class EarlyArguments(CheckedArguments, read):  # type: ignore[misc, valid-type]
        """Arguments with the values that Hugging Face's set-up would give them, as far as rules read these."""

        def _problems(self) -> list[str]:
            args: HfArguments = self
            return [*super()._problems(), *integration_problems(args), *schedule_key_problems(args)]

        def __post_init__(self) -> None:
            self.derive_settings()
            super().__post_init__()
            for name, kind in enumerations.items():
                if isinstance(value := getattr(self, name), str):
                    setattr(self, name, kind(value))
            args: HfArguments = self
            args.output_dir = str(Path(args.output_dir or "").expanduser())
            args.do_eval = args.do_eval or args.eval_strategy != "no"

    return EarlyArguments
