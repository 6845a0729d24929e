"""Measure the start of a run under Ray and under torchrun: from `fit` to the end of the first step.

    python benchmarks/launchers.py                       two processes, three times each, in turn
    python benchmarks/launchers.py --devices 4 --repeat 5

Both start the same Trainer in fresh processes. Under torchrun the clock begins with the call of torchrun;
under Ray it begins when the script calls `fit`, once with a running cluster and once with a new one.
Ray's launcher logs its steps with times; a callback writes the times of the processes.
Prints medians and their ratios.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

import nnx
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task
from nnx_conformance.training import make_trainer

PHASES = ("connected", "placed", "workers answer", "sent", "imported", "first step")
MEANINGS = {
    "connected": "Ray: connect to the cluster, or start it",
    "placed": "Ray: reserve the placement group",
    "workers answer": "Ray: start the actors, which import Ray and nnx-ray",
    "sent": "Ray: compare versions, find a port, pickle and send the run",
    "imported": "processes import torch, Lightning and nnx, and reach `on_fit_start`",
    "first step": "lay the model out and train one step",
}


class Clock(Callback):
    """Writes down when rank 0 begins, and when its first step is done."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        """Every rank has joined the process group."""
        self._write(trainer, "imported")

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        """Write the time of the first batch."""
        if trainer.global_step == 1:
            self._write(trainer, "first step")

    def _write(self, trainer: Trainer, phase: str) -> None:
        if trainer.is_global_zero:
            with Path(self.file).open("a") as file:
                file.write(f"{json.dumps([phase, time.time()])}\n")


def train(how: str, devices: int, file: str) -> None:
    """Run the script of one run.

    Args:
        how: The launcher: ``ray``, ``ray local`` or ``torchrun``.
        devices: The number of processes.
        file: The file for the times.
    """

    class Times(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() in PHASES:
                write(record.getMessage(), record.created)

    def write(phase: str, at: float) -> None:
        with Path(file).open("a") as out:
            out.write(f"{json.dumps([phase, at])}\n")

    options = {}
    if how != "torchrun":
        logging.getLogger("nnx.ray").setLevel(logging.DEBUG)
        logging.getLogger("nnx.ray").addHandler(Times())
        address = "local" if how == "ray local" else os.environ["BENCHMARK_RAY"]
        options = {"launcher": "ray", "address": address}
    task = Task(steps=2)
    trainer = make_trainer(
        Subject("fsdp_auto", options=options), task, devices=devices, callbacks=[Clock(file)]
    )
    module = task.module()
    if how != "torchrun":
        write("begin", time.time())
    trainer.fit(module)


def measure(how: str, devices: int, folder: Path) -> dict[str, float]:
    """Run once; the seconds of each phase, and of all."""
    file = folder / f"{time.time_ns()}.jsonl"
    own = [__file__, "--train", how, "--devices", str(devices), "--file", str(file)]
    starter = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    words = [sys.executable, *(starter if how == "torchrun" else []), *own]
    began = time.time()
    finished = subprocess.run(words, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(finished.stdout[-2000:] + finished.stderr[-4000:])
    found = dict(json.loads(line) for line in file.read_text().splitlines())
    at = found.pop("begin", began)
    result = {"all": found["first step"] - at}
    for phase in [phase for phase in PHASES if phase in found]:
        result[phase] = found[phase] - at
        at = found[phase]
    return result


def compare(devices: int, repeat: int) -> None:
    """Measure in turn, and print medians."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": max(devices, 2), "include_dashboard": False}
    )
    os.environ["BENCHMARK_RAY"] = cluster.address
    runs: dict[str, list[dict[str, float]]] = {"torchrun": [], "ray": [], "ray local": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeat):
            for how, found in runs.items():
                found.append(measure(how, devices, Path(folder)))
    cluster.shutdown()
    middle = {
        how: {phase: statistics.median(run[phase] for run in found) for phase in found[0]}
        for how, found in runs.items()
    }
    print(f"fsdp_auto, {devices} processes on one node, ray {ray.__version__}, nnx {nnx.__version__};")
    print(f"seconds from the start to the end of the first step, medians of {repeat}\n")
    print(f"{'':16}{'torchrun':>10}{'ray':>10}{'own ray':>10}")
    for phase in ("all", *PHASES):
        cells = [f"{middle[how][phase]:10.2f}" if phase in middle[how] else f"{'':10}" for how in runs]
        print(f"{phase:16}{''.join(cells)}  {MEANINGS.get(phase, '')}".rstrip())
    print(f"\nray / torchrun: {middle['ray']['all'] / middle['torchrun']['all']:.2f}")
    print(f"own ray / torchrun: {middle['ray local']['all'] / middle['torchrun']['all']:.2f}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="The number of processes.")
    parser.add_argument("--repeat", type=int, default=3, help="How often each is measured.")
    parser.add_argument("--train", choices=("ray", "ray local", "torchrun"), help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train, given.devices, given.file)
        return
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    compare(given.devices, given.repeat)


if __name__ == "__main__":
    main()
