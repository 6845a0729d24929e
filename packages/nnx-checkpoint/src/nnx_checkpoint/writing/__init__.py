"""From shards to files: plan which rank writes what, write, commit."""
