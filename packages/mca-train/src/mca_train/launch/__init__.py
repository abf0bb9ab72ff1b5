"""Starting the local ranks of a run."""
