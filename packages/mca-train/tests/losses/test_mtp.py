"""Losses of MTP layers, each by its own count."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_models.megatron import platform
from mca_train.losses import mtp
from mca_train.losses.mtp import MtpLoss


def test_the_loss_of_each_depth_is_divided_by_its_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of four is no target; gradients are scaled for the model's count of 4."""
    platform.prepare()

    def shifted(model: Any, values: torch.Tensor, packed: Any) -> torch.Tensor:
        return torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)

    monkeypatch.setattr(mtp, "_shift_left", shifted)
    monkeypatch.setattr(mtp, "_output_weight", lambda model: None)
    state = MtpLoss((4.0, 3.0, 2.0), torch.zeros(2, dtype=torch.float64))
    model: Any = SimpleNamespace(
        mca_mtp_loss=state,
        output_layer=lambda states, weight: (states, None),
        compute_language_model_loss=lambda labels, logits: logits * (labels + 1),
        config=SimpleNamespace(mtp_loss_scaling_factor=0.3),
    )
    labels, mask = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    hidden = torch.ones(1, 4, requires_grad=True)
    further = [torch.full((1, 4), 2.0, requires_grad=True), torch.full((1, 4), 5.0, requires_grad=True)]
    rest = {"loss_mask": mask, "packed_seq_params": None}
    result = mtp._add_losses(model, hidden, list(further), labels, rest)
    assert torch.equal(result, hidden)
    result.sum().backward()
    assert state.losses.tolist() == pytest.approx([2 * (3 + 5) / 3, 5 * 5 / 2])
    scale = 0.3 / 2 * 4
    assert further[0].grad is not None and further[1].grad is not None
    assert hidden.grad is not None and hidden.grad.tolist() == [[1.0] * 4]
    assert further[0].grad.tolist()[0] == pytest.approx([scale / 3 * x for x in (3, 0, 5, 0)])
    assert further[1].grad.tolist()[0] == pytest.approx([scale / 2 * x for x in (0, 5, 0, 0)])


def test_mtp_layers_get_the_inputs_of_the_decoder() -> None:
    given: list[Any] = []
    model: Any = SimpleNamespace(mtp=lambda **inputs: given.append(inputs) or "states", embedding="embedding")
    rest = {name: f"the {name}" for name in (*mtp._LAYER_INPUTS, "loss_mask", "mtp_in_postprocess")}
    assert mtp._run_layers(model, "hidden", rest) == "states"  # type: ignore[arg-type,comparison-overlap]
    names = (
        *(
            "input_ids",
            "position_ids",
            "attention_mask",
            "rotary_pos_emb",
            "rotary_pos_cos",
            "rotary_pos_sin",
        ),
        *("packed_seq_params", "sequence_len_offset"),
    )
    own = {"hidden_states": "hidden", "inference_params": None, "embedding": "embedding"}
    assert given == [own | {name: f"the {name}" for name in names}]


@pytest.mark.parametrize(("ends", "shifted"), [(None, [2, 3, 4, 5, 0]), ([0, 2, 5], [2, 0, 4, 5, 0])])
def test_labels_are_those_of_the_next_token_of_their_sequence(
    ends: list[int] | None, shifted: list[int]
) -> None:
    platform.prepare()
    alone = SimpleNamespace(size=lambda: 1)
    model: Any = SimpleNamespace(pg_collection=SimpleNamespace(cp=alone))
    packed = None if ends is None else SimpleNamespace(cu_seqlens_q=torch.tensor(ends, dtype=torch.int32))
    values = torch.tensor([[1, 2, 3, 4, 5]])
    assert mtp._shift_left(model, values, packed).tolist() == [shifted]
    assert values.tolist() == [[1, 2, 3, 4, 5]]
