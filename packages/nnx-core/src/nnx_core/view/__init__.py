"""A user's view of sharded modules: parameters that read as complete, optimizer state, Python state."""
