"""Translate the precision flag, and Trainer's precision plugins, to Fabric."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from nnx_core.errors import OptionError
from nnx_lite.copies import FABRIC_ROOT, fabric_module, is_from_lightning, root_of

__all__ = ["choose_precision", "fabric_precision", "is_precision", "precision_root"]

OLD_PRECISIONS: dict[Any, str] = {
    16: "16-mixed",
    32: "32-true",
    64: "64-true",
    "16": "16-mixed",
    "32": "32-true",
    "64": "64-true",
    "bf16": "bf16-mixed",
}
"""LightningLite's values, and Lightning's present strings for them."""
PRECISIONS = (
    *("16-mixed", "bf16-mixed", "16-true", "bf16-true", "32-true", "64-true"),
    *("transformer-engine", "transformer-engine-float16"),
)
"""Lightning's present strings."""
_SAME_CLASS = ("FSDPPrecision", "DeepSpeedPrecision", "XLAPrecision", "HalfPrecision")


def choose_precision(precision: Any) -> str | None:
    """Return Lightning's string for the flag; None leaves the choice to Fabric.

    Raises:
        OptionError: The value is unknown.

    Example:
        >>> choose_precision(16), choose_precision("bf16"), choose_precision("64-true")
        ('16-mixed', 'bf16-mixed', '64-true')
    """
    if precision is None:
        return None
    given = precision.lower() if isinstance(precision, str) else precision
    if isinstance(given, (int, str)) and not isinstance(given, bool):
        if given in OLD_PRECISIONS:
            return OLD_PRECISIONS[given]
        if given in PRECISIONS:
            return str(given)
    near = get_close_matches(str(given), [str(each) for each in OLD_PRECISIONS] + [*PRECISIONS], n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise OptionError(
        f"precision={precision!r} is unknown.",
        remedy=f"{hint}Use 16, 32, 64, 'bf16', or one of {', '.join(PRECISIONS)}.",
    )


def fabric_precision(plugin: Any) -> Any:
    """Return a precision plugin of Fabric that does the same as a plugin of Trainer or of another copy.

    Args:
        plugin: A plugin of Lightning or nnx. Fabric would never call the methods of a user's subclass.

    Raises:
        OptionError: Fabric has no such plugin.
    """
    plugins = fabric_module("plugins")
    kind, precision = type(plugin).__name__, str(plugin.precision)
    scaler = getattr(plugin, "scaler", None)
    is_known = is_from_lightning(plugin) or type(plugin).__module__.startswith("nnx_")
    if is_known and not (scaler is not None and precision.endswith("-true")):
        if kind in _SAME_CLASS:
            return getattr(plugins, kind)(precision)
        if precision.endswith("-mixed"):
            return plugins.MixedPrecision(precision, _device_of(plugin), scaler)
        if precision in ("16-true", "bf16-true"):
            return plugins.HalfPrecision(precision)
        if precision in ("32-true", "64-true"):
            return plugins.DoublePrecision() if precision == "64-true" else plugins.Precision()
    raise OptionError(
        f"plugins={kind}(precision={precision!r}) is a plugin of Trainer without a counterpart in Fabric.",
        remedy=f"Subclass {FABRIC_ROOT}.plugins.Precision, or pass `precision=` instead.",
    )


def _device_of(plugin: Any) -> str:
    """Return the device type of a plugin for mixed precision; nnx's own plugins serve all types."""
    import torch

    return str(getattr(plugin, "device", None) or ("cuda" if torch.cuda.is_available() else "cpu"))


def is_precision(plugin: Any) -> bool:
    """Return True if an object is a precision plugin."""
    return precision_root(plugin) is not None


def precision_root(plugin: Any) -> str | None:
    """Return the tree of a precision plugin, or None for another object."""
    return root_of(plugin, "plugins.precision", "Precision")
