"""Refuse ranks that pass other options than rank zero."""

from __future__ import annotations

from typing import Any

from nnx_base.ranks import all_gather_object, control_group
from nnx_core.errors import DisagreementError
from nnx_core.options import values_of

__all__ = ["refuse_unequal_options"]


def refuse_unequal_options(options: Any) -> None:
    """Compare the values of an options dataclass over the ranks. Collective.

    Raises:
        DisagreementError: A rank has other options.
    """
    everyones = all_gather_object(values_of(options), control_group())
    for name, value in everyones[0].items():
        odd = [rank for rank, theirs in enumerate(everyones) if theirs[name] != value]
        if odd:
            raise DisagreementError(
                f"rank {odd[0]} has {name}={everyones[odd[0]][name]!r} and rank 0 has {name}={value!r}.",
                remedy="Pass the same options on all ranks.",
            )
