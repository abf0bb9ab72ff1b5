"""Entry point ``verl.plugins``: registers the engine mca when verl is imported.

verl logs a plugin that cannot be imported at level debug, and later knows no engine ``mca``. This module says why.
"""

import logging

try:
    from mca_train.clients.verl import engine as _engine
except Exception as error:
    logging.getLogger(__name__).warning(
        "verl cannot use the engine mca: %s: %s. Install a version of verl that docs/other_programs.md names, or set "
        "VERL_USE_EXTERNAL_PLUGINS=none to leave mca out",
        type(error).__name__,
        error,
        exc_info=logging.getLogger("verl").isEnabledFor(logging.DEBUG),
    )
    raise

__all__ = ["_engine"]
