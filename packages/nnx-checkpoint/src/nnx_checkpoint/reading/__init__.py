"""Read a checkpoint: recognize its format, open it, load it into a model, verify it."""
