"""Engine ``mca`` of verl; verl imports ``engine`` through the entry point ``verl.plugins``.

This file imports nothing, so that ``cpu`` can prepare Megatron for a machine without a GPU before verl imports it.
"""
