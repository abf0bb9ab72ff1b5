"""What can stand in a configuration is told here: to people as help and a file to begin with, to editors as a schema.

Nothing is read or trained. What a key does is decided where its dataclass is.
"""
