"""Compare saving and loading before and after a change: the sources at a commit and the present ones.

    python benchmarks/checkpoint_before_after.py --laps 20 a2712f2

Two ranks with the old sources and two with the present ones hold the state of `checkpoint.py`. They take
turns with every single save and load, so that both see the same minute of a noisy machine. The output is the
median of the quotients of neighbouring laps, with half their interquartile range. Exit code 1 if one is
above the bar.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("save", "load cold", "load warm")


def main() -> int:
    """Drive both sides, or be one of their ranks."""
    if "RANK" in os.environ:
        return be_rank()
    arguments = parse_arguments()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory)))
        before = stack.enter_context(worktree(place / "tree", arguments.base))
        sides = {
            "before": stack.enter_context(ranks(before, place / "before", arguments.megabytes)),
            "after": stack.enter_context(ranks(ROOT, place / "after", arguments.megabytes)),
        }
        quotients: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for lap in range(arguments.laps + 1):
            for kind in KINDS:
                names = list(sides) if lap % 2 else list(reversed(sides))
                seconds = {name: timed(sides[name], kind) for name in names}
                if lap:  # the first warms up
                    quotients[kind].append(seconds["after"] / seconds["before"])
    return judge(quotients, arguments.bar)


@contextmanager
def worktree(path: Path, commit: str) -> Iterator[Path]:
    """The sources as they were."""
    git = ["git", "worktree"]
    subprocess.run([*git, "add", "--detach", "--quiet", path, commit], cwd=ROOT, check=True)
    try:
        yield path
    finally:
        subprocess.run([*git, "remove", "--force", path], cwd=ROOT, check=True)


@contextmanager
def ranks(tree: Path, directory: Path, megabytes: int) -> Iterator[subprocess.Popen[str]]:
    """Two ranks on a tree's sources; rank 0 is asked through its standard input."""
    directory.mkdir()
    sources = [str(tree / "benchmarks"), *map(str, tree.glob("packages/*/src"))]
    shared = {"PYTHONPATH": os.pathsep.join(sources), "NNX_AUTOLOAD": "0"}
    command = [sys.executable, "-P", __file__, str(directory), str(megabytes)]
    both = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield both[0]
    finally:
        for process in both:
            process.kill()
            process.wait()


def timed(rank0: subprocess.Popen[str], kind: str) -> float:
    """Seconds of the slower rank."""
    assert rank0.stdin is not None and rank0.stdout is not None
    print(kind, file=rank0.stdin, flush=True)
    return float(rank0.stdout.readline())


def be_rank() -> int:
    """Save and load as rank 0 is asked to."""
    import torch.distributed as dist
    from checkpoint import Contest  # that of this side's sources

    directory = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"file://{directory}.store", rank=rank, world_size=2)
    contest = Contest(directory, int(sys.argv[2]))
    while True:
        asked = [sys.stdin.readline().strip() if rank == 0 else ""]
        dist.broadcast_object_list(asked)
        if asked[0] == "save":
            contest.clear(["nnx"])
        elif asked[0] == "load cold":
            contest.forget()
        else:
            contest.loaders["nnx"]()
        action = contest.savers["nnx"] if asked[0] == "save" else contest.loaders["nnx"]
        seconds = contest.timed(action)
        if rank == 0:
            print(seconds, flush=True)


def judge(quotients: dict[str, list[float]], bar: float) -> int:
    """Print the medians; whether all are below the bar."""
    worst = 0.0
    for kind, values in quotients.items():
        median = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4)
        print(f"{kind:10s} after/before {median:.3f} +- {(high - low) / 2:.3f} ({len(values)} pairs)")
        worst = max(worst, median)
    return int(worst > bar)


def parse_arguments() -> argparse.Namespace:
    """Command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--laps", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=1020)
    parser.add_argument("--directory", default=None, help="where to write; default: the temporary directory")
    parser.add_argument("--bar", type=float, default=1.02)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
