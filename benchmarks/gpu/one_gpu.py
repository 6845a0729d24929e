"""Everything that one GPU can tell about nnx, in ten minutes; a line of JSON for each step, and a verdict.

    python benchmarks/gpu/one_gpu.py                    on a machine with a card
    python benchmarks/gpu/one_gpu.py --dry-run          the same code, small, on the CPU
    python benchmarks/gpu/one_gpu.py --only strategies rates

Each step runs in a process of its own with a limit, so that one that crashes or hangs takes nothing else with
it. What only a card has (pinned memory, the allocator's accounts, CUDA's own watch for synchronizations) is
left out of a dry run, and said to be. Needs this repository, torch 2.11 or later, and our packages.

Nothing here has run on a card yet: the machines that it was written on have none.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from steps import ROOT, Figures, Machine, expect, furthest, main, step, train

STRATEGIES = (
    "fsdp_auto",
    "fsdp_offload",
    "colossalai",
    "nnscaler_dp",
    "nnx_deepspeed_1",
    "nnx_deepspeed_2",
    "nnx_deepspeed_3",
    "fairscale_fsdp",
)
TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 2e-2}
CARD = Machine("cuda", layers=8, width=512, batch=16, context=512)
SMALL = Machine("cpu", layers=2, width=64, batch=4, context=32)


# --- steps ----------------------------------------------------------------------------------------


@step()
def device_tests(machine: Machine) -> Figures:
    """The contract of devices, with the card among them where there is one."""
    folder = ROOT / "packages/nnx-colossalai/tests/device"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, done.stdout[-2000:])
    return {"tests": done.stdout.strip().splitlines()[-1]}


@step()
def copies(machine: Machine) -> Figures:
    """Bytes per second between host memory and the card, pinned on a card."""
    figures: Figures = {}
    device = torch.device(machine.accelerator)
    for mebibytes in (16, 256, 1024) if machine.is_card else (1,):
        host = torch.ones(mebibytes << 20, dtype=torch.uint8, pin_memory=machine.is_card)
        there = torch.empty_like(host, device=device)
        for name, target, source in (("to the card", there, host), ("to the host", host, there)):
            target.copy_(source)
            machine.synchronize()
            begun = time.perf_counter()
            for _ in range(5):
                target.copy_(source, non_blocking=True)
            machine.synchronize()
            figures[f"{mebibytes} MiB {name}, B/s"] = 5 * host.nbytes / (time.perf_counter() - begun)
        expect(bool((host == 1).all()), "bytes were lost on the way.")
    return figures


@step(limit=240)
def strategies(machine: Machine) -> Figures:
    """Each strategy trains as one plain process, and goes on from its checkpoint to the bit."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    figures: Figures = {}
    for precision, tolerance in TOLERANCE.items():
        plain, _, _ = train(machine, "auto", steps=6, precision=precision)
        for strategy in STRATEGIES:
            if precision != "32-true" and strategy.startswith("fairscale"):
                continue
            with tempfile.TemporaryDirectory() as place:
                found, _, trainer = train(machine, strategy, steps=4, precision=precision)
                trainer.save_checkpoint(f"{place}/at4")
                resumed, _, _ = train(machine, strategy, steps=6, resume=f"{place}/at4", precision=precision)
            whole, _, _ = train(machine, strategy, steps=6, precision=precision)
            apart = furthest(whole, plain)
            expect(apart <= tolerance, f"{strategy} in {precision}: losses are {apart:.1e} off.")
            expect(found + resumed == whole, f"{strategy} in {precision}: resuming is not exact.")
            figures[f"{strategy} {precision}, losses off by"] = apart
    return figures


@step(limit=180)
def tiers(machine: Machine) -> Figures:
    """Each of the colossalai strategies, with its weights in another place, trains as one plain process."""
    plain, _, _ = train(machine, "auto", steps=5)
    figures: Figures = {}
    for name in ("colossalai_cuda", "colossalai_cpu", "colossalai_auto"):
        found, _, _ = train(machine, name, steps=5)
        figures[f"{name}, losses off by"] = apart = furthest(found, plain)
        expect(apart <= TOLERANCE["32-true"], f"{name}: losses are {apart:.1e} off.")
    return figures


@step()
def found_inf(machine: Machine) -> Figures:
    """A step with infinite gradients changes no weight where a fused optimizer steps on the host."""
    if not machine.is_card:
        return {"left out": "Lightning's 16-mixed is for cards"}
    from lightning.pytorch import Callback

    class Overflow(Callback):
        changed = 0

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.before = [parameter.detach().clone() for parameter in module.parameters()]
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("inf"))
            matrix = torch.ones(4096, 4096, device="cuda")
            for _ in range(20):
                matrix = matrix @ matrix * 1e-4  # keeps the card busy while the host goes on

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            pairs = zip(self.before, module.parameters(), strict=True)
            self.changed += any(not torch.equal(a, b.detach()) for a, b in pairs)

    overflow = Overflow()
    train(machine, "fsdp_offload", steps=16, precision="16-mixed", callbacks=[overflow])
    expect(overflow.changed == 0, f"weights changed in {overflow.changed} of 16 steps.")
    return {"steps": 16, "changed": overflow.changed}


@step()
def synchronizations(machine: Machine) -> Figures:
    """How often the host waits for the card in a step."""
    figures: Figures = {}
    for strategy in STRATEGIES:
        with _counted_synchronizations(machine) as found:
            train(machine, strategy, steps=6)
        figures[f"{strategy}, waits in a step"] = len(found) / 6 if machine.is_card else "left out"
    return figures


@contextmanager
def _counted_synchronizations(machine: Machine) -> Iterator[list[Any]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: list[Any] = []
        if machine.is_card:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if machine.is_card:
                torch.cuda.set_sync_debug_mode("default")
            found += [one for one in caught if "synchroniz" in str(one.message)]


@step()
def background_save(machine: Machine) -> Figures:
    """How long training waits for a save in the background."""
    import nnx_checkpoint
    from nnx_checkpoint.shard import shard_of

    numel = (1 << 28) if machine.is_card else 1 << 16
    state = {f"w{i}": shard_of(torch.ones(numel, device=machine.accelerator)) for i in range(4)}
    stalls = []
    with tempfile.TemporaryDirectory() as place:
        for number in range(3):
            machine.synchronize()
            begun = time.perf_counter()
            save = nnx_checkpoint.save_async(f"{place}/{number}", tensors=state, objects={})
            stalls.append(time.perf_counter() - begun)
            save.wait()
    return {"bytes": 16 * numel, "stalls, s": stalls}


@step()
def memory(machine: Machine) -> Figures:
    """What stays on the card when a run is over and forgotten."""
    figures: Figures = {}
    for strategy in STRATEGIES:
        gc.collect()
        before = torch.cuda.memory_allocated() if machine.is_card else 0
        train(machine, strategy, steps=2)
        gc.collect()
        left = (torch.cuda.memory_allocated() if machine.is_card else 0) - before
        figures[f"{strategy}, bytes left"] = left if machine.is_card else "left out"
        expect(left <= 1 << 20, f"{strategy} leaves {left} bytes on the card.")
    return figures


@step(limit=180)
def step_times(machine: Machine) -> Figures:
    """Tokens per second and the peak of memory, against Lightning's plain strategy in the same process."""
    figures: Figures = {}
    for strategy in ("auto", *STRATEGIES):
        if machine.is_card:
            torch.cuda.reset_peak_memory_stats()
        _, seconds, _ = train(machine, strategy, steps=16)
        median = sorted(seconds[5:])[len(seconds[5:]) // 2]
        figures[f"{strategy}, tokens/s"] = machine.batch * machine.context / median
        if machine.is_card:
            figures[f"{strategy}, peak bytes"] = torch.cuda.max_memory_allocated()
    return figures


@step()
def starts(machine: Machine) -> Figures:
    """The ways in which users start a script."""
    script = (
        "import lightning as L; from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "import sys; devices = [0] if sys.argv[1] == 'cuda' else 1\n"
        "L.Trainer(accelerator=sys.argv[1], devices=devices, strategy=sys.argv[2], max_steps=2, logger=False,"
        " enable_checkpointing=False, enable_progress_bar=False).fit(BoringModel())\n"
    )
    clean = {k: v for k, v in os.environ.items() if k not in {"LOCAL_RANK", "RANK", "WORLD_SIZE"}}
    slurm = {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    slurm |= {
        "SLURM_JOB_ID": "1",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NODELIST": "localhost",
    }
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "train.py"
        file.write_text(script)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        ways = {"python": ([], {}), "torchrun": (torchrun, {}), "SLURM": ([], slurm)}
        for strategy in ("fsdp_auto", "nnx_deepspeed_2"):
            for way, (before, variables) in ways.items():
                command = [sys.executable, *before, str(file), machine.accelerator, strategy]
                done = subprocess.run(
                    command, env=clean | variables, cwd=place, capture_output=True, text=True, check=False
                )
                expect(done.returncode == 0, f"{strategy} by {way}: {done.stderr[-1500:]}")
    return {"started": 2 * len(ways)}


@step(limit=240)
def conformance(machine: Machine) -> Figures:
    """The group of numbers of the conformance suite, on one rank."""
    figures: Figures = {}
    for strategy in ("fsdp_auto", "colossalai") if machine.is_card else ("fsdp_auto",):
        command = [str(Path(sys.executable).with_name("nnx")), "conformance", strategy, "--only", "numbers"]
        command += ["--accelerator", machine.accelerator, "--ranks", "1"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        expect(done.returncode == 0, (done.stdout + done.stderr)[-2000:])
        figures[strategy] = done.stdout.strip().splitlines()[-1]
    return figures


if __name__ == "__main__":
    raise SystemExit(main(CARD, SMALL, cards=1))
