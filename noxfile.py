"""The project's chores, one session each: `nox -s lint types tests`.

Sessions without a virtual environment of their own run in the one that nox runs in, always through
`sys.executable`: a bare `python` may be another interpreter when the environment is not activated.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.error_on_external_run = True

ROOT = Path(__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
PLUGINS = [name for name in PACKAGES if name != "nnx-core"]


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting and which package may import which."""
    run(session, "-m", "ruff", "check", ".")
    run(session, "-m", "ruff", "format", "--check", ".")
    run(session, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")


@nox.session
def types(session: nox.Session) -> None:
    """`mypy --strict` over every package."""
    run(session, "-m", "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """All tests, or those that are named: `nox -s tests -- tests/test_main_job.py`."""
    run(session, "-m", "pytest", "-n", "2", "--dist", "loadfile", *session.posargs)


@nox.session(venv_backend="venv")
def docs(session: nox.Session) -> None:
    """Build the site into site/; a broken link fails the build."""
    session.install("-r", "docs/requirements.txt")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="venv")
def wheels(session: nox.Session) -> None:
    """Build every wheel, install them all where nothing else is, and ask what is there."""
    install(session, *build(session, PACKAGES))
    for package in PACKAGES:
        session.run("python", "-I", "-c", f"import {package_module(package)} as m; print(m.__file__)")
    ask(session)


@nox.session(venv_backend="venv")
@nox.parametrize("plugin", PLUGINS, ids=PLUGINS)
def isolation(session: nox.Session, plugin: str) -> None:
    """Each plugin alone with the core: it needs no other plugin, and no file outside its wheel."""
    install(session, *build(session, ["nnx-core", plugin]))
    ask(session)


def run(session: nox.Session, *arguments: str) -> None:
    """Run the Python that runs nox."""
    session.run(sys.executable, *arguments, external=True, env={"PYTHONUNBUFFERED": "1"})


def ask(session: nox.Session) -> None:
    """Whether all is well, which strategies there are, and whether Lightning knows each without an import."""
    session.run("nnx", "doctor")
    session.run("nnx", "list")
    listed = session.run("nnx", "list", "--json", silent=True)
    names = [strategy["name"] for strategy in json.loads(str(listed))["strategies"]]
    choose = (
        "import sys; from lightning.pytorch import Trainer; Trainer(strategy=sys.argv[1], accelerator='cpu')"
    )
    for name in names:
        session.run("python", "-I", "-c", choose, name, silent=True)


def build(session: nox.Session, packages: list[str]) -> list[Path]:
    """Build the wheels of some packages, and nothing but them, into a fresh directory."""
    target = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", os.fspath(target.resolve())]
    for package in packages:
        with session.chdir(ROOT / "packages" / package):
            session.run(*command, external=True)
    return sorted(target.glob("*.whl"))


def install(session: nox.Session, *wheels: Path) -> None:
    """Install wheels, and whatever they need at the tested versions, in one resolver run."""
    session.install("-c", "constraints.txt", *map(os.fspath, wheels))


def package_module(package: str) -> str:
    """What a distribution is imported as: the core as `nnx`, a plugin under its own name."""
    return "nnx" if package == "nnx-core" else package.replace("-", "_")
