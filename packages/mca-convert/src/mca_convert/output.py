"""What the commands print: safe for a terminal, redacted, in any encoding, whether or not somebody reads it.

What is said is decided in `commands`.
"""

import json
import os
import sys
from collections.abc import Mapping

from mca_config.errors import McaError
from mca_config.printable import printable
from mca_config.redaction import redacted
from mca_config.types import Values

JSON_VERSION = 1


def write_line(text: str) -> None:
    """Print ``text`` and a new line; a reader who has gone away, or none at all, is no failure.

    Raises:
        McaError: It cannot be written, as on a full disk.
    """
    stream = sys.stdout
    if stream is None:
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(f"{printable(redacted(text))}\n".encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        _redirect_to_null(stream.fileno())
    except OSError as error:
        _redirect_to_null(stream.fileno())
        raise McaError(f"standard output: cannot be written ({error.strerror})") from None


def _redirect_to_null(fd: int) -> None:
    """What could not be written is not tried again when the process ends."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, fd)
    os.close(nothing)


def as_json(kind: str, document: Values) -> str:
    """``document`` as JSON that names its ``kind`` and the version of its keys."""
    return json.dumps({"schema": f"mca-convert/{kind}", "version": JSON_VERSION, **document}, indent=1)


def restore_hub_ids(text: str, called: Mapping[str, str]) -> str:
    """``text`` with the directories that stand for models of the Hub called as the user called them."""
    for folder, name in called.items():
        text = text.replace(folder, name)
    return text


def write_json(kind: str, document: Values) -> None:
    """Print ``document`` as JSON."""
    write_line(as_json(kind, document))
