"""Training gives the numbers of one process."""
