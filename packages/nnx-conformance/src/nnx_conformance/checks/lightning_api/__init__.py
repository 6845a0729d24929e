"""Lightning's API behaves as in one process."""
