"""Preparation of verl and Megatron for a machine without a GPU.

``VERL_USE_EXTERNAL_MODULES=mca_train.clients.verl.cpu`` makes verl import this module before it imports Megatron.
"""

from mca_models.megatron import platform
from mca_train.clients.verl.cpu_platform import use_cpu

platform.prepare()
use_cpu()
