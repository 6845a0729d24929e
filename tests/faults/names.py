"""Faults that the checks of the group `names` catch."""

from __future__ import annotations

from faults import Fault

FAULTS: list[Fault] = []
