"""A plugin of pytest's that prints why a test failed as soon as it has, for runs that may be stopped."""

import pytest

_LAST = 3000
"""Letters of it."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Registers the printer."""
    config.pluginmanager.register(_Printer(config), "at-once")


class _Printer:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the end of a failure."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(report.longreprtext[-_LAST:])
