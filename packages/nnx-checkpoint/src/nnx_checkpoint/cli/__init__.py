"""The `nnx` command with what works on checkpoints; `command` starts, `ckpt` has the verbs."""
