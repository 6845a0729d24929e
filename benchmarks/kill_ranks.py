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
import logging
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BATCH, SAMPLES, EPOCHS, PAUSE = 12, 600, 6, 0.04
"""The global batch, the dataset, and the seconds that a step takes at least."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of each process of a run; by default that of the undisturbed process."""

    folder: str
    dtype: str
    strategy: str = "auto"
    address: str = ""
    run: str = ""
    ranks: int = 1
    timeout: float = 0.0


def train(work: Work, group: str, rank: int = 0, port: int = 0) -> None:
    """Train one process of a group, or the undisturbed one, and write down what it does."""
    from nnx_core.launch.launcher import variables

    strategy, folder, dtype = work.strategy, work.folder, work.dtype
    if work.ranks > 1:
        os.environ.update(variables(rank, nodes=1, devices=work.ranks, address="127.0.0.1", port=port))
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import nnx

    torch.set_num_threads(1)
    log = (Path(folder) / f"{group}.{os.getpid()}.jsonl").open("a")
    sys.stderr = sys.stdout = (Path(folder) / f"{group}.{os.getpid()}.log").open("a", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)

    def note(**what: Any) -> None:
        log.write(json.dumps({"time": time.time(), **what}) + "\n")
        log.flush()

    class Notes(Callback):
        """Writes down commits, saves and heals."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            note(committed=trainer.global_step - 1)

        def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
            if threading.current_thread() is threading.main_thread() and trainer.is_global_zero:
                note(saves=trainer.global_step)
            else:
                note(sends=trainer.global_step)

        def on_load_checkpoint(self, *_: Any) -> None:
            note(heals=True)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
            self.to(getattr(torch, dtype))

        def training_step(self, batch: Any, index: int) -> Any:
            rows, x, y = batch
            loss = (self.net(x) - y).square().mean()
            share = getattr(getattr(self.trainer.strategy, "quorum", None), "share", None)
            note(
                step=self.trainer.global_step,
                index=0 if share is None else share.index,
                of=1 if share is None else share.of,
                rows=rows.tolist(),
                loss=float(loss),
            )
            if strategy != "auto":
                time.sleep(PAUSE)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.9)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    pl.seed_everything(3, verbose=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 16, generator=generator, dtype=getattr(torch, dtype))
    data = TensorDataset(torch.arange(SAMPLES), x, x[:, :1].sin())
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=3)
    if strategy == "auto":
        chosen, saves = "auto", []
    else:
        chosen = nnx.strategy(
            strategy,
            lighthouse=work.address,
            run_id=work.run,
            group=group,
            group_timeout=work.timeout,
            connect_timeout=10.0,
        )
        saves = [ModelCheckpoint(dirpath=f"{folder}/saves", every_n_train_steps=10, save_top_k=-1)]
    trainer = pl.Trainer(
        strategy=chosen,
        accelerator="cpu",
        devices=work.ranks,
        max_epochs=EPOCHS,
        precision="64-true" if dtype == "float64" else "32-true",
        callbacks=[Notes(), *saves],
        enable_checkpointing=bool(saves),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    model = Model()
    trainer.fit(model, DataLoader(data, batch_size=BATCH, sampler=sampler))
    note(ended=trainer.global_step, counts={k: float(v) for k, v in trainer.callback_metrics.items()})
    if rank == 0:
        torch.save(model.net.state_dict(), Path(folder) / f"{group}.pt")


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


class Group:
    """One group, whose processes are started again after each kill."""

    def __init__(self, context: Any, name: str, work: Work) -> None:
        self.name, self.work, self._context = name, work, context
        self.start()

    def start(self) -> None:
        """Start the processes."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [
            self._context.Process(target=train, args=(self.work, self.name, rank, port))
            for rank in range(self.work.ranks)
        ]
        for process in self.processes:
            process.start()
        self._read, self.commits = 0, 0

    @property
    def is_alive(self) -> bool:
        """True while all processes live."""
        return all(process.is_alive() for process in self.processes)

    def look(self) -> list[dict[str, Any]]:
        """Return what the first process has written since the last look."""
        path = Path(self.work.folder) / f"{self.name}.{self.processes[0].pid}.jsonl"
        if not path.exists():
            return []
        with path.open() as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._read += len(whole)
        found = [json.loads(line) for line in whole.splitlines()]
        self.commits += sum("committed" in each for each in found)
        return found

    def kill(self, rank: int) -> None:
        """Kill a process, end the others, and start all again."""
        self.processes[rank].kill()
        self.processes[rank].join()
        self.end()
        self.start()

    def end(self, timeout: float = 0.0) -> bool:
        """Wait for the processes; kill them after a time, and return False then."""
        until = time.time() + timeout
        for process in self.processes:
            process.join(max(0.0, until - time.time()))
        ended = not any(process.is_alive() for process in self.processes)
        for process in self.processes:
            process.kill()
            process.join()
        return ended


def disturb(groups: list[Group], verdict: Verdict, kinds: list[str], chance: random.Random) -> None:
    """Kill groups until the run has ended or no kill is left; then wait for its end."""
    due, began = time.time() + chance.uniform(0.5, 2.5), time.time()
    while all(group.is_alive for group in groups) and time.time() - began < 600:
        time.sleep(0.002)
        news = {group.name: group.look() for group in groups}
        training = [group for group in groups if group.commits > 2]
        if not kinds or not training or time.time() < due:
            continue
        victim = _victim(groups, training, news, kinds[-1], chance)
        if victim is None:
            if time.time() > due + 2:  # no group heals, or saves: kill one, which heals later
                kinds.append(kinds.pop(kinds.index("step")) if "step" in kinds else "step")
            continue
        verdict.killed.append(time.time())
        victim.kill(chance.randrange(len(victim.processes)))
        verdict.kills[kinds.pop()] += 1
        due = time.time() + chance.uniform(0.3, 1.5)
    for group in groups:
        if not group.end(120):
            verdict.lost.append(f"{group.work.run}: {group.name} does not end")


def _kinds(kills: int, chance: random.Random) -> list[str]:
    """Return the moments of all kills in random order: a fifth while healing, and a fifth while saving."""
    fifth = kills // 5
    kinds = ["heal"] * fifth + ["save"] * fifth + ["step"] * (kills - 2 * fifth)
    chance.shuffle(kinds)
    return kinds


def _victim(
    groups: list[Group], training: list[Group], news: dict[str, Any], wanted: str, chance: random.Random
) -> Group | None:
    """Return the group to kill now, if another one trains."""
    if wanted == "step":
        return chance.choice(training) if len(training) > 1 else None
    key = {"heal": "heals", "save": "saves"}[wanted]
    for group in groups:
        survives = any(other is not group for other in training)
        if survives and any(key in each for each in news[group.name]):
            return group
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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lightning.pytorch", "nnx", "nnx_torchft.strategy"])
    folder = given.keep or Path(tempfile.mkdtemp())
    reference = folder / "reference"
    reference.mkdir(parents=True)
    undisturbed = Work(folder=str(reference), dtype=given.dtype)
    plain = context.Process(target=train, args=(undisturbed, "plain"))
    plain.start()
    plain.join()
    verdict, chance = Verdict(), random.Random(given.seed)
    kinds = _kinds(given.kills, chance)
    while kinds:
        run = folder / f"run{verdict.runs}"
        run.mkdir()
        work = Work(
            folder=str(run),
            dtype=given.dtype,
            strategy=given.strategy,
            address=address,
            run=run.name,
            ranks=given.ranks,
            timeout=given.timeout,
        )
        groups = [Group(context, f"g{index}", work) for index in range(given.groups)]
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
