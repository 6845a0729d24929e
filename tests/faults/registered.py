"""Registers the broken strategies that declare something; imported in the workers only."""

from __future__ import annotations

import nnx
from faults import DECLARED, all_faults, name_of

all_faults()  # which imports the strategies
for _class, _capabilities in DECLARED.items():
    nnx.StrategyRegistry.register(name_of(_class), _class, capabilities=_capabilities, override=True)
