"""Granite 3 with experts and a shared one: HF ``GraniteMoeSharedForCausalLM``."""

from dataclasses import replace

from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import HfConfig
from mca_models.templates.lens import Lens
from mca_models.templates.parts.moe import aux_loss, write_aux_loss

GRANITEMOE = get_family("granitemoe")


def derive(hf: HfConfig) -> JsonObject:
    """The width of the shared expert, of which there may be none, and the load-balancing loss."""
    return {"moe_shared_expert_intermediate_size": hf.get("shared_intermediate_size") or None, **aux_loss(hf)}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {
        "shared_intermediate_size": values["moe_shared_expert_intermediate_size"] or 0,
        **write_aux_loss(values),
    }


FAMILY = replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    config=replace(GRANITEMOE.table, facts=(Lens(derive, write),)),
)
