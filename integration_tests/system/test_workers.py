"""The multi-process tests of a module run in one xdist worker, which has prepared Megatron before its first test."""

import os
import subprocess
import sys

import pytest

from source_tree import ROOT


@pytest.mark.one_fork
@pytest.mark.ranks
def test_multi_process_tests_are_grouped(request):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("not distributed")
    assert request.node.nodeid.endswith("@test_workers"), (
        "pytest-xdist no longer sees the group; see conftest.py"
    )


IMPORTS = "def test_imports():\n    import megatron.core\n"
PREPARES = """
def test_prepares():
    from mca_models.megatron import platform

    platform.prepare()
"""


@pytest.mark.qualify
def test_megatron_is_prepared_before_a_test_imports_it(tmp_path):
    (tmp_path / "test_first.py").write_text(IMPORTS)
    (tmp_path / "test_second.py").write_text(PREPARES)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-n", "0", "-q", "--import-mode=importlib"]
    done = subprocess.run(
        [*command, str(tmp_path / "test_first.py"), str(tmp_path / "test_second.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert "2 passed" in done.stdout, done.stdout
