"""Ropes of ``config.json`` that are computed from several keys, by hand."""

from typing import Any

import pytest

from mca_models.templates.config_table import HfConfigError, read_rope
from mca_models.templates.parts.rope import alpha_rope, long_rope

SIZES: dict[str, Any] = {
    "model_type": "m",
    "hidden_size": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(("head_dim", "dim"), [(8, 8), (None, 16)])
def test_a_dynamic_rope_with_alpha_has_a_larger_base(head_dim: int | None, dim: int) -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    hf = SIZES | {"rope_theta": 500.0, "rope_scaling": scaling} | ({"head_dim": head_dim} if head_dim else {})
    rope = alpha_rope(hf)
    assert rope["rotary_base"] == pytest.approx(500 * 1000 ** (dim / (dim - 2)))
    assert rope["rope_scaling"] is None and rope["rotary_percent"] == 1


@pytest.mark.parametrize(
    "scaling", [{"type": "dynamic", "factor": 2.0}, {"type": "linear", "alpha": 5.0, "factor": 2.0}, None]
)
def test_other_ropes_keep_their_base(scaling: dict[str, Any] | None) -> None:
    hf = SIZES | {"rope_theta": 500.0, "rope_scaling": scaling}
    rope = alpha_rope(hf)
    assert rope == read_rope(hf) and rope["rotary_base"] == 500
    assert (rope["rope_scaling"] is None) == (scaling is None)


@pytest.mark.parametrize(
    ("kind", "read"),
    [("su", "longrope"), ("yarn", "longrope"), ("longrope", "longrope"), ("linear", "linear")],
)
@pytest.mark.parametrize(("outside", "inside", "original"), [(16, 8, 16), (None, 8, 8), (None, None, 64)])
def test_a_long_rope_has_its_present_name_and_the_original_context(
    kind: str, read: str, outside: int | None, inside: int | None, original: int
) -> None:
    key = "original_max_position_embeddings"
    scaling = {"type": kind} | ({key: inside} if inside else {})
    rope = long_rope(SIZES | {"rope_scaling": scaling} | ({key: outside} if outside else {}))
    assert rope["rope_scaling"] == {"rope_type": read, key: original}
    assert long_rope(SIZES)["rope_scaling"] is None


def test_keys_of_both_versions_of_transformers_are_read() -> None:
    old = read_rope(
        {"rope_theta": 7, "partial_rotary_factor": 0.25, "rope_scaling": {"type": "linear", "factor": 2.0}}
    )
    new = read_rope(
        {
            "rope_parameters": {
                "rope_theta": 7,
                "rope_type": "linear",
                "factor": 2.0,
                "partial_rotary_factor": 0.25,
            }
        }
    )
    assert (
        old
        == new
        == {
            "rotary_base": 7.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rotary_percent": 0.25,
        }
    )
    assert read_rope({}) == {"rotary_base": 10000.0, "rope_scaling": None, "rotary_percent": 1.0}
    assert read_rope({"rope_parameters": {"rope_type": "default"}})["rope_scaling"] is None
    for wrong in ({"rope_theta": "x"}, {"partial_rotary_factor": "x"}, {"rope_scaling": [1]}):
        with pytest.raises(HfConfigError, match=r"^config\.json: '"):
            read_rope(wrong)
