"""Optimizers that step where the masters are, and the names old scripts use."""
