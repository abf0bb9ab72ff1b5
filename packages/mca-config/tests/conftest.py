"""These tests compare with megatron-core, which a machine without a GPU must import through mca's platform."""

from mca_models.megatron import platform

platform.prepare()
