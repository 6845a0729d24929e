"""The fenced blocks of the documentation: run, only parsed, or shown for a reason.

`docs_table` lists the blocks that are not run; `docs_jobs` runs the others.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("packages/*/README.md")])
LANGUAGES = ("python", "bash", "console", "yaml", "toml", "json", "text", "diff")

_ELSEWHERE = (
    (re.compile(r"""(accelerator|map_location)=(["'])(?:cuda|gpu)\2"""), r"\1=\2cpu\2"),
    (re.compile(r"\bnum_nodes=\d+"), "num_nodes=1"),
)


@dataclass(frozen=True)
class Block:
    """One fenced block: where it begins, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """The commands of a shell block, without comments and with continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        stripped = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines)
        return [re.sub(r"\s+", " ", line) for line in stripped if line]

    def outputs(self) -> list[str]:
        """Return the output that a console block shows below each of its commands."""
        return [part.partition("\n")[2] for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]]


def lay_out(source: Path, name: str) -> None:
    """Copy a folder into the working directory, whichever rank is first: it appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=".") as aside:
        made = Path(shutil.copytree(source, Path(aside) / "copy"))
        with suppress(OSError):  # another rank was first
            made.rename(name)


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    found: list[Block] = []
    opening: tuple[str, str, int] | None = None
    body: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = re.match(r"(\s*)```(\w*)", line)
        if opening is None and fence:
            opening, body = (fence[1], fence[2], number), []
        elif opening is not None and line.strip() == "```":
            indent, language, start = opening
            text = "\n".join(each.removeprefix(indent) for each in body)
            found.append(Block(name, start, language, text))
            opening = None
        else:
            body.append(line)
    return found


def here(text: str, *, ranks: int) -> str:
    """A block as it runs on this machine: on CPU, with as many devices as the page has ranks.

    Nothing else of a block is changed.

    Example:
        >>> here('Trainer(accelerator="cuda", devices=8)', ranks=2)
        'Trainer(accelerator="cpu", devices=2)'
    """
    for pattern, replacement in _ELSEWHERE:
        text = pattern.sub(replacement, text)
    return re.sub(r"\bdevices=\d+", f"devices={ranks}", text)


def words(command: str) -> list[str]:
    """A command as the shell would split it."""
    return shlex.split(command)


def same_output(shown: str, printed: str) -> str:
    """Return the first shown line that was not printed in its place; empty if all were.

    `...` stands for any text, within a line or as separate lines. Numbers, ids and drawings with them vary;
    so any number matches any other, and any space matches any other.
    """
    wanted = [_masked(line) for line in shown.strip().splitlines()]
    lines = iter([_masked(line) for line in printed.strip().splitlines()])
    skipping = False
    for original, line in zip(shown.strip().splitlines(), wanted, strict=True):
        if line == "...":
            skipping = True
            continue
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in line.split("...")))
        matches = (pattern.fullmatch(each) is not None for each in lines)
        if not (any(matches) if skipping else next(matches, False)):
            return original
        skipping = False
    return ""


def _masked(line: str) -> str:
    line = re.sub(r"[█░▏▎▍▌▋▊▉]+", "", line)
    line = re.sub(r"\d{8}T\d{6}\.\d+-[0-9a-f]{8}", "#", line)
    line = re.sub(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", "#", line)
    return re.sub(r"\s+", " ", re.sub(r"-{3,}", "---", line)).strip()
