"""Build the user's class from the hyper-parameters of a checkpoint.

It follows Lightning's rules. Hyper-parameters of ``save_hyperparameters`` are the arguments, or one argument
if they were saved under a name. Arguments of the caller take precedence. Arguments that ``__init__`` does not
take are dropped.

Without trust, no name in a checkpoint is imported, looked up or called: a class gets plain data, converted to
the types that its own ``__init__`` declares. With trust, jsonargparse imports the allowed names, as
LightningCLI does.
"""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from nnx_core.errors import CheckpointError, OptionError
from nnx_core.lightning.compat import instantiate_from_config

Trust = bool | Collection[str]
"""True allows to import and call all names in a checkpoint; a collection allows only those names."""


_ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


_INSTANTIATORS = tuple(f"{root}.cli.instantiate_module" for root in _ROOTS.values())


_CLASS_PATHS = ("class_path", "_class_path")


_PLAIN = (str, int, float, bool, complex, bytes, type(None), list, dict, tuple, set, frozenset)


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a class for Lightning.

    Attributes:
        root: The root of its copy of Lightning; empty for a plain ``nn.Module``.
        is_module: True if it is a LightningModule.
        is_data_module: True if it is a LightningDataModule.
    """

    root: str = ""
    is_module: bool = False
    is_data_module: bool = False


def kind_of(cls: Any) -> Kind:
    """Classify a class.

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


def build(
    cls: Any,
    kind: Kind,
    content: dict[str, Any],
    given: Mapping[str, Any],
    *,
    source: str,
    trust: Trust = False,
) -> Any:
    """Make an object of a class.

    Args:
        cls: The class.
        kind: The kind of the class.
        content: Lightning's dict; its hyper-parameters are updated with `given`, for hooks to read.
        given: The caller's arguments.
        source: The checkpoint's path, for messages.
        trust: The names in the checkpoint that may be imported and called.

    Raises:
        CheckpointError: An argument is missing, the checkpoint contains a name that is not trusted, or the
            class raises an error.
    """
    arguments = _arguments(cls, content, given) if kind.root else dict(given)
    instantiator = arguments.pop("_instantiator", None)
    if instantiator is not None:
        if instantiator not in _INSTANTIATORS:
            raise _unbuildable(cls, source, f"its instantiator {instantiator!r} is not Lightning's own")
        if trust is not False:
            return _instantiate(cls, kind, arguments, given, source, trust)
        arguments = _plain_arguments(cls, arguments, given, source)
    parameters = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    _require_arguments(cls, arguments, source)
    try:
        return cls(**arguments)
    except Exception as error:  # any error of the class
        raise _unbuildable(cls, source, f"{type(error).__name__}: {error}") from error


def _arguments(cls: Any, content: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a checkpoint as arguments of a class."""
    saved = content.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    if not isinstance(saved, MutableMapping):
        raise CheckpointError(
            f"'{cls.CHECKPOINT_HYPER_PARAMS_KEY}' of the checkpoint is a {type(saved).__name__}, no mapping "
            f"of names to arguments of {cls.__name__}.",
            remedy="Remove it from the checkpoint, and pass the arguments to `load_from_checkpoint`.",
        )
    saved.update(given)
    made_of = content.get(cls.CHECKPOINT_HYPER_PARAMS_TYPE)
    name = content.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)
    if name and name in inspect.signature(cls).parameters:
        argument = made_of(saved) if callable(made_of) else saved
        return {**dict(given), name: argument}
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


def _instantiate(
    cls: Any, kind: Kind, arguments: dict[str, Any], given: Mapping[str, Any], source: str, trust: Trust
) -> Any:
    """Build a class of LightningCLI, whose hyper-parameters are a configuration with names."""
    if not isinstance(trust, bool):
        allowed = {trust} if isinstance(trust, str) else set(trust)
        stored = {name: value for name, value in arguments.items() if name not in given}
        _refuse_names(cls, {n: v - allowed for n, v in _names_in(cls, stored).items() if v - allowed}, source)
    try:
        return instantiate_from_config(kind.root, cls, arguments)
    except Exception as error:  # any error of jsonargparse or the class
        raise _unbuildable(cls, source, f"{type(error).__name__}: {error}") from error


class _NotPlainError(Exception):
    """A value cannot be made from plain data."""


def _plain_arguments(
    cls: Any, arguments: dict[str, Any], given: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """Convert stored hyper-parameters to the types that the class declares; not the caller's."""
    hints, plain, refused = _hints(cls), {}, {}
    for name, value in arguments.items():
        if name == "_class_path":
            if value != f"{cls.__module__}.{cls.__qualname__}":
                refused[name] = {str(value)}
            continue
        try:
            plain[name] = value if name in given else _converted(value, hints.get(name, Any))
        except _NotPlainError:
            refused[name] = _names(value) or {str(value)}
    _refuse_names(cls, refused, source)
    return plain


def _converted(value: Any, annotation: Any) -> Any:  # noqa: PLR0911 - one line for each kind of annotation
    """Convert plain data to a declared type.

    Raises:
        _NotPlainError: The type is a class or a callable, or the data contain the name of one.
    """
    if value is None or annotation in (Any, object):
        return _without_class_paths(value)
    origin, inner = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (Union, types.UnionType):
        return _converted_to_one_of(value, inner)
    if origin is Literal and value in inner:
        return value
    if origin in (list, tuple, set, frozenset) and isinstance(value, (list, tuple, set, frozenset)):
        each = [_converted(item, _item_type(inner, index)) for index, item in enumerate(value)]
        return origin(each)
    if not isinstance(origin, type):
        raise _NotPlainError
    if issubclass(origin, enum.Enum) and value in origin.__members__:
        return origin[value]
    if issubclass(origin, Path) and isinstance(value, str):
        return Path(value)
    if is_dataclass(origin) and isinstance(value, Mapping) and set(value) <= set(hints := _hints(origin)):
        return origin(**{name: _converted(item, hints.get(name, Any)) for name, item in value.items()})
    if issubclass(origin, (*_PLAIN, Mapping)) or (origin is Collection and not isinstance(value, str)):
        return _without_class_paths(value)
    raise _NotPlainError


def _converted_to_one_of(value: Any, annotations: Collection[Any]) -> Any:
    for annotation in annotations:
        try:
            converted = _converted(value, annotation)
        except _NotPlainError:
            continue
        if not isinstance(annotation, type) or isinstance(converted, annotation):
            return converted
    raise _NotPlainError


def _item_type(inner: tuple[Any, ...], index: int) -> Any:
    """Return a container's declared item type: of ``list[X]``, ``tuple[X, ...]`` and ``tuple[X, Y]``."""
    if not inner:
        return Any
    return inner[index] if Ellipsis not in inner and index < len(inner) else inner[0]


def _without_class_paths(value: Any) -> Any:
    """Return the data unchanged; raise if they contain a class path."""
    items = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping) and any(key in value for key in _CLASS_PATHS):
        raise _NotPlainError
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        for item in items:
            _without_class_paths(item)
    return value


def _names_in(cls: Any, stored: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return, by parameter, the names in a checkpoint that jsonargparse may import."""
    hints, found = _hints(cls), {}
    for name, value in stored.items():
        if name == "_class_path":
            found[name] = {str(value)}
            continue
        try:
            _converted(value, hints.get(name, Any))
            if isinstance(value, str) and hints.get(name, Any) is not str:
                _refuse_structure(value)
        except _NotPlainError:
            found[name] = _names(value) or {str(value)}
    return found


def _refuse_structure(text: str) -> None:
    """Refuse a string that jsonargparse may parse as YAML, which may contain a class path."""
    if any(sign in text for sign in "{}[]\n") or ": " in text:
        raise _NotPlainError


def _names(value: Any) -> set[str]:
    """Return all possible names to import in a configuration: class paths, and strings with a dot."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, Mapping):
        own = {str(value[key]) for key in _CLASS_PATHS if key in value}
        inner = [_names(item) for key, item in value.items() if key not in _CLASS_PATHS]
        return own | {name for names in inner for name in names if "." in name or not own}
    if isinstance(value, (list, tuple, set, frozenset)):
        return {name for item in value for name in _names(item)}
    return set()


def _hints(cls: Any) -> dict[str, Any]:
    """Return the declared types of the class's arguments; none if a declaration cannot be evaluated."""
    try:
        return get_type_hints(cls.__init__)
    except Exception:  # any error of an annotation
        return {}


def _refuse_names(cls: Any, refused: Mapping[str, Collection[str]], source: str) -> None:
    if not refused:
        return
    named = "; ".join(f"{name!r} names {', '.join(sorted(map(repr, of)))}" for name, of in refused.items())
    all_names = sorted({name for of in refused.values() for name in of})
    raise CheckpointError(
        f"cannot build {cls.__name__} from '{source}': its hyper-parameters contain names to import or "
        f"call: {named}.",
        remedy=f"Pass the objects (`{next(iter(refused))}=...`), or, if you trust whoever wrote it, "
        f"`nnx.load_from_checkpoint({cls.__name__}, path, trust={all_names!r})`; trust=True allows all.",
    )


def _unbuildable(cls: Any, source: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"cannot build {cls.__name__} with the hyper-parameters in '{source}': {why}.",
        remedy=f"Check that it is the class that was saved, or pass other values: "
        f"`nnx.load_from_checkpoint({cls.__name__}, path, name=value)`.",
    )
