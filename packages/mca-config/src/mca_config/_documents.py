"""Checks of the top level of a ``mca_config.json``, before its model is read."""

from mca_config.errors import McaError
from mca_config.types import JsonObject, Typed

VERSION = 1
_PARTS = ("model", "layout", "hf_config")


def require_document(document: JsonObject, where: str) -> None:
    """Raise `McaError` for another version, for missing or unknown keys, and for parts that are not objects."""
    version = document.get("mca_version")
    if version != VERSION:
        raise McaError(
            f"{where}: mca_version must be {VERSION}, not {version!r:.80}; read it with a matching mca"
        )
    expected = {"mca_version", *_PARTS}
    for key in sorted((document.keys() - {"hf_model_type"}) ^ expected):  # repeats the model's type
        state = "missing" if key in expected else "unknown"
        raise McaError(f"{where}: {state} key {key}; expected {', '.join(sorted(expected))}")
    for key in _PARTS:
        require_object(document[key], f"{where}: {key}")


def require_object(value: Typed, name: str) -> None:
    """Raise `McaError` if ``value`` is not a JSON object; ``name`` is its name in the message."""
    if not isinstance(value, dict):
        raise McaError(f"{name} must be an object, not {value!r:.80}")


def require_same_family(document: JsonObject, where: str) -> None:
    """Raise `McaError` if ``hf_model_type`` or the embedded ``config.json`` has another model type than the model."""
    model, source = document.get("model"), document.get("hf_config")
    if not isinstance(model, dict) or not isinstance(source, dict):
        return
    outer: Typed = model.get("model_type")
    repeated: JsonObject = {
        "hf_model_type is": document.get("hf_model_type", outer),
        "hf_config has model_type": source.get("model_type", outer),
    }
    for words, inner in repeated.items():
        if inner != outer:
            raise McaError(f"{where}: {words} {inner!r:.80}, the model is {outer!r:.80}; restore the file")
