"""Reference of the keys of a configuration: help, starter files, and a schema for editors."""
