"""The multi-process tests of a module run in one xdist worker: they share references that are made once."""

import os

import pytest


@pytest.mark.one_fork
@pytest.mark.ranks
def test_multi_process_tests_are_grouped(request):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("not distributed")
    assert request.node.nodeid.endswith("@test_workers"), (
        "pytest-xdist no longer sees the group; see conftest.py"
    )
