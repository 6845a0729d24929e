"""The `nnx` command and its verbs on checkpoints; start reading at `command`."""
