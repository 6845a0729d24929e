"""The numbers of training: every step gives what one process gives on the same global batches.

Most tasks descend without momentum, so that the difference of two weights is a gradient: a wrong scale shows.
"""

# Their order is the order of the checks.
from nnx_conformance.checks.numbers import (  # noqa: I001
    losses as losses,
    optimizers as optimizers,
)
