"""Keys of config.json without a meaning are one error that names the key, its value, and what is expected."""

from typing import Any

import pytest
import tiny_hf
import transformers

from mca_config.errors import HfConfigError
from mca_models.templates import config_from_hf


@pytest.mark.parametrize(
    ("case", "keys", "said"),
    [
        (
            "jamba",
            {"attn_layer_offset": 8, "attn_layer_period": 8},
            "'attn_layer_offset' is 8; expected 0 to 7",
        ),
        ("jamba", {"expert_layer_offset": -1}, "'expert_layer_offset' is -1; expected 0 to "),
        ("jamba", {"mamba_dt_rank": None}, "'mamba_dt_rank' is None; expected a number, or 'auto'"),
        ("bailing_hybrid", {"kda_lower_bound": None}, "'kda_lower_bound' is None; expected a number below 0"),
        ("bailing_hybrid", {"kda_lower_bound": 0}, "'kda_lower_bound' is 0; expected a number below 0"),
    ],
)
def test_a_key_without_a_meaning_is_one_error(case: str, keys: dict[str, Any], said: str) -> None:
    kind, different = tiny_hf.ALL[case]
    described = transformers.AutoConfig.for_model(kind, **{**tiny_hf.SIZE, **different})
    with pytest.raises(HfConfigError, match=said):
        config_from_hf({**described.to_dict(), **keys})
