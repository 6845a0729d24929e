"""``nnx doctor``: check versions, the zero-import hook, requirements and plugins, and print remedies.

It reads metadata and never imports torch, except under ``--strict``, which imports every strategy.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import (
    PackageNotFoundError,
    entry_points,
    packages_distributions,
    requires,
    version,
)
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from nnx_checkpoint.cli.output import print_json, print_table, print_text
from nnx_core.cli.strategies import options_of
from nnx_core.errors import NnxError
from nnx_core.machine.notes import notes
from nnx_core.names.discovery import inventory
from nnx_core.names.plugins import Plugin
from nnx_core.names.registry import StrategyRegistry

__all__ = ["run"]

_DISTRIBUTIONS = ("nnx-core", "nnx-checkpoint", "torch", "lightning", "pytorch-lightning")
_MALICIOUS = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
_CONSEQUENCE = "so that Lightning knows our names only after `import nnx`."


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        level: ``problem``, or ``remark`` for a finding that may be intended.
        subject: The subject of the finding.
        detail: The finding.
        remedy: The remedy.
    """

    level: Literal["problem", "remark"]
    subject: str
    detail: str
    remedy: str


class Diagnosis(TypedDict):
    """The output of ``nnx doctor --json``.

    Attributes:
        versions: The versions by package; empty for a missing one.
        running: Notes of running processes by process id, such as the line with which another peer joins.
    """

    ok: bool
    versions: dict[str, str]
    plugins: list[Plugin]
    findings: list[Finding]
    running: dict[str, str]


def run(*, strict: bool, as_json: bool) -> int:
    """Print the diagnosis; return 1 for a problem, or with `strict` for a remark."""
    versions = {"python": platform.python_version(), **{name: _version(name) for name in _DISTRIBUTIONS}}
    findings = _check_versions(versions) + _check_requirements()
    findings += _check_hook() + _check_face() + _check_plugins()
    if strict:
        findings += _import_everything()
    bad = any(strict or finding.level == "problem" for finding in findings)
    if as_json:
        content: Diagnosis = {
            "ok": not bad,
            "versions": versions,
            "plugins": inventory().plugins,
            "findings": findings,
            "running": {str(process): text for process, text in notes().items()},
        }
        print_json(content)
    else:
        _print_report(versions, findings)
    return int(bad)


def _print_report(versions: dict[str, str], findings: list[Finding]) -> None:
    print_table(
        ("package", "version"), [[name, found or "not installed"] for name, found in versions.items()]
    )
    print_text("")
    rows = [
        [plugin.name, plugin.owner, plugin.status, ", ".join(plugin.strategies)]
        for plugin in inventory().plugins
    ]
    if rows:
        print_table(("plugin", "provided by", "status", "strategies"), rows)
        print_text("")
    for process, text in notes().items():
        print_text(f"running: process {process}: {text}")
    for finding in findings:
        print_text(f"{finding.level}: {finding.subject}: {finding.detail}")
        print_text(f"  remedy: {finding.remedy}")
    if not findings:
        print_text("All is well.")


def _check_versions(versions: dict[str, str]) -> list[Finding]:
    return [
        Finding(
            "problem",
            name,
            f"version {versions[name]} was a malicious upload to the package index.",
            "Treat this machine's secrets as stolen, and install another version.",
        )
        for name, bad in _MALICIOUS.items()
        if versions.get(name) in bad
    ]


def _check_requirements() -> list[Finding]:
    """Find requirements of nnx and of plugins that are missing or have another version."""
    owners = {plugin.distribution for plugin in inventory().plugins}
    found: dict[str, Finding] = {}
    ours = {"nnx-core", "nnx-checkpoint", "nnx-conformance", "nnx-lite"}
    for owner in sorted({*ours, *owners} - {""}):
        try:
            declared = requires(owner) or []
        except PackageNotFoundError:
            continue
        for line in declared:
            name, problem = _unmet(line)
            if problem:
                wanted = line.partition(";")[0].strip()
                detail = f"{owner} needs {wanted}, and {problem}."
                found.setdefault(name, Finding("problem", name, detail, f"Run `pip install '{wanted}'`."))
    return list(found.values())


def _unmet(requirement: str) -> tuple[str, str]:
    """Return the name in a requirement, and the reason why it is not met; empty if it is."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    try:
        from packaging.requirements import Requirement
    except ImportError:  # Lightning and others bring it; without it only absence is seen
        return name, "it is not installed" if ";" not in requirement and not _version(name) else ""
    parsed = Requirement(requirement)
    if parsed.marker is not None and not parsed.marker.evaluate({"extra": ""}):
        return name, ""
    have = _version(name)
    if not have:
        return name, "it is not installed"
    fits = parsed.specifier.contains(have, prereleases=True)
    return name, "" if fits else f"version {have} is installed"


def _check_hook() -> list[Finding]:
    hooks = [entry.value for entry in entry_points(group="torch.backends")]
    if "_nnx_autoload:autoload" not in hooks:
        return [
            Finding(
                "problem",
                "zero-import hook",
                f"the entry point of nnx-core is missing, {_CONSEQUENCE}",
                "Run `pip install --force-reinstall --no-deps nnx-core`.",
            )
        ]
    return [
        Finding(
            "remark",
            "zero-import hook",
            f"{variable}=0 turns it off, {_CONSEQUENCE}",
            f"Unset {variable}, or write `import nnx` in each script.",
        )
        for variable in ("NNX_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD")
        if os.environ.get(variable) == "0"
    ]


def _check_face() -> list[Finding]:
    """Return True if ``import nnx`` imports this project: another one on the package index has that name."""
    found = find_spec("nnx")
    place = found.origin if found is not None else None
    if place and "nnx_core" in Path(place).read_text(encoding="utf-8", errors="replace"):
        return []
    owners = ", ".join(sorted({*packages_distributions().get("nnx", ())} - {"nnx-core"}))
    return [
        Finding(
            "problem",
            "import nnx",
            f"it finds {place or 'nothing'}{f', of {owners}' if owners else ''}, and not the face of "
            "nnx-core; strategies, checkpoints and this command do not need it.",
            "Write `import nnx_core as nnx`; or uninstall the other package, and then run "
            "`pip install --force-reinstall --no-deps nnx-core`.",
        )
    ]


def _check_plugins() -> list[Finding]:
    return [
        Finding(
            "problem",
            f"plugin {problem.plugin} of {problem.distribution}".removesuffix(" of "),
            f"[{problem.kind}] {problem.detail}",
            problem.remedy,
        )
        for problem in inventory().problems
    ]


def _import_everything() -> list[Finding]:
    """Import each target and its options, as the first use of the strategy does."""
    findings = []
    for name in StrategyRegistry:
        spec = StrategyRegistry.get(name)
        checks: tuple[Any, ...] = (spec.resolve, lambda spec=spec: options_of(spec))
        for check in checks:
            try:
                check()
            except NnxError as error:
                findings.append(Finding("problem", f"strategy {name}", error.message, error.remedy))
    return findings


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
