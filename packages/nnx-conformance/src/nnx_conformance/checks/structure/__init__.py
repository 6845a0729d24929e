"""Structure: models of every make train as in one process, and are what they were afterwards."""

from nnx_conformance.checks.structure import (  # noqa: I001
    parameters,
    layers,
    buffers,
    building,
)

__all__ = ["buffers", "building", "layers", "parameters"]
