"""Find the submodules to recompute in backward, by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def recomputed_owner(module: str, patterns: Sequence[str]) -> str | None:
    """Return the outermost recomputed submodule around this one; None without one.

    Example:
        >>> recomputed_owner("blocks.3.mlp.0", ["blocks.*.mlp"])
        'blocks.3.mlp'
    """
    parts = module.split(".") if module else []
    for count in range(1, len(parts) + 1):
        owner = ".".join(parts[:count])
        if any(_matches(owner, pattern) for pattern in patterns):
            return owner
    return None


def _matches(owner: str, pattern: str) -> bool:
    """Return True if a name fits a pattern; a star stands for one component of the name."""
    names, wanted = owner.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))
