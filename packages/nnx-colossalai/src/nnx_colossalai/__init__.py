"""Heterogeneous, chunked memory for PyTorch Lightning strategies."""
