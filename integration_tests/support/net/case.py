"""One drawn case: a model, its layout, options and data."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model, layout and options of a training run.

    Args:
        seed: Of all draws.
        number: Of this one.
        base: Name of the family's case.
        changes: What differs from it in ``config.json``.
        prediction: MTP layers.
        lora: Settings of ``peft.LoraConfig``; None: the whole model is trained.
        ranks: Processes.
        options: Training arguments.
        short: Samples (packs) that the last step has too few.
        fault: What is planted in the trainer, by its name in `faults`; none is ever drawn.
    """

    seed: int
    number: int
    base: str
    changes: dict[str, Any] = field(default_factory=dict)
    prediction: int = 0
    lora: dict[str, Any] | None = None
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    short: int = 0
    fault: str = ""

    @property
    def name(self) -> str:
        return f"net-{self.seed}-{self.number}{self.fault}"

    @property
    def micro(self) -> int:
        """Samples (packs) of a micro-batch."""
        return int(self.options["per_device_train_batch_size"])

    @property
    def packed(self) -> bool:
        return bool(self.options.get("sequence_packing"))

    def __str__(self) -> str:
        rest = {
            name: value for name, value in asdict(self).items() if value and name not in ("seed", "number")
        }
        return f"{self.name} {json.dumps(rest)}"

    def repeat(self) -> str:
        """The line that runs this case alone."""
        test = "integration_tests/parity/test_option_net.py"
        return f"MCA_NET_SEED={self.seed} MCA_NET_ONLY={self.number} pytest -n 0 {test}  # {self}"


def numbers(given: str, count: int) -> Sequence[int]:
    """Return the numbers in ``given`` (``3,17,40-60``), or the first ``count``."""
    if not given:
        return range(count)
    found: list[int] = []
    for part in given.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
