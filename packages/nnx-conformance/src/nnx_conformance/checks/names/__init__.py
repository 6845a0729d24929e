"""Names, and what hangs on them: the user's module, callbacks, logged values, collectives and samplers.

What a user's code sees of the module, in training and after it, is what it would see in one process.
"""

# Their order is the order of the checks.
from nnx_conformance.checks.names import (  # noqa: I001
    module as module,
    callbacks as callbacks,
    collectives as collectives,
    samplers as samplers,
)
