"""Save shards to files: assign boxes to ranks, write, commit."""
