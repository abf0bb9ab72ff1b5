"""Granite 3 with experts and a shared one: HF ``GraniteMoeSharedForCausalLM``."""

from dataclasses import replace

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import granitemoe
from mca_models.templates.config_table import HfConfig
from mca_models.templates.moe import aux_loss, restore_aux_loss


def derive(hf: HfConfig) -> JsonObject:
    """The width of the shared expert, of which there may be none, and the load-balancing loss."""
    return {"moe_shared_expert_intermediate_size": hf.get("shared_intermediate_size") or None, **aux_loss(hf)}


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {
        "shared_intermediate_size": given(config.moe).moe_shared_expert_intermediate_size or 0,
        **restore_aux_loss(config),
    }


FAMILY = replace(
    granitemoe.FAMILY,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    config=replace(granitemoe.CONFIG, derive=derive, restore=restore),
)
