"""Manners: how a strategy is found, started, used from Fabric, fails, and what it leaves behind.

Nothing here is about numbers, but users notice it first.
"""

# Their order is the order of the checks.
from nnx_conformance.checks.manners import (  # noqa: I001
    starting as starting,
    failures as failures,
    residue as residue,
)
