"""Kimi K2: DeepSeek V3 under its own ``model_type``, with other sizes."""

from dataclasses import replace

from mca_models.templates import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, model_type="kimi_k2", in_transformers=False)
