"""Faults that the checks of the group `stages` catch, by theme."""

from __future__ import annotations

from faults.stages import batches, ending, evaluation, runs

FAULTS = [*runs.FAULTS, *evaluation.FAULTS, *batches.FAULTS, *ending.FAULTS]
