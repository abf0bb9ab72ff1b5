"""What can be trained: one file for each kind of run, and the table of them."""
