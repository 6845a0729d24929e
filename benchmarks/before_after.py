"""Compare a benchmark's ratios before and after a change: its version at a commit and the present one.

    python benchmarks/before_after.py --rounds 5 a2712f2 step_time.py --steps 60

The two sides take turns. Each runs its own copy of the benchmark on its own sources, and is first in every
other round. A benchmark of this folder prints ratios of nnx over another program in the same run. These are
stable on a busy machine, while times are not. For every such line this prints the median ratio before and
after, and the median quotient over the rounds. Exit code 1 if a quotient of processor time is above the bar.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_RATIO = re.compile(r"(?P<what>.*?)(?:ratio|median of the ratios of all pairs) +(?P<ratio>\d+\.\d+)")


def main() -> int:
    """Run both sides in turns, print and judge."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as place:
        before = Path(place) / "before"
        subprocess.run(
            ["git", "worktree", "add", "--detach", "--quiet", before, arguments.base], cwd=ROOT, check=True
        )
        try:
            rounds = [ratios_of_round(number, before, arguments) for number in range(arguments.rounds)]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    return judge(rounds, arguments.bar)


def ratios_of_round(
    number: int, before: Path, arguments: argparse.Namespace
) -> tuple[dict[str, float], dict[str, float]]:
    """The ratios before and after, each side first in every other round."""
    sides = [before, ROOT]
    for tree in sides if number % 2 == 0 else reversed(sides):
        print(
            f"round {number + 1} of {arguments.rounds}: {'before' if tree is before else 'after'}", flush=True
        )
        found = run(tree, arguments.benchmark, arguments.rest)
        if tree is before:
            earlier = found
        else:
            now = found
    return earlier, now


def run(tree: Path, benchmark: str, arguments: list[str]) -> dict[str, float]:
    """Run a tree's benchmark on its sources; its ratios by the lines that they stand in, without numbers."""
    sources = [*map(str, sorted(tree.glob("packages/*/src"))), str(tree / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, tree / "benchmarks" / benchmark, *arguments],
        env=environment,
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):  # 1 is a benchmark above its own bar
        raise SystemExit(f"{tree}: {benchmark} ended with {done.returncode}:\n{done.stdout}")
    found = ratios_in(done.stdout)
    if not found:
        raise SystemExit(f"{tree}: {benchmark} printed no line such as 'clock ratio 1.02':\n{done.stdout}")
    return found


def ratios_in(printed: str) -> dict[str, float]:
    """The ratios that a benchmark printed, by their line without numbers and, if indented, its heading."""
    found: dict[str, float] = {}
    heading = ""
    for line in printed.splitlines():
        if not line.startswith(" "):
            heading = line
        match = _RATIO.match(line)
        if match is not None:
            what = match["what"] if line is heading else heading + match["what"]
            found[" ".join(re.sub(r"[\d.]+", "", what).split())] = float(match["ratio"])
    return found


def judge(rounds: list[tuple[dict[str, float], dict[str, float]]], bar: float) -> int:
    """Print every line that both sides have; whether one of processor time is above the bar."""
    above = False
    for what in [
        line for line in rounds[0][0] if all(line in before and line in after for before, after in rounds)
    ]:
        before, after = ([sides[number][what] for sides in rounds] for number in (0, 1))
        quotients = [one / other for one, other in zip(after, before, strict=True)]
        middle = statistics.median(quotients)
        above |= ("cpu" in what or "processor" in what) and middle > bar
        print(
            f"{what:60} before {statistics.median(before):.3f}  after {statistics.median(after):.3f}  "
            f"after/before {middle:.3f} ({min(quotients):.3f} to {max(quotients):.3f})"
        )
    return int(above)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="The commit to compare with.")
    parser.add_argument("benchmark", help="A file of this folder.")
    parser.add_argument("--rounds", type=int, default=5, help="How often each side runs.")
    parser.add_argument("--bar", type=float, default=1.01, help="The largest quotient of processor time.")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="Arguments of the benchmark.")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
