"""Habits: what people write around a model gives the numbers of one process, or is refused with a remedy.

A habit that a strategy refuses is named in `Capabilities.refuses`; everything else is promised. Each module
here holds the habits of one subject, which are tried together in one job.
"""

# Their order is the order of the checks.
from nnx_conformance.checks.habits import (  # noqa: I001
    used as used,
    gradients as gradients,
    optimizers as optimizers,
    attached as attached,
    weights as weights,
    rare as rare,
)
