"""Replacement of Hub ids on the command line by local directories, before a command uses them.

Plans and inspections fetch only the headers of weights, or with ``--values`` all; a conversion downloads the model.
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mca_models.hub import headers_only, is_hub_id, resolve_directory

_PATHS = ("checkpoint_path", "adapter_path", "path", "first", "second")


@contextmanager
def local_sources(command: str, options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Replace Hub ids in ``options`` by local directories for the block.

    Yields:
        Ids of Hub models, by their temporary directory.
    """
    called: dict[str, str] = {}
    with ExitStack() as stack:
        for name in _PATHS:
            path = getattr(options, name, None)
            if not path or not is_hub_id(path):
                continue
            if command in ("plan", "inspect") and not options.values:
                folder = stack.enter_context(headers_only(path, needs_weights=command == "inspect"))
                called[str(folder)] = path
            else:
                folder = resolve_directory(path)
            setattr(options, name, str(folder))
        yield called
