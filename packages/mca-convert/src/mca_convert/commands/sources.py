"""Paths of the command line that name models of the Hub become directories here, before any command looks at them.

Plans and inspections read the headers of weights alone, or with ``--values`` all; a conversion downloads what it needs.
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mca_models.hub import headers_only, is_hub_id, resolve_directory

_PATHS = ("checkpoint_path", "adapter_path", "path", "first", "second")


@contextmanager
def local_sources(command: str, options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """A block in which ``options`` name directories of this machine.

    Yields:
        What those that are gone after the block were called by the user.
    """
    called: dict[str, str] = {}
    with ExitStack() as stack:
        for name in _PATHS:
            given = getattr(options, name, None)
            if not given or not is_hub_id(given):
                continue
            if command in ("plan", "inspect") and not options.values:
                folder = stack.enter_context(headers_only(given, needs_weights=command == "inspect"))
                called[str(folder)] = given
            else:
                folder = resolve_directory(given)
            setattr(options, name, str(folder))
        yield called
