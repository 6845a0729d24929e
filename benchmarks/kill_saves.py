"""Kill savers at random moments, and at every step that touches the file system; no save may be lost.

    python benchmarks/kill_saves.py [--kills 200] [--signal KILL] [--every-step] [--stride 1] [--async]
                                    [--seed 0] [--directory DIR] [--json]

A trial starts one or two processes that save over an existing checkpoint repeatedly, every save with
other values. At a random moment one of them (or all) gets SIGKILL. The survivor must end with an error
instead of hanging. The disk must have a complete and verified checkpoint: the last acknowledged save
or the one after it. ``--every-step`` kills instead right before the first, second, third ... operation on
a name or an open file of one save, until a save succeeds. With ``--async`` the saves are made in the
background, while the saved tensors are overwritten; a save counts as acknowledged after its wait.
With ``--signal TERM`` savers are asked to end. With ``--signal STOP`` one of two is stopped until the other
one gives up, as it must after the timeout of the process group, and then continues.

Savers are forked from this process, which has imported torch but started no threads: a trial costs
a few hundredths of a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import nnx_checkpoint
from nnx_base.shard import Box, Shard, shard_of
from nnx_core.errors import CheckpointError

ROWS, COLUMNS, TENSORS = 256, 1024, 4
DEADLINE = 60.0
PATIENCE = {signal.SIGSTOP: 4.0}
"""The timeout of the process group in seconds, for signals after which somebody waits for it."""
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.listdir", "os.scandir"}


class LostError(Exception):
    """The disk has no complete checkpoint of the right version after a kill."""


def save(path: Path, version: int, rank: int, size: int, *, in_background: bool = False) -> None:
    """Save a state in which every element is the version; it is committed on return."""
    rows = ROWS // size
    box = Box((rank * rows, 0), (rows, COLUMNS))
    tensors = {
        f"w{i}": Shard((ROWS, COLUMNS), torch.int64, (box,), (torch.full(box.size, version),))
        for i in range(TENSORS)
    }
    tensors["replicated"] = shard_of(torch.full((50,), version))
    state: dict[str, Any] = {"objects": {"version": version}, "rank_objects": {"v": version}}
    if not in_background:
        nnx_checkpoint.save(path, tensors=tensors, **state)
        return
    pending = nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(path, tensors=tensors, **state))
    for shard in tensors.values():
        for view in shard.data:
            view.fill_(-version)
    pending.wait()


def check(path: Path, acknowledged: int) -> int:
    """The version on disk, after making sure that it is whole and not older than promised."""
    damage = nnx_checkpoint.verify(path)
    if damage:
        raise LostError(f"damaged: {damage}")
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    version = int(checkpoint.objects["version"])
    if version not in (acknowledged, acknowledged + 1):
        raise LostError(f"version {version} is there, {acknowledged} was acknowledged")
    for name in checkpoint.tensors:
        if not bool((checkpoint.read(name) == version).all()):
            raise LostError(f"tensor {name} is not of version {version}: two saves are mixed")
    for rank in range(checkpoint.world_size):
        if checkpoint.rank_objects(rank) != {"v": version}:
            raise LostError(f"the objects of rank {rank} are not of version {version}")
    return version


def save_forever(
    path: Path,
    start: int,
    rank: int,
    size: int,
    store: Path,
    acknowledge: int,
    in_background: bool,
    timeout: float,
) -> NoReturn:
    """A saver process; it ends by being killed, or by the error that a killed neighbour causes."""
    status = 1
    try:
        if size > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
        version = start
        while True:
            save(path, version, rank, size, in_background=in_background)
            if rank == 0:
                os.write(acknowledge, version.to_bytes(8, "little"))
            version += 1
    except CheckpointError as error:
        status = 3 if "a rank left" in str(error) else 4
        if status == 4:
            print(error, file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(status)


def trial(
    path: Path,
    start: int,
    size: int,
    dice: random.Random,
    scratch: Path,
    in_background: bool,
    how: signal.Signals,
) -> tuple[int, str]:
    """Send a signal once; return the version on disk afterwards and a description of the killed processes."""
    read, write = os.pipe()
    store = scratch / f"store-{start}-{dice.random()}"
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os.close(read)
            save_forever(path, start, rank, size, store, write, in_background, PATIENCE.get(how, 30.0))
        children.append(child)
    os.close(write)
    acknowledged = _first_acknowledgement(read, children)
    time.sleep(dice.uniform(0, 0.12))
    is_stop = how == signal.SIGSTOP
    victim = dice.randrange(size if is_stop else size + 1) if size > 1 else 0
    victims = children if victim == size else [children[victim]]
    for child in victims:
        os.kill(child, how)
    survivors = [child for child in children if child not in victims]
    _reap(survivors, -3)
    if is_stop:
        acknowledged = _last(read, acknowledged)
        check(path, acknowledged)  # while the stopped one may still have files open
    for child in victims:
        os.kill(child, signal.SIGCONT)
    _reap(victims, -3 if is_stop else how)
    acknowledged = _last(read, acknowledged)
    os.close(read)
    what = "all" if victims == children else f"rank {victim}"
    return check(path, acknowledged), f"{size} processes, {what}"


def _first_acknowledgement(read: int, children: list[int]) -> int:
    if not select.select([read], [], [], DEADLINE)[0] or not (data := os.read(read, 8)):
        for child in children:
            os.kill(child, signal.SIGKILL)
        raise LostError("the savers did not start")
    return int.from_bytes(data, "little")


def _last(read: int, acknowledged: int) -> int:
    """The last version that was acknowledged until now."""
    while select.select([read], [], [], 0)[0] and (data := os.read(read, 8)):
        acknowledged = int.from_bytes(data, "little")
    return acknowledged


def _reap(children: list[int], expected: int) -> None:
    """Wait for processes, which must end by a signal, or with the exit code of which this is the negative."""
    limit = time.monotonic() + DEADLINE
    for child in children:
        pid, status = 0, 0
        while pid == 0 and time.monotonic() < limit:
            pid, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.002)
        if pid == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise LostError("a saver hung")
        if os.waitstatus_to_exitcode(status) not in (-expected, expected):
            raise LostError(f"a saver ended with {os.waitstatus_to_exitcode(status)}, not {-expected}")


def kill_before_step(path: Path, version: int, step: int, in_background: bool) -> bool:
    """Save once, killed right before its n-th file operation; whether it got through."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, _: tuple[Any, ...]) -> None:
            nonlocal count
            if event in STEPS:
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            save(path, version, 0, 1, in_background=in_background)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def every_step(path: Path, in_background: bool, stride: int) -> dict[str, int]:
    """Kill one save before each of its file operations, or before every n-th."""
    save(path, 1, 0, 1)
    version, outcomes, step = 1, {"old": 0, "new": 0}, 1 - stride
    while True:
        step += stride
        finished = kill_before_step(path, version + 1, step, in_background)
        found = check(path, version)
        outcomes["new" if found > version else "old"] += 1
        version = found
        if finished:
            return {"steps": step - 1, **outcomes}


def random_kills(
    path: Path, kills: int, seed: int, scratch: Path, in_background: bool, how: signal.Signals
) -> dict[str, int]:
    """Send signals at random moments, alternating between one and two savers."""
    dice = random.Random(seed)
    save(path, 1, 0, 1)
    version = 1
    outcomes: dict[str, int] = {}
    for number in range(kills):
        size = 2 if how == signal.SIGSTOP else 1 + number % 2
        version, what = trial(path, version + 1, size, dice, scratch, in_background, how)
        outcomes[what] = outcomes.get(what, 0) + 1
    return {"kills": kills, "saves": version, **outcomes}


def main() -> None:
    """Run the trials; the exit code is 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--signal", choices=["KILL", "TERM", "STOP"], default="KILL")
    parser.add_argument("--every-step", action="store_true")
    parser.add_argument("--stride", type=int, default=1, help="with --every-step: try every n-th operation")
    parser.add_argument("--async", action="store_true", dest="in_background")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", default=None, help="where to write; default: the temporary directory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(prefix="nnx-kills-", dir=options.directory))
    start = time.monotonic()
    try:
        path = scratch / "a.ckpt"
        if options.every_step:
            result = every_step(path, options.in_background, options.stride)
        else:
            how = signal.Signals[f"SIG{options.signal}"]
            result = random_kills(path, options.kills, options.seed, scratch, options.in_background, how)
    except LostError as error:
        print(f"LOST: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.json:
        print(json.dumps(result))
    else:
        seconds = time.monotonic() - start
        print(", ".join(f"{key}: {value}" for key, value in result.items()))
        print(f"0 lost, 0 mixed, in {seconds:.0f} s")


if __name__ == "__main__":
    main()
