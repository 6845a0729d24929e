"""Measure the time that nnx adds to `import torch`, and the time of `nnx list`.

    python benchmarks/import_time.py [--rounds 15] [--json]

Each round starts cold processes with the hook off and on, in alternating order. Importing torch takes
over a second and varies by tens of milliseconds, far more than the hook costs. So the bar is checked on
the step of `import torch` that calls nnx: torch's own loop over its extensions, timed with nnx's entry point
hidden and visible, in CPU time, which excludes other work on the machine. Its wall time and that of
the whole import are printed for both sides as well. Bars: under 5 ms added, and `nnx list` under 0.5 s
wall without importing torch; the latter means little if the printed load exceeds the number of cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ADDED_MS, LIST_S = 5.0, 0.5

IMPORT_TORCH = """
import sys, time
start = time.perf_counter()
import torch
print((time.perf_counter() - start) * 1e3)
assert "lightning" not in sys.modules
assert ("_nnx_autoload" in sys.modules) == {loaded}
"""

# The part of `import torch` that finds and calls its extensions; metadata is read from disk either way.
EXTENSIONS = """
import importlib.metadata, time
import torch
everything = importlib.metadata.entry_points
if {hidden}:
    importlib.metadata.entry_points = lambda group: [e for e in everything(group=group) if e.name != "nnx"]
wall, cpu = time.perf_counter(), time.process_time()
torch._import_device_backends()
print((time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3)
import sys
assert ("_nnx_autoload" in sys.modules) != {hidden}
"""

LIST_MODULES = (
    "import sys; sys.argv = ['nnx', 'list']\nfrom nnx_checkpoint.cli.command import main\ntry: main()\n"
    + ("finally: assert 'torch' not in sys.modules and 'lightning' not in sys.modules")
)

# The sides of the comparison: torch's own switch, ours, and the hook at work.
SIDES = {
    "torch without any autoload": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    "NNX_AUTOLOAD=0": {"NNX_AUTOLOAD": "0"},
    "nnx autoload": {},
}


def main() -> int:
    """Run the rounds, print medians, and return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    times: dict[str, list[float]] = {side: [] for side in SIDES}
    extensions: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    listing: list[float] = []
    for number in range(arguments.rounds):
        order = list(SIDES) if number % 2 else list(reversed(SIDES))
        for side in order:
            loaded = "TORCH_DEVICE_BACKEND_AUTOLOAD" not in SIDES[side]
            times[side].append(_printed(IMPORT_TORCH.format(loaded=loaded), SIDES[side])[0])
        for hidden in (True, False) if number % 2 else (False, True):
            program = EXTENSIONS.format(hidden=hidden)
            extensions[hidden].append(_printed(program, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}))
        listing.append(_wall_of_list())
    _run([sys.executable, "-c", LIST_MODULES], {})
    return _report(times, extensions, listing, as_json=arguments.json)


def _report(
    times: dict[str, list[float]],
    extensions: dict[bool, list[tuple[float, ...]]],
    listing: list[float],
    *,
    as_json: bool,
) -> int:
    (hidden, hidden_wall), (visible, visible_wall) = (
        [statistics.median(values) for values in zip(*extensions[side], strict=True)]
        for side in (True, False)
    )
    added, added_wall, list_s = visible - hidden, visible_wall - hidden_wall, statistics.median(listing)
    ok = added < ADDED_MS and list_s < LIST_S
    if as_json:
        imports = {side: statistics.median(values) for side, values in times.items()}
        result = {"added_ms": added, "added_wall_ms": added_wall, "list_s": list_s, "ok": ok}
        print(json.dumps({"import_torch_ms": imports, **result}, indent=2))
        return int(not ok)
    for side, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        print(f"import torch, {side:<27} {median:8.1f} ms   (quartiles {low:.1f} to {high:.1f})")
    print(f"torch's extensions, without ours          {hidden:8.2f} ms   (wall {hidden_wall:.2f})")
    print(f"torch's extensions, with ours             {visible:8.2f} ms   (wall {visible_wall:.2f})")
    print(
        f"added to import torch                     {added:8.2f} ms   "
        f"(wall {added_wall:.2f}; bar: < {ADDED_MS:g})"
    )
    print(f"nnx list, wall                            {list_s:8.3f} s    (bar: < {LIST_S} s)")
    print(f"load of the machine                       {os.getloadavg()[0]:8.2f} on {os.cpu_count()} cores")
    print("all bars met" if ok else "A BAR IS MISSED")
    return int(not ok)


def _printed(program: str, settings: dict[str, str]) -> tuple[float, ...]:
    return tuple(map(float, _run([sys.executable, "-c", program], settings).split()))


def _wall_of_list() -> float:
    command = str(Path(sysconfig.get_path("scripts")) / "nnx")
    start = time.perf_counter()
    _run([command, "list"], {})
    return time.perf_counter() - start


def _run(command: list[str], settings: dict[str, str]) -> str:
    ours = ("NNX_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        command, env={**environment, **settings}, check=True, capture_output=True, text=True, timeout=120
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
