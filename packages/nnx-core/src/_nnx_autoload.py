"""The zero-import hook: `import torch` calls `autoload`, so that Lightning knows every nnx strategy.

torch loads and calls each entry point of the group ``torch.backends``, and an exception there breaks
`import torch`. So this file is outside of the package `nnx`, uses only the standard library, and catches all
errors. After the import of one of Lightning's four modules with a registry of strategies, it calls
`nnx_core.lightning.registration` to fill that registry. It never imports nnx, Lightning or torch by itself.
``NNX_AUTOLOAD=0`` turns it off; `import nnx` installs the same hook explicitly.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

__all__ = ["TARGETS", "autoload", "callbacks", "failures", "install", "mirror_callbacks"]

TARGETS = (
    "lightning.pytorch.strategies",
    "lightning.fabric.strategies",
    "pytorch_lightning.strategies",
    "lightning_fabric.strategies",
)

failures: list[str] = []
"""The errors that prevented the registration in this process; `nnx doctor` prints them."""


class _Finder:
    """Finds the target modules as Python does, and calls `_register` after their execution."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module, by Python's import protocol."""
        if fullname not in TARGETS:
            return None
        for finder in sys.meta_path:
            if finder is _FINDER or not hasattr(finder, "find_spec"):
                continue
            spec: ModuleSpec | None = finder.find_spec(fullname, path, target)
            if spec is not None:
                try:
                    _call_after_execution(spec.loader, fullname)
                except Exception as error:
                    _remember(fullname, error)
                return spec
        return None


_FINDER = _Finder()


def _call_after_execution(loader: Any, fullname: str) -> None:
    """Wrap this loader's `exec_module` for one call."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # A zip archive has one loader for all its modules.
        if module.__name__ != fullname:
            execute(module)
            return
        del loader.exec_module
        execute(module)
        _register(fullname)

    loader.exec_module = exec_module


def _register(fullname: str) -> None:
    try:
        from nnx_core.lightning.registration import fill

        fill(fullname)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A plugin's own CI requests the exception; for all others Lightning keeps working.
        if os.environ.get("NNX_STRICT_PLUGINS") == "1":
            raise
        _remember(fullname, error)


def _remember(fullname: str, error: BaseException) -> None:
    failures.append(f"{fullname}: {type(error).__name__}: {error}")
    try:
        import warnings

        warnings.warn(
            f"nnx could not register its strategies in {failures[-1]}. Run `nnx doctor`.", stacklevel=2
        )
    except Exception:
        # Warnings may be errors in this process; a hook of `import` must not raise.
        return


def install() -> None:
    """Fill the imported registries, and hook the import of the others. Idempotent."""
    if _FINDER in sys.meta_path:
        return
    sys.meta_path.insert(0, _FINDER)
    for fullname in TARGETS:
        module = sys.modules.get(fullname)
        if module is not None:
            _register(fullname)


def autoload() -> None:
    """Run at `import torch`."""
    try:
        if os.environ.get("NNX_AUTOLOAD", "1") != "0":
            install()
    except Exception as error:
        _remember("import torch", error)


def callbacks() -> list[Any]:
    """Return our callbacks to each Trainer of ``lightning.pytorch``, if nnx is in use."""
    return _callbacks("callbacks")


def mirror_callbacks() -> list[Any]:
    """Return our callbacks to each Trainer of ``pytorch_lightning``, if nnx is in use."""
    return _callbacks("mirror_callbacks")


def _callbacks(maker: str) -> list[Any]:
    # A Trainer without nnx must neither import it nor fail because of it.
    if "nnx_core.lightning.checkpoint" not in sys.modules:
        return []
    import logging

    from nnx_core.lightning import callbacks

    for tree in ("lightning.fabric", "lightning_fabric"):  # which names them, on every rank
        logging.getLogger(f"{tree}.utilities.registry").addFilter(_is_not_about_us)
    found: list[Any] = getattr(callbacks, maker)()
    return found


def _is_not_about_us(record: Any) -> bool:
    return "entry point 'nnx'" not in record.getMessage()
