"""Idefics 3: HF ``Idefics3ForConditionalGeneration``."""

from mca_models.templates import get_family
from mca_models.templates.parts.idefics import idefics_family

FAMILY = idefics_family("idefics3", "Idefics3ForConditionalGeneration", get_family("llama"))
