"""Models that see and hear, of Transformer Engine's layers: losses and gradients of every parameter are transformers'.

`--cases all` tests every family on every layout.
"""

from pathlib import Path

import pytest

from case_tables import TE_MEDIA
from cases import Case, as_params
from emulated_te import needs_te, run_emulated
from gradients import worst_errors
from parity import TOLERANCE
from vision_passes import compute_gradients
from vision_reference import mixed

pytestmark = [pytest.mark.ranks, needs_te]

SETTINGS = {
    "gemma4-31b": {"attention_backend": "local"},  # its images attend in both directions
    "gemma4-e2b-cp2packed": {"cp_comm_type": "a2a"},  # ring attention has no sliding window
    "cohere2_vision-cp2packed": {"cp_comm_type": "a2a"},
    "lfm3_vl-cp2packed": {"cp_comm_type": "a2a"},
}
"""Settings that a model or a case needs."""


@pytest.mark.cases(0, always=["qwen2_audio-tp2sp", "qwen3_omni_moe_thinker-cp2packed"])
@pytest.mark.parametrize("case", as_params(TE_MEDIA))
def test_losses_and_gradients_equal_transformers(case: Case, tmp_path: Path) -> None:
    reference = mixed(case.model, tmp_path)
    settings = SETTINGS.get(case.model, {}) | SETTINGS.get(case.id, {})
    found = run_emulated(
        case.num_ranks, compute_gradients, [reference], case.layout, tmp_path, timeout=300, **settings
    )
    for (losses,) in found:
        assert isinstance(losses, list), losses
        if case.layout == "tp2sp":
            assert losses == pytest.approx(reference.losses.tolist(), rel=1e-5)
    worst = worst_errors(reference.gradients, tmp_path / case.id)
    assert worst[0][1] <= TOLERANCE, worst
