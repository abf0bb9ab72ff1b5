"""Names for values whose types only their readers know: what JSON and YAML documents hold, and settings by name.

What such a value must be is checked where it is read; these names say where it came from. Where else ``Any`` stands is
counted in ``integration_tests/system/test_architecture.py``.
"""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
"""A JSON object as it is parsed, or as it will be written."""

Values = Mapping[str, Any]
"""Values by name, each of the type that a dataclass or an upstream library declares for that name."""

Typed = Any
"""A value of the type that a hint beside it says, which a type checker cannot follow."""

FamilyConfig = Any
"""The subclass of ``McaModelConfig`` that the functions of one model family take, whose fields they know."""

HfArguments = Any
"""``transformers.TrainingArguments`` of any release, of which fields are asked for by name."""
