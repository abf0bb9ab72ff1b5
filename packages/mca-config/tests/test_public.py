"""Exports of the package, and its light import."""

import subprocess
import sys

import pytest

import mca_config


def test_all_is_sorted_and_complete() -> None:
    assert mca_config.__all__ == sorted(mca_config.__all__)
    for name in mca_config.__all__:
        assert getattr(mca_config, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mca_config.nothing  # noqa: B018


def test_nothing_heavy_is_imported() -> None:
    heavy = ("torch", "transformers", "megatron", "numpy", "yaml")
    code = f"""
import sys, mca_config, mca_config.parser
mca_config.DistributingParallelArguments(additional_configs={{"batch_p2p_sync": False}})
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
