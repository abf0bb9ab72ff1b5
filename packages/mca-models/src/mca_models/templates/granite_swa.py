"""Granite with windows: HF ``GraniteSWAForCausalLM``: attention sinks in all layers, NoPE in some layers."""

from collections.abc import Sequence
from dataclasses import replace

from mca_config.errors import HfConfigError
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import HfConfig, read_rope
from mca_models.templates.lens import Lens
from mca_models.templates.parts.rope import FULL, SLIDING, write_layer_types
from mca_models.templates.parts.sliding_window import WINDOW

GRANITE = get_family("granite")


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, and the ropes: one base, or one for each kind; 0 is no rope."""
    count, rope = hf["num_hidden_layers"], read_rope(hf)
    base = rope["rotary_base"]
    kinds = hf.get("layer_types") or [SLIDING if i % 4 else FULL for i in range(count)]
    thetas = hf.get("layer_rope_theta") or [base] * count
    by_kind = {kind: _bases(thetas, kinds, kind) or [base] for kind in (FULL, SLIDING)}
    full, sliding = (by_kind[kind][0] for kind in (FULL, SLIDING))
    if any(len(bases) > 1 for bases in by_kind.values()) or (rope["rope_scaling"] and full != sliding):
        raise HfConfigError(
            f"config.json: 'layer_rope_theta' is {thetas!r:.80}; supported: one base for full layers, one for "
            "those with a window, both without scaling; 0 for NoPE layers"
        )
    return {
        "layer_types": tuple(kinds),
        "rotary_base": full,
        "rotary_base_local": sliding if sliding != full else None,
        "no_rope_freq": None if all(thetas) else tuple(int(not theta) for theta in thetas),
    }


def _bases(thetas: Sequence[float], kinds: Sequence[str], kind: str) -> list[float]:
    return sorted({float(theta) for theta, its in zip(thetas, kinds, strict=True) if theta and its == kind})


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    local = values["rotary_base_local"] or values["rotary_base"]
    bases = [local if kind == SLIDING else values["rotary_base"] for kind in values["layer_types"] or ()]
    skips = values["no_rope_freq"] or (0,) * values["num_layers"]
    thetas = [0 if skip else base for base, skip in zip(bases, skips, strict=True)]
    return {"layer_rope_theta": thetas, **write_layer_types(values)}


CONFIG = replace(
    GRANITE.table,
    fields=(*GRANITE.table.fields, WINDOW),
    defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 4},
    constants={"softmax_type": "learnable"},
    facts=(Lens(derive, write),),
)

FAMILY = replace(GRANITE, model_type="granite_swa", architecture="GraniteSWAForCausalLM", config=CONFIG)
