"""Faults that the checks of the group `structure` catch, by theme."""

from __future__ import annotations

from faults.structure import buffers, building, layers, parameters

FAULTS = [*parameters.FAULTS, *layers.FAULTS, *buffers.FAULTS, *building.FAULTS]
