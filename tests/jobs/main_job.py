"""The runs of the main job on the ranks of a pool."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from unittest import mock

__all__ = ["run_gpt"]


def run_gpt(options: Sequence[str]) -> None:
    """Do on this rank what `python -m gpt.run` does in the processes that Lightning starts."""
    from gpt.run import main

    with mock.patch.object(sys, "argv", ["gpt.run", *options]), warnings.catch_warnings():
        main()
