"""Granite with experts and windows: HF ``GraniteMoeSWAForCausalLM``."""

from dataclasses import replace

from mca_models.templates import get_family
from mca_models.templates.parts.sliding_window import WINDOW

GRANITE_SWA = get_family("granite_swa")
GRANITEMOE = get_family("granitemoe")
GRANITEMOESHARED = get_family("granitemoeshared")

CONFIG = replace(
    GRANITEMOE.table,
    fields=(*GRANITEMOE.table.fields, WINDOW),
    constants=GRANITE_SWA.table.constants,
    facts=(*GRANITEMOESHARED.table.facts, *GRANITE_SWA.table.facts),
)

FAMILY = replace(
    GRANITEMOE, model_type="granitemoe_swa", architecture="GraniteMoeSWAForCausalLM", config=CONFIG
)
