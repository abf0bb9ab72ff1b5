"""A pickle reader that executes nothing.

The standard library's interpreter does the parsing; every global it meets comes from the literal table
in ``allowed_globals`` or stops the reading. What comes back holds only plain values and stand-ins. That bounds
what a pickle can do, not how much memory the interpreter asks for on its behalf.
"""

import io
import pickle

from mca_config.errors import McaError
from mca_models.torch_checkpoint.allowed_globals import GLOBALS, Pickled, persistent


class _Refused(Exception):
    """A global that is not in the table."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Pickled:
        """The stand-in for a global; nothing is imported."""
        try:
            return GLOBALS[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None

    def persistent_load(self, pid: Pickled) -> Pickled:
        """The storage that a persistent id names."""
        return persistent(pid)


def read_pickle(data: bytes, where: str) -> Pickled:
    """Read the pickle ``data`` into plain values and stand-ins; ``where`` names it in errors.

    Raises:
        McaError: It names a global that has no stand-in, or is damaged.
    """
    try:
        return _Reader(io.BytesIO(data)).load()
    except _Refused as refused:
        raise McaError(
            f"{where}: the pickle names {refused}, which a checkpoint of weights does not need; nothing was "
            "executed. Save the weights alone and try again, or do not trust the file"
        ) from None
    except Exception as error:  # the interpreter raises nearly any kind on bytes that are no pickle
        raise McaError(f"{where}: not a pickle that can be read ({error}); the file is damaged") from None
