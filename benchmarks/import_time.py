"""What nnx adds to `import torch`, and how long `nnx list` takes.

    python benchmarks/import_time.py [--rounds 15] [--json]

Both sides run in one go: each round starts cold processes with the hook off and on, in alternating
order, and times `import torch` inside the process. The difference is that of the medians; the hook by
itself is timed as well, because it is far smaller than the noise of importing torch. Bars: under 5 ms
added, and `nnx list` under 0.5 s with torch not imported.
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

# What torch does for the entry point, once everything that it imports is there.
HOOK_ALONE = """
import time
import os, sys, importlib.metadata
start = time.perf_counter()
(entry,) = [e for e in importlib.metadata.entry_points(group="torch.backends") if e.name == "nnx"]
found = time.perf_counter()
entry.load()()
print((time.perf_counter() - found) * 1e3)
"""

LIST_MODULES = "import sys; sys.argv = ['nnx', 'list']\nfrom nnx.cli import main\ntry: main()\n" + (
    "finally: assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
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
    hook: list[float] = []
    listing: list[float] = []
    for number in range(arguments.rounds):
        order = list(SIDES) if number % 2 else list(reversed(SIDES))
        for side in order:
            loaded = "TORCH_DEVICE_BACKEND_AUTOLOAD" not in SIDES[side]
            times[side].append(_printed(IMPORT_TORCH.format(loaded=loaded), SIDES[side]))
        hook.append(_printed(HOOK_ALONE, {}))
        listing.append(_wall_of_list())
    _run([sys.executable, "-c", LIST_MODULES], {})
    return _report(times, hook, listing, as_json=arguments.json)


def _report(times: dict[str, list[float]], hook: list[float], listing: list[float], *, as_json: bool) -> int:
    medians = {side: statistics.median(values) for side, values in times.items()}
    added = medians["nnx autoload"] - medians["NNX_AUTOLOAD=0"]
    hook_ms, list_s = statistics.median(hook), statistics.median(listing)
    ok = added < ADDED_MS and hook_ms < ADDED_MS and list_s < LIST_S
    if as_json:
        result = {
            "import_torch_ms": medians,
            "added_ms": added,
            "hook_ms": hook_ms,
            "list_s": list_s,
            "ok": ok,
        }
        print(json.dumps(result, indent=2))
        return int(not ok)
    for side, values in times.items():
        print(f"import torch, {side:<27} median {medians[side]:8.1f} ms   best {min(values):8.1f} ms")
    print(f"added by the autoload                    {added:+15.2f} ms   (bar: < {ADDED_MS:.0f} ms)")
    print(f"the hook by itself, loaded and called     median {hook_ms:7.2f} ms   (bar: < {ADDED_MS:.0f} ms)")
    print(f"nnx list, wall                            median {list_s:7.3f} s    (bar: < {LIST_S} s)")
    print("all bars met" if ok else "A BAR IS MISSED")
    return int(not ok)


def _printed(program: str, settings: dict[str, str]) -> float:
    return float(_run([sys.executable, "-c", program], settings))


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
