"""The rules that come with the package, one file for each family of operators.

`TABLE` maps ``"aten.linear"`` (all overloads) or ``"aten.max.other"`` (this one only) to its rule.
"""

from __future__ import annotations

from nnx_nnscaler.rules.rule import Rule
from nnx_nnscaler.rules.table import arithmetic, layers, shapes

__all__ = ["TABLE"]

TABLE: dict[str, Rule] = {**layers.RULES, **arithmetic.RULES, **shapes.RULES}
