"""The user's view of sharded modules: guarded parameters, optimizer state, side effects of user code."""
