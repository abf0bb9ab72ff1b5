"""Models for which a release of transformers cannot be the reference."""

import pytest
import tiny_versions

GIVEN = [
    ("5.17.0", "minicpm3-of-16", {}),
    ("5.17.0", "images flint", {}),
    ("5.17.0", "granitemoehybrid-dense", {"mamba_n_groups": 2}),
    ("5.17.0", "minicpm", {}),
    ("5.17.0", "granitemoehybrid", {"mamba_n_groups": 1}),
    ("5.22.1", "longcat_flash", {}),
    ("5.23.0.dev0", "minicpm3", {}),
]
LACKING = 3
"""Of these, the first."""


def test_a_model_is_lacking_before_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (installed, case, changes) in enumerate(GIVEN):
        monkeypatch.setattr(tiny_versions, "installed", lambda found=installed: found)
        reason = tiny_versions.lacking(case, changes)
        assert (reason is not None) == (number < LACKING), case
        assert reason is None or f"transformers {installed} " in reason
