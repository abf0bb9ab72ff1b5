"""SmolVLM 2: HF ``SmolVLMForConditionalGeneration``."""

from mca_models.templates import get_family
from mca_models.templates.parts.idefics import idefics_family

FAMILY = idefics_family("smolvlm", "SmolVLMForConditionalGeneration", get_family("llama"))
