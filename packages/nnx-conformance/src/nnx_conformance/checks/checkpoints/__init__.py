"""Checkpoints: what is saved comes back, at every world size, whatever happens meanwhile."""

from nnx_conformance.checks.checkpoints import (  # isort: skip # in the order of reports
    resuming as resuming,
    contents as contents,
    randomness as randomness,
    accidents as accidents,
)
