"""What a configuration can hold: for people as help and a file to start from, for editors as a schema.

Nothing is read or trained. What a key does is decided where its dataclass is.
"""
