"""Looking at plugins from outside: each is imported by a process of its own, and its answer is kept.

`nnx list`, `show`, `search` and `doctor` look this way, so that a plugin that loops, exits, prints or tampers
with its process harms neither the command nor the other plugins. Only good answers are kept, and only while
the plugin's files, its version and what is installed beside it are as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import EntryPoint, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nnx_core.json_files import cache_directory, read_json, write_json
from nnx_core.names.discovery import Inventory, Visited, _State
from nnx_core.names.plugins import GROUP, Plugin, RefusedError, load, new_manager
from nnx_core.names.spec import Capabilities, StrategySpec

_START_SECONDS = 60.0
_SECONDS = 5.0
_LONGEST_ANSWER = 1 << 20
_AT_ONCE = 4
# The path comes first: with `-c` alone, modules of the working directory would hide others.
_CHILD = (
    "import sys; sys.path[:] = sys.argv[5:]; "
    "from nnx_core.names.plugin_processes import answer; answer(*sys.argv[1:5])"
)


@contextmanager
def looking_from_outside() -> Iterator[None]:
    """Make `nnx_core.names.discovery.inventory` read plugins in other processes, in a context.

    It has the names then and what is declared of them, and cannot call another hook.
    """
    before = _State.found
    _State.found, _State.ask = None, look
    try:
        yield
    finally:
        _State.found, _State.ask = before, None


def look(visited: Sequence[Visited]) -> list[list[StrategySpec] | RefusedError]:
    """Return each plugin's strategies, or the reason for its refusal, in the given order.

    Args:
        visited: Entry points, and their metadata before the import.
    """
    kept = [_recall(entry, plugin) for entry, plugin in visited]
    missing = [pair for pair, specs in zip(visited, kept, strict=True) if specs is None]
    if not missing:
        return [specs or [] for specs in kept]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        asked = pool.map(_ask, missing)
        return [next(asked) if specs is None else specs for specs in kept]


def _ask(visited: Visited) -> list[StrategySpec] | RefusedError:
    """Read one plugin in a new process."""
    entry, plugin = visited
    key = _key(entry, plugin)  # as it was before the plugin was looked at
    arguments = [entry.name, entry.value, plugin.distribution, plugin.version, *map(str, sys.path)]
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, *arguments],
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        output = _read_answer(process)
    except subprocess.TimeoutExpired as error:
        return _refused(plugin, f"it did not answer within {error.timeout:g} seconds.")
    finally:
        _end(process)
    if len(output) > _LONGEST_ANSWER:
        return _refused(plugin, f"it wrote more than {_LONGEST_ANSWER} bytes into the pipe of its answer.")
    try:
        content = json.loads(output)
        if "refused" in content:
            return RefusedError(*content["refused"])
        specs = [_spec(declared) for declared in content["specs"]]
    except Exception:  # nothing, or something else than an answer of ours
        return _refused(plugin, f"it ended the process that looked at it (exit status {process.returncode}).")
    if key is not None:
        write_json(_place(entry, plugin), {"key": key, **content})
    return specs


def _read_answer(process: subprocess.Popen[bytes]) -> bytes:
    """Read the answer of the process up to its end, or to a maximum length.

    Raises:
        subprocess.TimeoutExpired: It did not start, or did not end, in time.
    """
    assert process.stdout is not None
    answer, pipe = bytearray(), process.stdout.fileno()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    limit, size = _START_SECONDS, 1
    deadline = time.monotonic() + limit
    while True:
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise subprocess.TimeoutExpired(process.args, limit)
        data = os.read(pipe, size)
        if size == 1:  # from here on it is the plugin that takes time, not the start of Python
            limit, size = _SECONDS, 1 << 16
            deadline = time.monotonic() + limit
        else:
            answer += data
        if not data:
            process.wait(max(0.1, deadline - time.monotonic()))
            return bytes(answer)
        if len(answer) > _LONGEST_ANSWER:
            return bytes(answer)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children."""
    with process:
        if hasattr(os, "killpg"):
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                return
        else:
            process.kill()


def _refused(plugin: Plugin, detail: str) -> RefusedError:
    remedy = f"Reinstall or upgrade {plugin.distribution}, or set NNX_DISABLE_PLUGINS={plugin.name}."
    return RefusedError("import", detail, remedy)


def answer(name: str, value: str, distribution: str, version: str) -> None:
    """Read one plugin in this process, write the result as JSON, and end the process.

    Args:
        name: The name of the entry point.
        value: The value of the entry point.
        distribution: The name of the package that declares it.
        version: The version of that package.
    """
    dumps, write, leave = json.dumps, os.write, os._exit
    out = os.dup(1)
    os.dup2(2, 1)  # What the plugin writes must not end up in the answer.
    _State.unfinished = Inventory()  # It need not look at the others.
    plugin = Plugin(name, distribution, version, "ok")
    before = set(sys.modules)
    write(out, b" ")
    content: dict[str, Any]
    try:
        specs = load(new_manager(), EntryPoint(name, value, GROUP), plugin)
        content = {"specs": [spec.as_dict() for spec in specs], "files": _stamps(_files(before))}
        text = dumps(content).encode()
        if len(text) > _LONGEST_ANSWER:
            detail = f"what it declares takes {len(text)} bytes: expected at most {_LONGEST_ANSWER}."
            raise RefusedError("result", detail, "Report this to the authors of the plugin.")
    except RefusedError as refused:
        text = dumps({"refused": [refused.kind, refused.detail, refused.remedy]}).encode()
    except BaseException as error:  # of what it returned
        fault = _refused(plugin, f"what it declares cannot be read: {type(error).__name__}.")
        text = dumps({"refused": ["result", fault.detail, fault.remedy]}).encode()
    while text:
        text = text[write(out, text) :]
    leave(0)


def _files(before: set[str]) -> list[str]:
    """Return the files of the modules that were imported since."""
    modules = [module for name, module in list(sys.modules.items()) if name not in before]
    found = {getattr(module, "__file__", None) for module in modules}
    return sorted(file for file in found if isinstance(file, str))


def _recall(entry: EntryPoint, plugin: Plugin) -> list[StrategySpec] | None:
    """Return the answer of an earlier run (unless files have changed since)."""
    key = _key(entry, plugin)
    try:
        content = read_json(_place(entry, plugin))
        if key is None or content["key"] != key or content["files"] != _stamps(content["files"]):
            return None
        return [_spec(declared) for declared in content["specs"]]
    except Exception:  # the file may have any content; the plugin is read again then
        return None


def _place(entry: EntryPoint, plugin: Plugin) -> Path:
    what = "\n".join([sys.prefix, plugin.distribution, entry.name])
    return cache_directory("plugins") / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


def _key(entry: EntryPoint, plugin: Plugin) -> list[Any] | None:
    """Return a key of everything outside of the plugin's files that its answer depends on; None if unknown.

    The directory that it is installed in changes with every `pip install` and `pip uninstall`.
    """
    try:
        directory = str(entry.dist.locate_file(""))  # type: ignore[union-attr]
        found = find_spec(entry.value.partition(":")[0].partition(".")[0])
        cache_directory()  # a user may have no home
        what = [sys.version, version("nnx-core"), plugin.version, entry.value, found and found.origin]
        return [*what, directory, *_stamps([directory]).values()]
    except Exception:  # a damaged installation
        return None


def _stamps(files: Sequence[str]) -> dict[str, list[int]]:
    """Return modification time and size of each file."""
    return {file: [(status := Path(file).stat()).st_mtime_ns, status.st_size] for file in files}


def _spec(declared: dict[str, Any]) -> StrategySpec:
    """Make a spec from its `as_dict`."""
    capabilities: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in declared["capabilities"].items()
    }
    more = {"capabilities": Capabilities(**capabilities), "api_version": tuple(declared["api_version"])}
    return StrategySpec(**{**declared, **more})
