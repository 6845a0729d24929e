"""Registers broken strategies that declare more than the default; imported in the workers only."""

from __future__ import annotations

import nnx
from faults.structure.building import KeepsLateOnes, KeepsWhatWasThere, NeverWraps
from nnx import Capabilities

__all__: list[str] = []

_ON_META = Capabilities(meta_initialization=True)
register = nnx.StrategyRegistry.register
register("keeps_what_was_there", KeepsWhatWasThere, capabilities=_ON_META, override=True)
register("keeps_what_was_there_late", KeepsLateOnes, capabilities=_ON_META, override=True)
register("never_wraps", NeverWraps, capabilities=Capabilities(manual_wrap=True), override=True)
