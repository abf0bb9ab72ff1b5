"""Multi-process tests run in one xdist worker, so that they do not fight for the cores."""

import os

import pytest


@pytest.mark.ranks
def test_multi_process_tests_are_grouped(request):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("not distributed")
    assert request.node.nodeid.endswith("@ranks"), "pytest-xdist no longer sees the group; see conftest.py"
