"""Checkpoints are saved completely and resume exactly."""
