"""Building a class of the user's from the hyper-parameters that a checkpoint holds.

Follows Lightning's rules: hyper-parameters saved by ``save_hyperparameters`` are the arguments, or one
argument if they were saved under a name; what the caller passes wins; what ``__init__`` does not take is left
out. Nothing is imported because a checkpoint says so.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from nnx.errors import CheckpointError, OptionError
from nnx.lightning.compat import instantiate_from_config

__all__ = ["Kind", "build", "kind_of"]

_ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_INSTANTIATORS = tuple(f"{root}.cli.instantiate_module" for root in _ROOTS.values())


@dataclass(frozen=True, slots=True)
class Kind:
    """What a class is to Lightning.

    Attributes:
        root: Root of the copy of Lightning it belongs to; empty for a plain ``nn.Module``.
        is_module: Whether it is a LightningModule.
        is_data_module: Whether it is a LightningDataModule.
    """

    root: str = ""
    is_module: bool = False
    is_data_module: bool = False


def kind_of(cls: Any) -> Kind:
    """Find out what a class is.

    Raises:
        OptionError: It is neither a module nor a data module.
    """
    for base in cls.__mro__ if isinstance(cls, type) else ():
        root = _ROOTS.get(base.__module__.partition(".")[0])
        if root and base.__name__ in ("LightningModule", "LightningDataModule"):
            return Kind(root, base.__name__ == "LightningModule", base.__name__ == "LightningDataModule")
    if isinstance(cls, type) and issubclass(cls, nn.Module):
        return Kind()
    raise OptionError(
        f"{cls!r} cannot be loaded from a checkpoint.",
        remedy="Pass a class: a LightningModule, a LightningDataModule or an nn.Module.",
    )


def build(cls: Any, kind: Kind, content: dict[str, Any], given: Mapping[str, Any], *, source: str) -> Any:
    """Make an object of a class.

    Args:
        cls: The class.
        kind: What it is to Lightning.
        content: Lightning's dict; its hyper-parameters are updated with `given`, for hooks to see.
        given: Arguments of the caller's.
        source: The checkpoint's path, for messages.

    Raises:
        CheckpointError: An argument is missing, or the class raises an error.
    """
    arguments = _arguments(cls, content, given) if kind.root else dict(given)
    instantiator = arguments.pop("_instantiator", None)
    if instantiator is not None:
        return _instantiate(cls, kind, instantiator, arguments, source)
    parameters = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    _require_arguments(cls, arguments, source)
    try:
        return cls(**arguments)
    except Exception as error:  # whatever the class raises
        raise _unbuildable(cls, source, f"{type(error).__name__}: {error}") from error


def _arguments(cls: Any, content: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a checkpoint as arguments of a class."""
    saved = content.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    saved.update(given)
    made_of = content.get(cls.CHECKPOINT_HYPER_PARAMS_TYPE)
    name = content.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)
    if name and name in inspect.signature(cls).parameters:
        whole = made_of(saved) if callable(made_of) else saved
        return {**dict(given), name: whole}
    return dict(saved)


def _require_arguments(cls: Any, arguments: Mapping[str, Any], source: str) -> None:
    missing = [
        name
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in arguments
    ]
    if missing:
        raise CheckpointError(
            f"cannot build {cls.__name__} from '{source}': the checkpoint holds no hyper-parameter "
            f"{', '.join(map(repr, missing))}.",
            remedy=f"Pass it, as in `nnx.load_from_checkpoint({cls.__name__}, path, {missing[0]}=...)`; "
            "`self.save_hyperparameters()` in `__init__` saves it with the next checkpoint.",
        )


def _instantiate(cls: Any, kind: Kind, instantiator: Any, arguments: dict[str, Any], source: str) -> Any:
    """Build what LightningCLI built, whose hyper-parameters are a configuration."""
    if instantiator not in _INSTANTIATORS:
        raise _unbuildable(cls, source, f"its instantiator {instantiator!r} is not Lightning's own")
    wanted = arguments.get("_class_path")
    if wanted is not None and not _is_imported_subclass(wanted, cls):
        raise _unbuildable(cls, source, f"{wanted!r} is not a subclass of it in a module that is imported")
    try:
        return instantiate_from_config(kind.root, cls, arguments)
    except Exception as error:  # whatever jsonargparse or the class raises
        raise _unbuildable(cls, source, f"{type(error).__name__}: {error}") from error


def _is_imported_subclass(path: Any, cls: type) -> bool:
    module, _, name = str(path).rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and issubclass(found, cls)


def _unbuildable(cls: Any, source: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"cannot build {cls.__name__} with the hyper-parameters in '{source}': {why}.",
        remedy=f"Check that it is the class that was saved, or pass other values: "
        f"`nnx.load_from_checkpoint({cls.__name__}, path, name=value)`.",
    )
