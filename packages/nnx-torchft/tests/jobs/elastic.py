"""Elastic runs for tests: groups are processes of a fork server that has imported torch and Lightning."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

TIMEOUT = 250.0
"""Seconds that a test waits for anything."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every group of a run trains."""

    folder: Path
    lighthouse: str = ""
    strategy: str = "torchft_ddp"
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    samples: int = 60
    batch: int = 6
    epochs: int = 3
    pause: float = 0.0
    precision: str = "64-true"
    workers: int = 0
    accumulate: int = 1
    validate_every: int | None = None
    save_every: int = 0
    resume: str | None = None
    iterable: bool = False
    batch_norm: bool = False
    manual: bool = False
    poison: tuple[str, int] | None = None
    plateau_of_group: bool = False
    draws: int = 0


def train(run: Run, group: str, rank: int = 0, port: int = 0) -> None:
    """Train a rank of a group; write its samples, its log and what it ended with into the run's folder."""
    from nnx_core.launch.launcher import variables

    if run.ranks > 1:
        os.environ.update(variables(rank, nodes=1, devices=run.ranks, address="127.0.0.1", port=port))
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

    import nnx

    torch.set_num_threads(1)
    dtype = torch.float64 if run.precision == "64-true" else torch.float32
    notes = (run.folder / f"{group}.{os.getpid()}.jsonl").open("a")
    sys.stderr = sys.stdout = (run.folder / f"{group}.{os.getpid()}.log").open("a", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)

    def note(**what: Any) -> None:
        notes.write(json.dumps({"time": time.time(), **what}) + "\n")
        notes.flush()

    class Notes(Callback):
        """Writes down saves and heals."""

        def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
            if trainer.is_global_zero and threading.current_thread() is threading.main_thread():
                note(saves=trainer.global_step)  # another thread hands the state over

        def on_load_checkpoint(self, trainer: Any, *_: Any) -> None:
            note(heals=trainer.global_step)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            norm = [torch.nn.BatchNorm1d(32)] if run.batch_norm else []
            layers = [torch.nn.Linear(8, 32), *norm, torch.nn.Tanh(), torch.nn.Linear(32, 1)]
            self.net = torch.nn.Sequential(*layers).to(dtype)
            self.automatic_optimization = not run.manual

        def training_step(self, batch: Any, index: int) -> Any:
            rows, x, y = batch
            quorum = getattr(self.trainer.strategy, "quorum", None)
            share = (0, 1) if quorum is None else (quorum.share.index, quorum.share.of)
            loss = (self.net(x) - y).square().mean()
            at = {"step": self.trainer.global_step, "micro": index, "index": share[0], "of": share[1]}
            note(**at, rows=rows.tolist(), loss=loss.item())
            time.sleep(run.pause)
            if run.poison == (group, self.trainer.global_step):
                loss = loss + self.net[0].bias[0] * float("nan")  # one gradient of one shard
            if run.plateau_of_group and group == "g1" and self.trainer.global_step == 4:
                self.trainer.optimizers[0].param_groups[0]["lr"] = 1.0
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            note(committed=self.trainer.global_step - 1)

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", (self.net(batch[1]) - batch[2]).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    pl.seed_everything(3, verbose=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(run.samples, 8, generator=generator, dtype=dtype)
    data = TensorDataset(torch.arange(run.samples), x, x[:, :1].sin())

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(data)

    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=3)
    # A group is a child of a fork server and would use one too; workers of a fork server survive a SIGKILL.
    method = "fork" if run.workers else None
    loader: Any = DataLoader(
        data, batch_size=run.batch, sampler=sampler, num_workers=run.workers, multiprocessing_context=method
    )
    if run.iterable:
        loader = DataLoader(Stream(), batch_size=run.batch)
    saves = ModelCheckpoint(
        dirpath=run.folder / "saves", every_n_train_steps=run.save_every, save_top_k=-1, save_last=True
    )
    if run.strategy.startswith("torchft"):
        chosen = nnx.strategy(
            run.strategy, lighthouse=run.lighthouse, group=group, **{"run_id": run.folder.name, **run.options}
        )
    else:
        chosen = run.strategy if run.strategy == "auto" else nnx.strategy(run.strategy)
    trainer = pl.Trainer(
        strategy=chosen,
        accelerator="cpu",
        devices=run.ranks,
        max_epochs=run.epochs,
        precision=run.precision,
        gradient_clip_val=None if run.manual else 0.5,
        accumulate_grad_batches=run.accumulate,
        val_check_interval=run.validate_every,
        limit_val_batches=0 if run.validate_every is None else 1.0,
        num_sanity_val_steps=0,
        callbacks=[Notes(), *([saves] if run.save_every else [])],
        enable_checkpointing=bool(run.save_every),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.folder,
    )
    torch.rand(run.draws)
    model = Model()
    try:
        trainer.fit(model, loader, DataLoader(data, batch_size=30), ckpt_path=run.resume)
    except Exception as error:
        note(error=f"{type(error).__name__}: {error}", seconds=time.monotonic())
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    loops = trainer.fit_loop.epoch_loop
    note(
        ended=trainer.global_step,
        epoch=trainer.current_epoch,
        stepped=loops._batches_that_stepped,
        rate=trainer.optimizers[0].param_groups[0]["lr"],
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
    )
    if rank == 0:
        torch.save(model.net.state_dict(), run.folder / f"{group}.pt")


class Group:
    """The processes of one group of a run."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        port = _free_port()
        self.processes = [
            _context().Process(target=train, args=(run, name, rank, port)) for rank in range(run.ranks)
        ]
        for process in self.processes:
            process.start()
        self.process = self.processes[0]
        self._notes: list[dict[str, Any]] = []
        self._read = 0

    @property
    def notes(self) -> list[dict[str, Any]]:
        """The notes of the first process until now."""
        path = self.run.folder / f"{self.name}.{self.process.pid}.jsonl"
        if path.exists():
            with path.open() as file:
                file.seek(self._read)
                text = file.read()
            lines = text[: text.rfind("\n") + 1]
            self._read += len(lines)
            self._notes += map(json.loads, lines.splitlines())
        return self._notes

    @property
    def log(self) -> str:
        """The output of the processes until now, that of the first one last."""
        paths = [self.run.folder / f"{self.name}.{each.pid}.log" for each in reversed(self.processes)]
        return "".join(path.read_text() for path in paths if path.exists())

    @property
    def is_alive(self) -> bool:
        return all(each.is_alive() for each in self.processes)

    @property
    def commits(self) -> int:
        return sum("committed" in each for each in self.notes)

    def wait_for(self, what: Callable[[Group], bool]) -> Group:
        """Wait until something is true of the group, and it still lives."""
        began = time.monotonic()
        while not what(self):
            assert self.is_alive, self.log[-3000:]
            assert time.monotonic() - began < TIMEOUT, self.log[-3000:]
            time.sleep(0.01)
        return self

    def kill(self, rank: int = 0) -> None:
        """Kill a process; as the launcher does, end the others then."""
        self.processes[rank].kill()
        self.processes[rank].join()
        for each in self.processes:
            each.kill()
            each.join()

    def end(self) -> dict[str, Any]:
        """Wait for the end; return what the group ended with."""
        for each in self.processes:
            each.join(TIMEOUT)
            assert not each.is_alive(), self.log[-3000:]
        assert "ended" in self.notes[-1], self.log[-3000:]
        return self.notes[-1]

    def exit_code(self) -> int | None:
        """Wait for the end of the first process; return its exit code."""
        self.process.join(TIMEOUT)
        return self.process.exitcode

    def error(self) -> str:
        """Wait for the end; return the error."""
        assert self.exit_code() == 1, self.log[-3000:]
        for each in self.processes:
            each.join(TIMEOUT)
        return self.notes[-1]["error"]

    def weights(self) -> dict[str, Any]:
        import torch

        return torch.load(self.run.folder / f"{self.name}.pt")


def undisturbed(run: Run) -> Group:
    """Train what a run trains in one process, with Lightning alone."""
    folder = run.folder / "plain"
    folder.mkdir()
    alone = replace(
        run, folder=folder, strategy="auto", ranks=1, pause=0.0, workers=0, poison=None, save_every=0
    )
    group = Group(alone, "plain")
    group.end()
    return group


def assert_equal(group: Group, plain: Group, within: float = 1e-12) -> None:
    """Compare what a group ended with with the undisturbed process."""
    ended, true = group.end(), plain.end()
    assert {name: ended[name] for name in ("ended", "epoch", "stepped", "rate")} == {
        name: true[name] for name in ("ended", "epoch", "stepped", "rate")
    }
    ours, theirs = group.weights(), plain.weights()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= within


def assert_each_sample_once(run: Run, plain: Group) -> None:
    """Check that the shares of every committed step are the samples of one process's step."""
    true = {(each["step"], each["micro"]): sorted(each["rows"]) for each in plain.notes if "rows" in each}
    shares: dict[Any, dict[int, list[int]]] = defaultdict(dict)
    committed: dict[Any, set[int]] = defaultdict(set)
    for path in run.folder.glob("*.jsonl"):
        attempts: dict[Any, Any] = {}
        for line in path.read_text().splitlines():
            each = json.loads(line)
            if "rows" in each:
                key = each["step"], each["micro"]
                attempts[key] = each
                shares[key, each["of"]][each["index"]] = each["rows"]
            elif "committed" in each:
                for key, attempt in attempts.items():
                    if key[0] == each["committed"]:
                        committed[key].add(attempt["of"])
    for key, rows in true.items():
        assert len(committed[key]) == 1, (key, committed[key])
        (of,) = committed[key]
        counted = [share for index, share in shares[key, of].items() if index < len(rows)]  # others weigh 0
        assert sorted(row for share in counted for row in share) == rows, key


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lightning.pytorch", "nnx", "nnx_torchft.strategy"])
    return context
