"""Automatically parallelised training for PyTorch Lightning, as an nnx plugin.

A model's forward is traced, a plan splits its operators over the ranks of a unit, readable Python is
emitted for it, and that code runs on the user's own module. `nnx_nnscaler.backend` is the engine.
"""
