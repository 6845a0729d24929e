"""The public API: ``import nnx``, then `nnx.strategy`, `nnx.Lite`, `nnx.checkpoint` and so on.

Everything lives in `nnx_core`, `nnx_checkpoint`, `nnx_conformance` and `nnx_lite`. Nothing of ours imports
this package: on the package index another project is called nnx, and who installs both may lose this folder.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import Any

_MODULES = {"checkpoint": "nnx_checkpoint", "lite": "nnx.lite", "testing": "nnx_conformance"}
"""Modules that are attributes without an import of their own."""


def __getattr__(name: str) -> Any:
    import nnx_core

    if name in nnx_core._HOME or name == "__version__":
        value = getattr(nnx_core, name)
    elif name in _MODULES:
        value = _module(_MODULES[name])
    else:
        near = get_close_matches(name, __all__, n=1, cutoff=0.8)
        hint = (
            f"Did you mean {near[0]!r}?"
            if near
            else "For Flax NNX, which this is not: `from flax import nnx`."
        )
        raise AttributeError(f"module 'nnx' has no attribute {name!r}. {hint}", name=name)
    globals()[name] = value
    return value


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "nnx_conformance":
            raise
        raise ModuleNotFoundError(
            "nnx.testing is in nnx-conformance: `pip install nnx-conformance`.", name="nnx_conformance"
        ) from error


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})


# Last, as this looks for plugins, which may import what is above.
from nnx_core import __all__  # noqa: E402
