"""Structure: models of every make train as in one process, and are what they were afterwards."""

from nnx_conformance.checks.structure import modules as modules
