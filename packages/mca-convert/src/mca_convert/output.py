"""Output of the commands: safe for a terminal, redacted, in any encoding, and without an error if the pipe closes."""

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
    """Print ``text`` and a new line; a closed pipe or a missing standard output is not an error.

    Raises:
        McaError: The text cannot be written, for example on a full disk.
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
    """Redirect ``fd`` to ``/dev/null``, so that the end of the process does not retry the write."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def as_json(kind: str, document: Values) -> str:
    """Return ``document`` as JSON with a schema name for its ``kind`` and a version."""
    return json.dumps({"schema": f"mca-convert/{kind}", "version": JSON_VERSION, **document}, indent=1)


def restore_hub_ids(text: str, called: Mapping[str, str]) -> str:
    """Replace the directories of Hub models in ``text`` by the ids that the user gave."""
    for folder, name in called.items():
        text = text.replace(folder, name)
    return text


def write_json(kind: str, document: Values) -> None:
    """Print ``document`` as JSON."""
    write_line(as_json(kind, document))
