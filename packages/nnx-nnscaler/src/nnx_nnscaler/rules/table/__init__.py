"""The rules that come with the package, one file for each family of operators.

`TABLE` maps ``"aten.linear"`` (all overloads) or ``"aten.max.other"`` (this one only) to its rule.
"""

from __future__ import annotations

from nnx_nnscaler.rules import convolution
from nnx_nnscaler.rules.rule import Rule
from nnx_nnscaler.rules.table import (
    attention,
    elementwise,
    embedding,
    linear,
    loss,
    random,
    reductions,
    reshape,
    views,
)

__all__ = ["TABLE"]

TABLE: dict[str, Rule] = {
    **convolution.RULES,
    **attention.RULES,
    **elementwise.RULES,
    **embedding.RULES,
    **linear.RULES,
    **loss.RULES,
    **random.RULES,
    **reductions.RULES,
    **reshape.RULES,
    **views.RULES,
}
