"""The command names plugins that harm their process, lists the others, and keeps only good answers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from nnx_checkpoint.cli.command import main

SPEC = "from nnx_core import StrategySpec, hookimpl\n@hookimpl\ndef nnx_strategies():\n    return "
FINE = SPEC + "[StrategySpec('bad', 'some:Thing')]"

HOSTILE = {
    "loops at import": ("while True: pass", "it did not answer within 1 seconds"),
    "takes its time": ("import time; time.sleep(10)\n" + FINE, "it did not answer within 1 seconds"),
    "leaves without a word": (
        "import os; os._exit(0)",
        "it ended the process that looked at it (exit status 0)",
    ),
    "kills": (
        "import os; os.kill(os.getpid(), 9)",
        "it ended the process that looked at it (exit status -9)",
    ),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "cannot be quoted": (
        "class Mute(Exception):\n    def __str__(self): raise SystemExit\nraise Mute",
        "Mute: (its message cannot be shown)",
    ),
    "no importers": ("import sys; sys.meta_path = None\n" + FINE, "it takes importers out of sys.meta_path"),
    "a long description": (
        SPEC + "[StrategySpec('bad', 'a:B', description='x' * 50_000_000)]",
        "declares a description of 50000000 characters",
    ),
    "very many names": (
        SPEC + "[StrategySpec(f'bad{i}', 'a:B') for i in range(5000)]",
        "expected at most 1048576",
    ),
    "floods the pipe": (
        "import os\nfor fd in range(3, 30):\n    try:\n        while True: os.write(fd, b'x' * 65536)\n"
        "    except OSError: pass\n",
        "it wrote more than 1048576 bytes into the pipe of its answer",
    ),
    "steers the terminal": (r"raise ValueError('\x1b]0;owned\x07')", r"ValueError: \x1b]0;owned\x07"),
    "takes json away": ("import json; json.dumps = None\nraise ValueError('me')", "ValueError: me"),
}

HARMLESS = {
    "writes everywhere": (
        "import os, sys\nos.write(1, b'{'); os.write(2, b'{'); sys.__stdout__.write('{'); print('{')\n" + FINE
    ),
    "reads from the terminal": "try: input()\nexcept EOFError: pass\n" + FINE,
    "asks who is there": "from nnx_core.names.discovery import inventory\nassert not inventory().specs\n"
    + FINE,
}


@pytest.fixture
def command(capfd: Any, site: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the command with only the plugins of the test; returns exit code, standard output and error.

    `site` comes before `monkeypatch`: its names are forgotten when its plugins are out of sight.
    """
    monkeypatch.setenv("NNX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NNX_LOAD_PLUGINS", "aa-fine,bb-odd,cc-fine")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # whose folder would change the directory
    monkeypatch.setattr("nnx_core.names.plugin_processes._SECONDS", 1)
    site.provide("aa-fine", "before")
    site.provide("cc-fine", "after")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nnx", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        return (int(caught.value.code or 0), *capfd.readouterr())

    return run


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(("source", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_plugin_is_named_and_the_others_are_listed(
    command: Any, site: Any, source: str, said: str
) -> None:
    site.add("bb-odd", source)
    importers = [*sys.meta_path]
    code, output, _ = command("list", "--json")
    content = json.loads(output)
    assert [entry["name"] for entry in content["strategies"]] == ["after", "before"]
    (problem,) = content["problems"]
    assert (code, problem["plugin"], problem["distribution"]) == (0, "bb_odd", "bb-odd 1.0")
    assert said in problem["detail"].encode("unicode_escape").decode()
    assert sys.meta_path == importers
    assert "bb_odd_plugin" not in sys.modules


@pytest.mark.full
def test_every_verb_names_it_with_the_reason_and_the_right_exit_code(command: Any, site: Any) -> None:
    site.add("bb-odd", r"import os; os.write(1, b'\x1b'); os._exit(3)")
    reason = "it ended the process that looked at it (exit status 3)."
    for arguments, expected in (
        (["list"], 0),
        (["search", "before"], 0),
        (["show", "before"], 0),
        (["doctor"], 1),
    ):
        code, output, error = command(*arguments)
        assert code == expected
        assert "before" in output
        assert "\x1b" not in output + error
        if arguments != ["show", "before"]:
            assert reason in output + error
    code, output, _ = command("doctor", "--json")
    assert (code, json.loads(output)["ok"]) == (1, False)
    assert reason in output


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("source", HARMLESS.values(), ids=HARMLESS)
def test_what_a_plugin_writes_or_reads_does_not_disturb(command: Any, site: Any, source: str) -> None:
    site.add("bb-odd", source)
    code, output, error = command("list", "--json")
    assert (code, error) == (0, "")
    assert [entry["name"] for entry in json.loads(output)["strategies"]] == ["after", "bad", "before"]


@pytest.mark.full
def test_answers_are_kept_until_the_plugin_changes(
    command: Any, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nnx_core.names import plugin_processes

    asked: list[str] = []
    real = plugin_processes._ask

    def noted(visited: Any) -> Any:
        asked.append(visited[1].name)
        return real(visited)

    monkeypatch.setattr(plugin_processes, "_ask", noted)

    def names() -> tuple[list[str], list[str]]:
        asked.clear()
        found = [entry["name"] for entry in json.loads(command("list", "--json")[1])["strategies"]]
        return found, sorted(asked)

    site.add("bb-odd", "import bb_part\n" + FINE, modules={"bb_part": ""})
    everybody = (["after", "bad", "before"], ["aa_fine", "bb_odd", "cc_fine"])
    assert names() == everybody
    assert names() == (everybody[0], [])
    (site.path / "bb_part.py").write_text("raise ImportError  # one of its files")
    assert names() == (["after", "before"], ["bb_odd"])
    assert names() == (["after", "before"], ["bb_odd"])  # a failure is not kept
    (site.path / "bb_part.py").write_text("")
    names()
    (site.path / "installed_since").mkdir()
    assert names() == everybody
    for kept in (Path(os.environ["NNX_CACHE_DIR"]) / "plugins").iterdir():
        kept.write_text('{"key": 1, "files": {"\\u0000": 1}}')
    assert names() == everybody
