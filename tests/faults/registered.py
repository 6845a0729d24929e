"""Registers the broken strategies with declared capabilities; only workers import this module."""

from __future__ import annotations

import nnx
from faults import DECLARED, all_faults, name_of

all_faults()  # which imports the strategies
for _class, _capabilities in DECLARED.items():
    nnx.StrategyRegistry.register(name_of(_class), _class, capabilities=_capabilities, override=True)
