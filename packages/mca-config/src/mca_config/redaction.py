"""`redacted` removes secrets from a text that is printed, logged or written to a file.

`errors.McaError` redacts its message, and `streams.SafeStream` standard error, so that texts of other libraries are
redacted too. Only text for other destinations needs a call.
"""

import re

from mca_config.types import JsonObject, Typed, Values

_RULES = (
    # https://user:password@host; a user without a password can be a token
    (r"(https?:/+)[^/\s?#'\"]*@", r"\1...@"),
    # s3://key:secret@bucket, also without its scheme
    (r"((?::|/)/+[^/@:\s]*):[^/\s]*@", r"\1:...@"),
    # the same cut off before its @; digits are a port
    (r"(:/+[^/@:\s\['\"]+):(?!\d)[^/@\s'\",;)]+(?![^/\s]*@)", r"\1:..."),
    # the whole query of a web address, but not the punctuation that ends its sentence
    (r"""(https?:/+[^\s?#'"]*)[?#][^\s'"]*?(?=[,:;)]*(?:[\s'"]|$))""", r"\1"),
    # messages of urllib3 about a web address
    (r"(with url: [^\s?]*)\?\S*", r"\1"),
    # secrets by name, in queries of other addresses too
    (r"(?i)([?&][\w.%-]*(?:sig|auth|token|secret|password|credential|key)[\w.%-]*=)[^&\s'\"]+", r"\1..."),
    (r"(Bearer )\S+", r"\1..."),
    (r"\bhf_[A-Za-z0-9]{30,}", "hf_..."),
)


def redacted(text: str) -> str:
    """Return ``text`` without passwords, signed queries and tokens."""
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)  # compiled once, where a text is printed, not at the start
    return text


def redacted_values(values: Values) -> JsonObject:
    """Return keys and values of a configuration without secrets, as deep as they are nested."""
    return {key: "..." if is_secret(key) and value else _redacted(value) for key, value in values.items()}


def is_secret(key: str) -> bool:
    """Return whether the value of ``key`` is a secret, by the rule of Hugging Face's arguments."""
    return key.endswith("_token")


def _redacted(value: Typed) -> Typed:
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return redacted_values(value)
    if isinstance(value, list | tuple):
        return [_redacted(entry) for entry in value]
    return value
