"""Compare the state and the collectives of ranks."""
