"""``nnx new``: a plugin project that installs, passes its tests and keeps every promise at once.

Asks and checks; `nnx_core.template` is what copier renders from the answers. Everything is checked before
anything is written, and an unfinished project is removed. The meaning of the words is in
``docs/writing-a-backend.md``.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from nnx_checkpoint.cli.output import print_error, print_json, print_note, print_text
from nnx_core.errors import NnxError, OptionError, PluginError, UnsupportedError
from nnx_core.names.catalog import historical, known
from nnx_core.names.discovery import inventory
from nnx_core.names.registry import StrategyRegistry
from nnx_core.names.spec import LIGHTNING_NAMES, StrategySpec, name_remarks
from nnx_core.options import check_choice

__all__ = [
    "Given",
    "run",
    "update",
]


# Which names and texts a new plugin may have, checked by ``nnx new`` before anything is written.
#
# A name is free if no strategy, distribution or module that this installation or the catalog knows has it.
# Nothing is asked of the package index.


_DISTRIBUTION = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# So that the lines of source that hold them stay within the formatter's width.
_LONGEST_NAME = 32
_LONGEST_LINE = 80


def check_distribution(name: str) -> None:
    """Refuse a name under which a distribution could not be published or imported.

    Raises:
        OptionError: The name is invalid; the error suggests one if it can.
    """
    _check_length("the distribution", name)
    if not _DISTRIBUTION.fullmatch(name):
        raise OptionError(
            f"the distribution cannot be called {name!r}: expected lower case letters, digits and single "
            "dashes, beginning with a letter.",
            remedy="Choose a name such as 'nnx-mine'.",
        )
    if name == "nnx-core" or name in {entry.distribution for entry in known().values()}:
        raise OptionError(f"{name!r} is a distribution of nnx's catalog.", remedy="Choose another name.")
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or _is_taken(module, name):
        raise OptionError(
            f"the distribution {name!r} would be imported as {module!r}, which is taken.",
            remedy=f"Choose another name, for example 'nnx-{name.removeprefix('nnx-')}'.",
        )


def check_strategy(name: str, *, distribution: str) -> None:
    """Refuse a strategy name that is not valid, or that somebody else provides.

    Args:
        name: The strategy.
        distribution: The distribution that is going to provide it; a name that it provides already is its
            own.

    Raises:
        OptionError: The name is invalid or taken.
    """
    _check_length("the strategy", name)
    try:
        StrategySpec(name, "some.module:Name")
    except PluginError as error:
        raise OptionError(error.message, remedy=error.remedy) from error
    if owner := _owner(name, distribution):
        raise OptionError(
            f"the strategy {name!r} already exists: {owner}.", remedy="Choose another name for yours."
        )


def check_line(what: str, text: str, *, may_be_empty: bool = False) -> None:
    """Refuse a text that does not fit between quotes on one line of TOML, YAML and Python.

    Raises:
        OptionError: It is empty, too long, or has quotes, backslashes, braces or control characters.
    """
    if not text and not may_be_empty:
        raise OptionError(f"the {what} is empty.", remedy="Say it in a few words.")
    if len(text) > _LONGEST_LINE or not text.isprintable() or set(text) & set('"\\{}'):
        raise OptionError(
            f"the {what} {text!r} is not a plain line: expected at most {_LONGEST_LINE} characters, without "
            "double quotes, backslashes, braces and line breaks.",
            remedy="Shorten or reword it.",
        )


def _check_length(what: str, name: str) -> None:
    if len(name) > _LONGEST_NAME:
        raise OptionError(
            f"{what} is called {name!r}, which has {len(name)} characters: expected at most {_LONGEST_NAME}.",
            remedy="Choose a shorter name.",
        )


def _owner(name: str, distribution: str) -> str:
    """Return the owner of the strategy name, other than the distribution itself; empty if there is none."""
    if name in LIGHTNING_NAMES:
        return "it is one of Lightning's own"
    if name in historical():
        return f"old scripts mean {historical()[name].was} by it"
    if name in known() and known()[name].distribution != distribution:
        return f"the catalog has it from {known()[name].distribution}"
    if name in StrategyRegistry and StrategyRegistry.owner(name).partition(" ")[0] != distribution:
        return f"{StrategyRegistry.owner(name)} provides it here"
    return ""


def _is_taken(module: str, distribution: str) -> bool:
    """Return True if another module has this name; an installed plugin of that name does not count."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:  # nothing, or a mere directory of that name
        return False
    return distribution not in {plugin.distribution for plugin in inventory().plugins}


KINDS = ("backend", "lightning")
TEMPLATE = Path(__file__).parents[1] / "template"
_ANSWERS = ".copier-answers.yml"
# The user's own files, which an update does not change.
_WRITTEN_BY_USERS = ("/src", "/tests", "/catalog", "/README.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options of the command line; None is asked for.

    Attributes:
        distribution: The distribution that users install.
        strategy: The string for ``strategy="..."``.
        kind: One of `KINDS`.
        description: One line of description.
        author: The author's name; may be empty.
    """

    distribution: str | None = None
    strategy: str | None = None
    kind: str | None = None
    description: str | None = None
    author: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """`Given`, complete and checked."""

    distribution: str
    strategy: str
    kind: str
    description: str
    author: str


class NewProject(TypedDict):
    """A project that was written.

    Attributes:
        next: The commands to run next.
    """

    path: str
    distribution: str
    strategy: str
    kind: Literal["backend", "lightning"]
    description: str
    author: str
    files: list[str]
    remarks: list[str]
    next: list[str]


class Update(TypedDict):
    """The output of ``nnx new --update --json``.

    Attributes:
        changed: The files that the update changed.
    """

    path: str
    changed: list[str]


Printed = NewProject | Update
"""The output of ``nnx new --json``."""


def run(path: Path, given: Given, *, defaults: bool, as_json: bool) -> int:
    """Render a project into a new or empty directory; return 2 for an invalid answer."""
    copier = _import_copier()
    try:
        _check_directory(path)
        answers = _collect(given, path=path, ask=not (defaults or as_json))
    except OptionError as error:
        print_error(error)
        return 2
    files = _render(copier, path, answers)
    _report(path, answers, files, as_json=as_json)
    return 0


def update(path: Path, *, as_json: bool) -> int:
    """Render the frame of a project again, by its own answers and the template of the installed nnx-core.

    The frame is everything except sources, tests, README and catalog entry. Edits to it are overwritten, so
    all files must be committed: git then shows the changes, and can revert them.
    """
    copier = _import_copier()
    try:
        answers = _kept_answers(path)
        if path.is_dir() and _git(path, "status", "--porcelain") != "":
            raise OptionError(
                f"{str(path)!r} is not a git repository in which everything is committed.",
                remedy="Commit first, so that you can look at what changes and take it back.",
            )
    except OptionError as error:
        print_error(error)
        return 2
    copier.run_copy(
        str(TEMPLATE),
        path,
        data=answers,
        defaults=True,
        overwrite=True,
        quiet=True,
        exclude=_WRITTEN_BY_USERS,
    )
    changed = [line[3:] for line in (_git(path, "status", "--porcelain") or "").splitlines()]
    if as_json:
        update: Update = {"path": str(path), "changed": changed}
        print_json(update)
    elif changed:
        print_text(f"Changed: {', '.join(changed)}. `git diff` shows how.")
    else:
        print_text("Nothing has changed.")
    return 0


def _kept_answers(path: Path) -> dict[str, str]:
    """Return the answers with which `nnx new` rendered the project."""
    import yaml  # type: ignore[import-untyped]  # copier needs it too

    try:
        kept = yaml.safe_load((path / _ANSWERS).read_text(encoding="utf-8"))
        return asdict(Answers(**kept))
    except (OSError, TypeError, yaml.YAMLError) as error:
        raise OptionError(
            f"{str(path / _ANSWERS)!r} does not hold the answers to `nnx new`: {error}.",
            remedy="Name the directory of a project that `nnx new` rendered.",
        ) from error


def _import_copier() -> Any:
    try:
        import copier
    except ImportError as error:
        raise UnsupportedError(
            "`nnx new` renders projects with copier, which is not installed.",
            remedy="Run `pip install 'nnx-core[new]'`.",
        ) from error
    return copier


def _check_directory(path: Path) -> None:
    try:
        if path.is_dir() and not any(path.iterdir()):
            return
        path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:  # such as a name of 300 letters
        raise OptionError(
            f"{str(path)[:100]!r} cannot be a directory: {error.strerror}.",
            remedy="Choose a shorter name, in a directory that you may read.",
        ) from error
    if path.exists() or path.is_symlink():
        what = "is not empty" if path.is_dir() else "exists and is not a directory"
        raise OptionError(f"{str(path)!r} {what}.", remedy="Name a directory that is new or empty.")


def _collect(given: Given, *, path: Path, ask: bool) -> Answers:
    """Take each answer from the command line, from the user, or from its default; check it at once."""
    distribution = _answer(
        given.distribution,
        "Name of the distribution, as in `pip install NAME`",
        default=re.sub(r"[^a-z0-9]+", "-", path.resolve().name.lower()).strip("-"),
        check=check_distribution,
        ask=ask,
    )
    strategy = _answer(
        given.strategy,
        'Name of the strategy, as in Trainer(strategy="NAME")',
        default=distribution.removeprefix("nnx-").replace("-", "_"),
        check=lambda name: check_strategy(name, distribution=distribution),
        ask=ask,
    )
    return Answers(
        distribution=distribution,
        strategy=strategy,
        kind=_answer(
            given.kind,
            "Kind: backend, or lightning for a strategy class of Lightning's",
            default=KINDS[0],
            check=lambda kind: check_choice("kind", kind, KINDS),
            ask=ask,
        ),
        description=_answer(
            given.description,
            "What it is, in a line",
            default=f"The strategy {strategy}",
            check=lambda text: check_line("description", text),
            ask=ask,
        ).rstrip("."),
        author=_answer(
            given.author,
            "Author",
            default=_git_user(),
            check=lambda text: check_line("author", text, may_be_empty=True),
            ask=ask,
        ),
    )


def _answer(
    given: str | None, question: str, *, default: str, check: Callable[[str], None], ask: bool
) -> str:
    """Return one checked answer; the user may retry."""
    if given is not None or not ask:
        answer = default if given is None else given.strip()
        check(answer)
        return answer
    while True:
        # On standard error, so that what the command prints stays alone on standard output.
        sys.stderr.write(f"{question} [{default}]: ")
        sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            raise OptionError(
                f"there is no answer to {question!r}.", remedy="Pass it as an option, or pass --defaults."
            )
        answer = line.strip() or default
        try:
            check(answer)
        except OptionError as error:
            print_error(error)
        else:
            return answer


def _git_user() -> str:
    """Return git's user name, if it is a valid answer."""
    name = (_git(Path.cwd(), "config", "user.name") or "").strip()
    try:
        check_line("author", name, may_be_empty=True)
    except OptionError:
        return ""
    return name


def _git(directory: Path, *arguments: str) -> str | None:
    """Return git's output; None if it fails or is missing."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=directory, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _render(copier: Any, path: Path, answers: Answers) -> list[str]:
    """Render in a temporary directory, then move: an error leaves no incomplete project."""
    existed = path.exists()
    staging: Path | None = None
    try:
        path.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".nnx-new-", dir=path))
        copier.run_copy(str(TEMPLATE), staging, data=asdict(answers), defaults=True, quiet=True)
        files = sorted(file.relative_to(staging).as_posix() for file in staging.rglob("*") if file.is_file())
        for child in staging.iterdir():
            child.rename(path / child.name)
    except OSError as error:
        raise NnxError(
            f"the project cannot be written to {str(path)!r}: {error.strerror or error}.",
            remedy="Choose a directory that you may write to.",
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        if not existed and path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    return files


def _report(path: Path, answers: Answers, files: list[str], *, as_json: bool) -> None:
    remarks = name_remarks(answers.strategy)
    commands = [f"cd {path}", 'pip install -e ".[test]"', f"nnx conformance {answers.strategy}", "pytest"]
    if as_json:
        print_json(
            {
                "path": str(path),
                **asdict(answers),
                "files": files,
                "remarks": remarks,
                "next": commands,
            }
        )
        return
    for remark in remarks:
        print_note(f"remark: {remark}")
    print_text(f"{answers.distribution}: {len(files)} files in {path}. Next:")
    for command in commands:
        print_text(f"  {command}")
