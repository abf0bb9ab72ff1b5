"""Logger by the name that ``mcore_adapter`` gives it."""

from logging import getLogger as get_logger

__all__ = ["get_logger"]
