"""The examples on the ranks of a pool: each rank does what a process that Lightning starts would do."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["SPEECH_NAMES", "comparison", "digits", "pitch", "speech"]

SPEECH_NAMES = (
    "stft_conv.weight",
    *(f"conv{number}.{part}" for number in range(1, 5) for part in ("weight", "bias")),
    *(f"lstm_cell.{part}" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")),
    *("final_conv.weight", "final_conv.bias"),
)
"""The names of the example's network, in the order of those of silero's own."""


def digits(options: Sequence[str]) -> list[tuple[int, float, float]]:
    """Return the epoch, the loss and the accuracy of each validation."""
    return list(_example("train_digits").main(options).history)


def speech(options: Sequence[str]) -> str:
    """Return the printed text."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        _example("train_speech").main(options)
    return printed.getvalue()


def pitch(options: Sequence[str]) -> dict[int, float]:
    """Return the loss of each step."""
    return dict(_example("train_pitch").main(options).losses)


def comparison(strategy: str, out: str, steps: int) -> None:
    """Write the losses of one strategy."""
    _example("compare_strategies").train(strategy, Path(out), steps)


def _example(name: str) -> Any:
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    warnings.simplefilter("ignore")
    return import_module(name)
