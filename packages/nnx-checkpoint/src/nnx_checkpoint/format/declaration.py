"""Check the declarations of plugins: a name, the import path of a class, and the version it is written for.

Declarations are data. This module needs the standard library only.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field
from typing import Any

from nnx_base.errors import PluginError

API_VERSION = (1, 0)
"""Version of the plugin API; plugins with the same major and no later minor version are accepted."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class CheckpointFormatSpec:
    """A foreign checkpoint format that a plugin can read or write.

    Attributes:
        name: Lower case name, as in ``nnx ckpt convert --to NAME``.
        target: ``"pkg.module:Class"`` of the format's reader and writer.
        description: A description of one line.
        api_version: The version of this API that the plugin was written for.
    """

    name: str
    target: str
    description: str = field(default="", kw_only=True)
    api_version: tuple[int, int] = field(default=(1, 0), kw_only=True)

    def __post_init__(self) -> None:
        check_name(self.name)
        check_reference(self.target, name=self.name, what="target")
        check_version(self.api_version, name=self.name)


def import_reference(reference: str, *, what: str) -> Any:
    """Import ``"pkg.module:attribute"``.

    Args:
        reference: The object to import.
        what: The subject of the message, such as the plugin's name.

    Raises:
        PluginError: The module cannot be imported or has no such attribute.
    """
    module_name, _, path = reference.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{what} is declared as {reference!r}, which cannot be loaded: {type(error).__name__}: {error}.",
            remedy="Install the missing package, or upgrade or remove the plugin that declares it.",
        ) from error
    return found


def check_name(name: object) -> None:
    """Refuse a name that Lightning cannot look up."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return
    # Lightning lower-cases the user's string, so other names could be registered but never selected.
    suggestion = re.sub(r"\W+", "_", name).strip("_").lower() if isinstance(name, str) else ""
    example = f", for example {suggestion!r}" if _NAME.fullmatch(suggestion) else ""
    raise PluginError(
        f"{name!r} is not a valid name: expected lower case letters, digits and underscores, "
        "beginning with a letter.",
        remedy=f"Choose another name{example}.",
    )


def check_reference(reference: object, *, name: str, what: str) -> None:
    """Refuse a reference not of the form ``"pkg.module:Name"``."""
    if isinstance(reference, str) and _REFERENCE.fullmatch(reference):
        return
    raise PluginError(
        f"{name!r} declares {what}={reference!r}: expected 'pkg.module:Name'.",
        remedy="Write the module and the name in it, with one colon between them.",
    )


def check_version(version: object, *, name: str) -> None:
    """Refuse a version that is not a major and a minor number."""
    if isinstance(version, tuple) and [type(part) for part in version] == [int, int]:
        return
    raise PluginError(
        f"{name!r} declares api_version={version!r}: expected two numbers.",
        remedy=f"Write api_version={API_VERSION}.",
    )
