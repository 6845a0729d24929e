"""What to tell a user whose strategy name cannot be used: why, and what to do about it.

Reads the catalog and what discovery found; changes nothing and raises nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnx_core.catalog import CatalogEntry, historical, known
from nnx_core.errors import NnxError, StrategyNotFoundError, StrategyNotInstalledError
from nnx_core.plugins import Plugin, inventory
from nnx_core.spec import LIGHTNING_NAMES

__all__ = ["explain"]

# How much more alike, of 1, such a name has to be to go before one that can be used.
_TO_INSTALL, _PAST = 0.1, 0.2


def explain(name: str, *, usable: Sequence[str]) -> NnxError:
    """The error for a name that is not usable.

    Args:
        name: The name that was asked for.
        usable: The names that are.

    Example:
        >>> explain("fsdp_native", usable=["fsdp_auto"]).remedy
        "Use 'fsdp_auto' instead."
    """
    if name in historical():
        return _explain_historical(name, usable)
    if name in known():
        return _explain_catalogued(known()[name])
    return _explain_unknown(name, usable)


def _explain_historical(name: str, usable: Sequence[str]) -> NnxError:
    old = historical()[name]
    remedy = f"Use {old.successor!r} instead."
    remedy += _how_to_get(old.successor, usable)
    remedy += f" {old.how}" if old.how else ""
    return StrategyNotFoundError(f"the strategy {name!r} no longer exists; it was {old.was}.", remedy=remedy)


def _explain_catalogued(entry: CatalogEntry) -> NnxError:
    plugins = [plugin for plugin in inventory().plugins if plugin.distribution == entry.distribution]
    if not plugins:
        return StrategyNotInstalledError(
            f"the strategy {entry.name!r} is provided by the package {entry.distribution}, "
            "which is not installed.",
            remedy=f"Run `{entry.install}`.",
        )
    return _explain_unusable(entry.name, plugins[0])


def _explain_unusable(name: str, plugin: Plugin) -> NnxError:
    """The distribution is there, but does not provide the name."""
    start = f"the strategy {name!r} is provided by {plugin.distribution}"
    if plugin.status == "disabled":
        return StrategyNotFoundError(
            f"{start}, which is switched off here.", remedy="Change NNX_DISABLE_PLUGINS or NNX_LOAD_PLUGINS."
        )
    for problem in inventory().problems:
        concerned = plugin.status == "broken" or repr(name) in problem.detail
        if problem.plugin == plugin.name and problem.distribution == plugin.owner and concerned:
            return StrategyNotFoundError(
                f"{start}, but the installed {plugin.owner} cannot be used: {problem.detail}",
                remedy=problem.remedy,
            )
    return StrategyNotFoundError(
        f"{start}, but not by the installed version {plugin.version}, or it was removed in this process.",
        remedy=f"Run `pip install --upgrade {plugin.distribution}`.",
    )


def _how_to_get(name: str, usable: Sequence[str]) -> str:
    installed = {plugin.distribution for plugin in inventory().plugins}
    if name in usable or name not in known() or known()[name].distribution in installed:
        return ""
    return f" It comes with `{known()[name].install}`."


def _explain_unknown(name: str, usable: Sequence[str]) -> NnxError:
    near = _nearest(name.lower(), usable)
    remedy = f"Did you mean {near[0]!r}?" if near else "Run `nnx list` to see the names."
    remedy += _how_to_get(near[0], usable) if near else ""
    broken = [problem.distribution for problem in inventory().problems if problem.kind != "collision"]
    if broken:
        remedy += f" Some plugins could not be loaded ({', '.join(sorted(set(broken)))}): see `nnx doctor`."
    return StrategyNotFoundError(f"no strategy is called {name!r}.", remedy=remedy)


def _nearest(name: str, usable: Sequence[str]) -> list[str]:
    """Names that look alike, the best first; what cannot be used at once has to be more alike."""
    from difflib import SequenceMatcher, get_close_matches

    def worth(found: str) -> float:
        likeness = SequenceMatcher(None, found, name).ratio()
        if found in usable:
            return likeness
        return likeness - (_PAST if found in historical() else _TO_INSTALL if found in known() else 0)

    candidates = sorted({*usable, *known(), *historical(), *LIGHTNING_NAMES})
    return sorted(get_close_matches(name, candidates, n=3), key=worth, reverse=True)
