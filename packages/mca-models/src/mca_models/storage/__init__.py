"""Bytes on disk: safetensors files, their checksums and manifest, and what moves between them.

Nothing here knows a kind of checkpoint directory.
"""
