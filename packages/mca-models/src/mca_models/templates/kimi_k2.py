"""Kimi K2: DeepSeek V3 under its own ``model_type``, with other sizes."""

from dataclasses import replace

from mca_models.templates import get_family

DEEPSEEK_V3 = get_family("deepseek_v3")


FAMILY = replace(DEEPSEEK_V3, model_type="kimi_k2", in_transformers=False)
