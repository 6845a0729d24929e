"""Optimizers over sharded parameters: gradients, the probe of their dependence, unsharded steps."""
