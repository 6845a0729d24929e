"""What discovery records of each plugin: who it is, and what went wrong with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "broken", "disabled"]
ProblemKind = Literal["import", "hook", "result", "api", "collision", "selection"]


@dataclass(frozen=True, slots=True)
class Plugin:
    """One installed entry point.

    Attributes:
        name: Name of the entry point.
        distribution: Name of the installed package that declares it.
        version: Version of that package.
        status: ``ok``, ``broken`` or ``disabled`` (by an environment variable, before import).
        strategies: The names that it provides, without those that were refused.
    """

    name: str
    distribution: str
    version: str
    status: Status
    strategies: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """Distribution and version, as shown to the user."""
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a plugin, or one of its names, is not available.

    Attributes:
        kind: ``import`` (its module cannot be loaded), ``hook`` (a hook raised or is unknown),
            ``result`` (a hook returned something else than specs), ``api`` (written for another
            version of nnx), ``collision`` (the name is taken) or ``selection`` (``NNX_LOAD_PLUGINS``
            names a plugin that is not installed).
        plugin: Name of its entry point.
        distribution: The installed package and version that declare it.
        detail: Says what happened.
        remedy: Says what the user can do.
    """

    kind: ProblemKind
    plugin: str
    distribution: str
    detail: str
    remedy: str

    def __str__(self) -> str:
        owner = f" of {self.distribution}" if self.distribution else ""
        return f"plugin {self.plugin!r}{owner}: {self.detail} {self.remedy}"

    def as_dict(self) -> dict[str, str]:
        """This record as plain data for JSON."""
        return asdict(self)
