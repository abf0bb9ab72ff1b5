"""Type aliases for values without a static type: contents of JSON and YAML documents, and settings by name.

The code that reads such a value checks it. ``integration_tests/system/test_architecture.py`` counts all other ``Any``.
"""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
"""A parsed JSON object, or one to write."""

Values = Mapping[str, Any]
"""Values by name, each of the type that a dataclass or an upstream library declares for that name."""

Typed = Any
"""A value whose type is in a separate hint, which a type checker cannot use."""

FamilyConfig = Any
"""The subclass of ``McaModelConfig`` for one model family."""

HfArguments = Any
"""``transformers.TrainingArguments`` of any release, whose fields are read by name."""
