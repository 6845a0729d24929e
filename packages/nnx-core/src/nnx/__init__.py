"""The face of nnx: ``import nnx``, then `nnx.strategy`, `nnx.Lite`, `nnx.checkpoint` and so on.

Everything lives in `nnx_core`, `nnx_checkpoint` and `nnx_conformance`, and nothing of ours imports this
package: on the package index another project is called nnx, and who installs both may lose this folder. The
names that modules had before they moved (``nnx.checkpoint.manifest``, ``nnx.testing``) are the modules of
today.
"""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    import nnx_checkpoint as checkpoint  # noqa: F401 - what type checkers see of the names below
    import nnx_conformance as testing  # noqa: F401
    from nnx_core import *  # noqa: F403
    from nnx_core import lite  # noqa: F401

_MOVED = {
    "checkpoint": "nnx_checkpoint",
    "testing.conformance": "nnx_conformance",
    "testing": "nnx_conformance",
    "cli.ckpt": "nnx_checkpoint.cli",
    "cli.conformance": "nnx_conformance.command",
    "box": "nnx_checkpoint.box",
    "canonical": "nnx_checkpoint.naming",
    "collective": "nnx_checkpoint.collective",
    "layout": "nnx_checkpoint.shard",
    "restore": "nnx_checkpoint.state",
    "state": "nnx_checkpoint.state",
}
"""Where modules are that are not in nnx_core; the longest name that fits counts."""
_MODULES = ("checkpoint", "lite", "testing")
"""Modules that are attributes without an import of their own."""


def _home_of(name: str) -> str:
    """What the module ``nnx.<name>`` is called today."""
    for old in sorted(_MOVED, key=len, reverse=True):
        if name == old or name.startswith(f"{old}."):
            return _MOVED[old] + name[len(old) :]
    return f"nnx_core.{name}"


class _Moved:
    """Finds ``nnx.<name>`` as the very module that has it today, so that there is one of each class."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Part of Python's import protocol."""
        if not fullname.startswith("nnx.") or fullname == "nnx.__main__":
            return None
        try:
            module = importlib.import_module(_home_of(fullname.removeprefix("nnx.")))
        except ModuleNotFoundError as error:
            if error.name and error.name.startswith("nnx_conformance"):
                raise ModuleNotFoundError(
                    f"{fullname} is in nnx-conformance: `pip install nnx-conformance`.", name=fullname
                ) from error
            return None
        return ModuleSpec(fullname, _Same(module), is_package=hasattr(module, "__path__"))


class _Same(Loader):
    """Gives an import the module that was imported already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Part of Python's import protocol."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what the import did to the module: it has been executed under its own name."""
        module.__spec__ = self._spec


sys.meta_path.insert(0, _Moved())


def __getattr__(name: str) -> Any:
    import nnx_core

    if name in nnx_core.__all__:
        value = getattr(nnx_core, name)
    elif name in _MODULES:
        value = importlib.import_module(f"nnx.{name}")
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


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})


# Last, as this looks for plugins, which may import what is above.
from nnx_core import __all__  # noqa: E402
