"""The training arguments of a run before torch and transformers are imported."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

from mca_config.fields import alternatives, is_enum
from mca_config.training_checks import CheckedArguments
from mca_config.types import HfArguments
from mca_train.config.hf_fields import hf_fields


@cache
def early_arguments() -> type:
    """Return a class with the fields of `mca_config.TrainingArguments` and its checks that need no import of torch.

    Missing are checks of installed packages (``report_to``), of schedules, and Hugging Face's own.
    """
    read = hf_fields()
    if issubclass(read, CheckedArguments):
        return read  # the source of this transformers has another form; the class itself is imported
    enumerations = {
        name: kind
        for name, hint in get_type_hints(read).items()
        for kind in alternatives(hint)
        if is_enum(kind)
    }

    @dataclass(kw_only=True)
    class EarlyArguments(CheckedArguments, read):  # type: ignore[misc, valid-type]
        """Arguments with the values that Hugging Face's set-up would give them, as far as rules read these."""

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
