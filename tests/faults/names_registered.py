"""Registers the broken strategies of `names_ranks` with what Lightning's ``ddp`` can do."""

from __future__ import annotations

import nnx
from faults import names_ranks

_LIKE_DDP = nnx.Capabilities(fabric=False, freezing_while_training=False, unused_parameters=False)

for _name, _class in names_ranks.STRATEGIES.items():
    nnx.StrategyRegistry.register(_name, _class, capabilities=_LIKE_DDP, override=True)
