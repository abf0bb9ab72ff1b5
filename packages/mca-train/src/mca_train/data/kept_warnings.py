"""`KeptWarnings` keeps what is logged as a warning, to report it again."""

import logging


class KeptWarnings(logging.Handler):
    """A handler of a logger; ``lines`` are what it has heard."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps its text."""
        self.lines.append(record.getMessage())
