"""Marks of cut parameters: the factory sets them when it builds a model (``mca_models.megatron.marks``)."""

from mca_models.megatron.marks import mark_cut_parameters

__all__ = ["mark_cut_parameters"]
