"""What a conversion would do, without doing it.

No tensor is read and nothing is written.
"""
