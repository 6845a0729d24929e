"""Kills groups of elastic runs at random moments, and compares each run with one that nobody disturbed.

    python benchmarks/kill_ranks.py --strategy torchft_ddp --kills 20 --seed 1
    python benchmarks/kill_ranks.py --strategy torchft_hsdp --groups 2 --ranks 2 --kills 20 --seed 1

A kill strikes one process, and ends the others of its group, as the launcher does. Of the kills, a fifth
strikes a group while it heals, and a fifth while it saves; a group is always left. Every run is compared with
one process: the samples of each step, from what the groups wrote before they reduced gradients, and the
parameters at the end. The exit code is 1 if anything was lost, or if more steps were computed again than
processes were killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/nnx-torchft/tests"))
from jobs.elastic import Group, Run, undisturbed

BATCH = 12
"""The samples of a global batch."""


@dataclass
class Verdict:
    """The findings of all runs."""

    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    difference: float = 0.0
    gap: float = 0.0
    gap_of_several: float = 0.0
    killed: list[float] = field(default_factory=list)
    steps: int = 0
    again: int = 0
    samples: int = 0

    def measure(self, begin: float, end: float) -> None:
        """Measure the time between two steps of a group that survived."""
        if sum(begin - 0.1 <= killed <= end for killed in self.killed) > 1:
            self.gap_of_several = max(self.gap_of_several, end - begin)
        else:
            self.gap = max(self.gap, end - begin)


def disturb(groups: list[Group], verdict: Verdict, kinds: list[str], chance: random.Random) -> None:
    """Kill groups, and start each again, until the run has ended or no kill is left; wait for its end."""
    due, began = time.time() + chance.uniform(0.5, 2.5), time.time()
    seen = dict.fromkeys(range(len(groups)), 0)
    while all(group.is_alive for group in groups) and time.time() - began < 600:
        time.sleep(0.002)
        news = [group.notes[seen[index] :] for index, group in enumerate(groups)]
        seen = {index: len(group.notes) for index, group in enumerate(groups)}
        training = [index for index, group in enumerate(groups) if group.commits > 2]
        if not kinds or not training or time.time() < due:
            continue
        victim = _victim(news, training, kinds[-1], chance)
        if victim is None:
            if time.time() > due + 2:  # no group heals, or saves: kill one, which heals later
                kinds.append(kinds.pop(kinds.index("step")) if "step" in kinds else "step")
            continue
        group = groups[victim]
        verdict.killed.append(time.time())
        group.kill(chance.randrange(group.run.ranks))
        groups[victim], seen[victim] = Group(group.run, group.name), 0
        verdict.kills[kinds.pop()] += 1
        due = time.time() + chance.uniform(0.3, 1.5)
    until = time.time() + 120
    for group in groups:
        for process in group.processes:
            process.join(max(0.0, until - time.time()))
        if any(process.is_alive() for process in group.processes):
            verdict.lost.append(f"{group.run.folder.name}: {group.name} does not end")
            group.kill()


def _kinds(kills: int, chance: random.Random) -> list[str]:
    """Return the moments of all kills in random order: a fifth while healing, and a fifth while saving."""
    fifth = kills // 5
    kinds = ["heal"] * fifth + ["save"] * fifth + ["step"] * (kills - 2 * fifth)
    chance.shuffle(kinds)
    return kinds


def _victim(
    news: list[list[dict[str, Any]]], training: list[int], wanted: str, chance: random.Random
) -> int | None:
    """Return the group to kill now, if another one trains."""
    if wanted == "step":
        return chance.choice(training) if len(training) > 1 else None
    key = {"heal": "heals", "save": "saves"}[wanted]
    for index, own in enumerate(news):
        survives = any(other != index for other in training)
        if survives and any(key in each for each in own):
            return index
    return None


def examine(folder: Path, groups: list[Group], reference: Path, verdict: Verdict, *, kills: int) -> None:
    """Compare a run with the undisturbed one, and its steps that were computed again with its kills."""
    true = _steps(reference)
    notes = [
        [json.loads(line) for line in p.read_text().splitlines() if line.endswith("}")]
        for p in folder.glob("*.jsonl")
    ]
    again: set[tuple[int, int]] = set()
    shares: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
    committed: dict[int, set[int]] = defaultdict(set)
    for process in notes:
        attempts: dict[int, Any] = {}
        tries: Counter[int] = Counter()
        last: float | None = None
        for each in process:
            if "rows" in each:
                if tries[each["step"]]:
                    again.add((each["step"], tries[each["step"]]))
                tries[each["step"]] += 1
                attempts[each["step"]] = each
                shares[each["step"], each["of"]][each["index"]] = each["rows"]
            elif "committed" in each:
                committed[each["committed"]].add(attempts[each["committed"]]["of"])
                if last is not None:
                    verdict.measure(last, each["time"])
                last = each["time"]
    for step, rows in true.items():
        seen = [
            sorted(row for k in range(of) for row in shares[step, of].get(k, []))
            for of in committed.get(step, set())
        ]
        verdict.samples += len(rows)
        if len(seen) != 1 or seen[0] != sorted(rows):
            verdict.lost.append(f"{folder.name}: step {step} trained {seen} and not {sorted(rows)}")
    verdict.steps += len(true)
    verdict.again += len(again)
    if len(again) > kills:
        verdict.lost.append(f"{folder.name}: {len(again)} steps were computed again after {kills} kills")
    _compare_ends(folder, groups, reference, verdict)


def _compare_ends(folder: Path, groups: list[Group], reference: Path, verdict: Verdict) -> None:
    """Compare the weights at the end of a run with those of the undisturbed one, and open its checkpoints."""
    import torch

    from nnx_checkpoint import open_checkpoint

    weights = torch.load(reference / "plain.pt")
    ended = [
        torch.load(folder / f"{group.name}.pt") for group in groups if (folder / f"{group.name}.pt").exists()
    ]
    if not ended:
        verdict.lost.append(f"{folder.name}: no group has ended the run")
    for state in ended:
        verdict.difference = max(
            verdict.difference, *(float((state[name] - value).abs().max()) for name, value in weights.items())
        )
    for path in (folder / "saves").iterdir() if (folder / "saves").exists() else ():
        try:
            open_checkpoint(path)
        except Exception as error:
            if not _is_interrupted(path):
                verdict.lost.append(f"{folder.name}: {path.name}: {error}")


def draw(folder: Path, reference: Path, killed: list[float], file: Path) -> None:
    """Draw the loss of one run over time, with its groups and the kills, beside the undisturbed loss."""
    import matplotlib.pyplot as plt

    shares: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("}") and "rows" in (each := json.loads(line)):
                shares[each["step"]][each["index"]] = each
    steps = sorted(shares)
    of = [max(shares[step].values(), key=lambda each: each["time"])["of"] for step in steps]
    last = [max(each["time"] for each in shares[step].values()) for step in steps]
    losses = []
    for step, groups in zip(steps, of, strict=True):
        used = [each for each in shares[step].values() if each["of"] == groups]
        losses.append(sum(len(each["rows"]) * each["loss"] for each in used) / BATCH)
    (path,) = reference.glob("plain.*.jsonl")
    plain = {
        each["step"]: each["loss"]
        for each in map(json.loads, path.read_text().splitlines())
        if "rows" in each
    }
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 4), height_ratios=(3, 1))
    seconds = [each - last[0] for each in last]
    above.plot(seconds, losses, label="groups that are killed")
    above.plot(seconds, [plain[step] for step in steps], "--", label="one process, at the same step")
    below.step(seconds, of, where="post")
    for each in killed:
        if last[0] <= each <= last[-1]:
            above.axvline(each - last[0], color="tab:red", linewidth=0.5)
    above.set(ylabel="loss", title="Kills (red) and the loss")
    above.legend()
    below.set(ylabel="groups", xlabel="seconds", ylim=(0.5, max(of) + 0.5))
    figure.tight_layout()
    figure.savefig(file)


def _is_interrupted(path: Path) -> bool:
    """Return True for a first save that was killed before its commit: nothing was there to keep."""
    return not (path / "manifest.json").exists()


def _steps(folder: Path) -> dict[int, list[int]]:
    (path,) = folder.glob("plain.*.jsonl")
    notes = map(json.loads, path.read_text().splitlines())
    return {each["step"]: each["rows"] for each in notes if "rows" in each}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="torchft_ddp", choices=["torchft_ddp", "torchft_hsdp"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="the processes of a group")
    parser.add_argument("--dtype", default="float64", choices=["float32", "float64"])
    parser.add_argument("--heartbeat", type=float, default=1.5, help="seconds without a sign of life")
    parser.add_argument("--timeout", type=float, default=2.0, help="the strategy's group_timeout")
    parser.add_argument("--picture", type=Path, help="a file for a picture of the first run")
    parser.add_argument("--keep", type=Path, help="a folder for what the groups write")
    return parser.parse_args()


def main() -> int:
    """Run the benchmark."""
    given = _arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    from nnx_torchft._torchft_compat import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=20_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * given.heartbeat),
    )
    address = f"127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    folder = given.keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    work = Run(
        folder=folder,
        lighthouse=address,
        strategy=given.strategy,
        ranks=given.ranks,
        options={"group_timeout": given.timeout},
        samples=600,
        batch=BATCH,
        epochs=6,
        pause=0.04,
        precision={"float64": "64-true", "float32": "32-true"}[given.dtype],
        save_every=10,
    )
    reference = undisturbed(work).run.folder
    verdict, chance = Verdict(), random.Random(given.seed)
    kinds = _kinds(given.kills, chance)
    while kinds:
        run = folder / f"run{verdict.runs}"
        run.mkdir()
        groups = [Group(replace(work, folder=run), f"g{index}") for index in range(given.groups)]
        before = len(verdict.killed)
        disturb(groups, verdict, kinds, chance)
        examine(run, groups, reference, verdict, kills=len(verdict.killed) - before)
        verdict.runs += 1
        print(f"run {verdict.runs}: {dict(verdict.kills)} kills, {len(verdict.lost)} losses", flush=True)
        if verdict.lost:
            break
    if given.picture:
        draw(folder / "run0", reference, verdict.killed, given.picture)
    return _conclude(verdict, given, folder)


def _conclude(verdict: Verdict, given: argparse.Namespace, folder: Path) -> int:
    bound = {"float64": 1e-12, "float32": 1e-6}[given.dtype]
    print(
        f"runs {verdict.runs}, kills {dict(verdict.kills)}, steps {verdict.steps}, samples {verdict.samples}"
    )
    print(f"steps computed again {verdict.again}, at most one for each of {len(verdict.killed)} kills")
    print(
        f"largest difference of a parameter to one process {verdict.difference:.1e} "
        f"({given.dtype}, at most {bound:g})"
    )
    print(
        f"longest gap between two steps of a survivor {verdict.gap:.2f} s; with several kills in it "
        f"{verdict.gap_of_several:.2f} s (heartbeat {given.heartbeat:g} s, group timeout {given.timeout:g} s)"
    )
    for each in verdict.lost[:10]:
        print(each)
    failed = bool(verdict.lost) or not verdict.difference <= bound
    if given.keep is None and not failed:
        shutil.rmtree(folder)
    elif failed:
        print(f"what the groups wrote is in {folder}")
    print(
        "LOST"
        if failed
        else "nothing was lost: every sample counted once, and the weights are those of one process"
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
