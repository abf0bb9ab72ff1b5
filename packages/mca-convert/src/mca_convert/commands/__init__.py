"""The sub-commands of ``mca-convert``.

What they do is in the modules above them; here they are only called and answered.
"""
