"""Granite with experts and windows: HF ``GraniteMoeSWAForCausalLM``."""

from dataclasses import replace

from mca_models.templates import granite_swa, granitemoe, granitemoeshared
from mca_models.templates.parts.sliding_window import WINDOW

CONFIG = replace(
    granitemoe.CONFIG,
    fields=(*granitemoe.CONFIG.fields, WINDOW),
    constants=granite_swa.CONFIG.constants,
    facts=(*granitemoeshared.FAMILY.config.facts, *granite_swa.CONFIG.facts),
)

FAMILY = replace(
    granitemoe.FAMILY, model_type="granitemoe_swa", architecture="GraniteMoeSWAForCausalLM", config=CONFIG
)
