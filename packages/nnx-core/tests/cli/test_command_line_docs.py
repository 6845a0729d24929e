"""The output of ``nnx`` in docs/command-line.md is the real output."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from nnx_checkpoint.cli.command import _application, main
from nnx_core.names.discovery import inventory
from nnx_test_helpers.repository import from_repository

PAGE = from_repository(__file__, "docs/command-line.md")
COMMANDS = re.findall(r"```console\n\$ nnx (.*?)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
OURS = {"nnx-fsdp", "nnx-nnscaler", "nnx-colossalai", "nnx-deepspeed", "nnx-ray", "nnx-tiny"}
"""The distributions that are installed on the page's machine."""
ABSENT = ("nnx-comm", "nnx-fairscale", "nnx-hivemind", "nnx-torchft")
"""The distributions of this repository that the page's machine lacks."""


def test_the_page_names_every_verb_and_shows_those_about_names() -> None:
    app = _application([])
    verbs = {command.name for command in app.registered_commands} | {"ckpt"}
    assert set(re.findall(r"^\| \[?`nnx (\w+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)) == verbs
    shown = {command.split()[0] for command, _ in COMMANDS}
    assert shown == verbs - {"conformance", "diff", "new", "ckpt", "plan"}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_every_screen_is_what_the_command_prints(
    command: str,
    shown: str,
    site: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # without notes of running peers
    for distribution in ABSENT:
        site.hide(distribution)
    installed = {plugin.distribution for plugin in inventory().plugins}
    if installed != OURS:
        pytest.skip(f"the page shows {sorted(OURS)} installed, not {sorted(installed)}")
    for variable in ("NNX_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "argv", ["nnx", *command.split()])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    assert matches(normal(shown), normal(printed.out + printed.err)), printed.out + printed.err


def normal(text: str) -> list[str]:
    """Lines without versions, and without the widths of columns."""
    text = re.sub(r"\b\d+\.\d+\.\d+(\.\w+)?(\+\w+)?\b", "<version>", text)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def matches(shown: list[str], printed: list[str]) -> bool:
    """Return True if the output matches the page; a line of dots on the page matches any lines."""
    if not shown:
        return not printed
    if shown[0] == "...":
        return any(matches(shown[1:], printed[start:]) for start in range(len(printed) + 1))
    return bool(printed) and shown[0] == printed[0] and matches(shown[1:], printed[1:])
