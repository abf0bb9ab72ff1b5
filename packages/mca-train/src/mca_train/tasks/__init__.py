"""The kinds of run are here: one file for each, and the table of them.

Nothing here trains. A kind says which encoder, samples, loss and trainer belong together.
"""
