"""Optimizers whose parameters are sharded: gradients, what an update reads, whole-tensor updates."""
