"""Test nnx on one GPU within eight minutes; print a line of JSON for each result, and a verdict.

    python benchmarks/gpu/one_gpu.py --out results.jsonl   on a machine with a card
    python benchmarks/gpu/one_gpu.py --dry-run             the same code, small, on the CPU
    python benchmarks/gpu/one_gpu.py --only equal_losses beside_lightning

The most important steps come first: equal losses, then memory and speed beside Lightning's own strategies.
Each step runs in a process of its own with a time limit, so that a crash or a hang affects no other step, and
it writes each strategy's result at once. If the time runs out, the remaining steps are skipped and named.
A dry run skips the features of cards (pinned memory, the allocator's statistics, CUDA's synchronization
warnings). Needs this repository, torch 2.11 or later, and the packages of nnx; `nox -s gpu-wheels` builds
the wheels to take along, and `nox -s gpu-rehearsal` tries everything in the environment of that machine.

No part of this has run on a card yet: the machines that it was written on have none.
"""

from __future__ import annotations

import gc
import importlib.util
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
import torch.distributed as dist
from steps import NNX, ROOT, Figures, Machine, each, expect, furthest, main, step, train

STRATEGIES = (
    "fsdp_auto",
    "nnx_deepspeed_2",
    "colossalai",
    "nnscaler_dp",
    "nnx_deepspeed_3",
    "fsdp_offload",
    "nnx_deepspeed_1",
    "fairscale_fsdp",
)
LIGHTNINGS = ("auto", "ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3")
"""Lightning's own strategies; the last three need a card."""
FLOAT32_ONLY = ("fairscale_fsdp",)
TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 2e-2}
CARD = Machine("cuda", layers=8, width=512, batch=16, context=512)
LARGE = Machine("cuda", layers=12, width=1024, batch=8, context=1024)
"""The machine of the speed and memory measurements: 150 million weights."""
SMALL = Machine("cpu", layers=2, width=64, batch=4, context=32)


# --- steps, the most telling first ----------------------------------------------------------------


@step(limit=120)
def equal_losses(machine: Machine) -> Figures:
    """Each strategy trains as one plain process in float32."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    plain, _, _ = train(machine, "auto", steps=6)

    def compare(strategy: str) -> Figures:
        return {"losses off by": _compared(train(machine, strategy, steps=6)[0], plain, "32-true")}

    return each(STRATEGIES, compare)


def _compared(found: list[float], plain: list[float], precision: str) -> float:
    apart = furthest(found, plain)
    expect(apart <= TOLERANCE[precision], f"losses are {apart:.1e} off in {precision}.")
    return apart


@step(limit=150)
def beside_lightning(machine: Machine) -> Figures:
    """Tokens per second and the peak of memory, beside Lightning's own strategies in the same process.

    Plain training comes first and last: the difference is the run's own drift.
    """
    measured = LARGE if machine.is_card else machine
    lightnings = LIGHTNINGS if machine.is_card else LIGHTNINGS[:2]

    def measure(case: str) -> Figures:
        strategy = case.partition(" ")[0]
        precision = "32-true" if strategy in FLOAT32_ONLY or not machine.is_card else "bf16-mixed"
        gc.collect()
        if machine.is_card:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            _, seconds, _ = train(measured, strategy, steps=16, precision=precision)
        finally:
            if strategy in LIGHTNINGS and dist.is_initialized():
                dist.destroy_process_group()  # Lightning keeps its own
        median = sorted(seconds[5:])[len(seconds[5:]) // 2]
        found = {"precision": precision, "tokens/s": round(measured.batch * measured.context / median)}
        peak = torch.cuda.max_memory_allocated() if machine.is_card else "left out"
        return {**found, "seconds a step": median, "peak bytes": peak}

    return each((*lightnings, *STRATEGIES, "auto once more"), measure, may_fail=LIGHTNINGS[1:])


@step(limit=120)
def resuming(machine: Machine) -> Figures:
    """Check that each strategy resumes bitwise, and trains like a plain process in bfloat16."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    plain, _, _ = train(machine, "auto", steps=6, precision="bf16-mixed")

    def resume(strategy: str) -> Figures:
        precision = "32-true" if strategy in FLOAT32_ONLY else "bf16-mixed"
        with tempfile.TemporaryDirectory() as place:
            found, _, trainer = train(machine, strategy, steps=4, precision=precision)
            trainer.save_checkpoint(f"{place}/at4")
            resumed, _, _ = train(machine, strategy, steps=6, resume=f"{place}/at4", precision=precision)
        whole, _, _ = train(machine, strategy, steps=6, precision=precision)
        expect(found + resumed == whole, f"resuming is not exact in {precision}.")
        apart = "left out" if strategy in FLOAT32_ONLY else _compared(whole, plain, precision)
        return {"precision": precision, "losses off by": apart}

    return each(STRATEGIES, resume)


@step(limit=90)
def memory_left(machine: Machine) -> Figures:
    """Measure the memory that stays allocated on the card after a run."""

    def measure(strategy: str) -> Figures:
        gc.collect()
        before = torch.cuda.memory_allocated() if machine.is_card else 0
        train(machine, strategy, steps=2)
        gc.collect()
        left = (torch.cuda.memory_allocated() if machine.is_card else 0) - before
        expect(left <= 1 << 20, f"{left} bytes are left on the card.")
        return {"bytes left": left if machine.is_card else "left out"}

    return each(STRATEGIES, measure)


@step(limit=150)
def conformance(machine: Machine) -> Figures:
    """The group of numbers of the conformance suite, on one rank."""

    def check(strategy: str) -> Figures:
        command = [*NNX, "conformance", strategy, "--only", "numbers"]
        command += ["--accelerator", machine.accelerator, "--ranks", "1"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        expect(done.returncode == 0, (done.stdout + done.stderr)[-900:])
        return {"checks": next(line for line in done.stdout.splitlines()[::-1] if " passed" in line)}

    return each(("fsdp_auto", "colossalai") if machine.is_card else ("fsdp_auto",), check)


@step(limit=90)
def tiers(machine: Machine) -> Figures:
    """Each of the colossalai strategies, with its weights in another place, trains as one plain process."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    plain, _, _ = train(machine, "auto", steps=5)

    def compare(strategy: str) -> Figures:
        return {"losses off by": _compared(train(machine, strategy, steps=5)[0], plain, "32-true")}

    return each(("colossalai_cuda", "colossalai_cpu", "colossalai_auto"), compare)


@step(limit=60)
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


@step(limit=90)
def synchronizations(machine: Machine) -> Figures:
    """Count the host's waits for the card in a step."""

    def count(strategy: str) -> Figures:
        with _counted_synchronizations(machine) as found:
            train(machine, strategy, steps=6)
        return {"waits in a step": len(found) / 6 if machine.is_card else "left out"}

    return each(("auto", *STRATEGIES), count)


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


@step(limit=60)
def background_save(machine: Machine) -> Figures:
    """Measure the time that training waits for a save in the background."""
    import nnx_checkpoint
    from nnx_base.shard import shard_of

    numel = (1 << 28) if machine.is_card else 1 << 16
    state = {f"w{i}": shard_of(torch.ones(numel, device=machine.accelerator)) for i in range(4)}
    stalls = []
    with tempfile.TemporaryDirectory() as place:
        for number in range(3):
            machine.synchronize()
            begun = time.perf_counter()
            save = nnx_checkpoint.save_async(
                nnx_checkpoint.SaveRequest(f"{place}/{number}", tensors=state, objects={})
            )
            stalls.append(time.perf_counter() - begun)
            save.wait()
    return {"bytes": 16 * numel, "stalls, s": stalls}


@step(limit=120)
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
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    ways: dict[str, tuple[list[str], dict[str, str]]] = {
        "python": ([], {}),
        "torchrun": (torchrun, {}),
        "SLURM": ([], slurm),
    }
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "train.py"
        file.write_text(script)

        def start(case: str) -> Figures:
            strategy, _, way = case.partition(" by ")
            before, variables = ways[way]
            command = [sys.executable, *before, str(file), machine.accelerator, strategy]
            done = subprocess.run(
                command, env=clean | variables, cwd=place, capture_output=True, text=True, check=False
            )
            expect(done.returncode == 0, done.stderr[-900:])
            return {}

        return each([f"{one} by {way}" for way in ways for one in ("fsdp_auto", "nnx_deepspeed_2")], start)


@step(limit=60)
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


@step(limit=90)
def device_tests(machine: Machine) -> Figures:
    """The contract of devices, with the card among them where there is one."""
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("pytest_timeout") is None:
        return {"left out": "pytest or pytest-timeout is not installed"}
    folder = ROOT / "packages/nnx-colossalai/tests/device"
    # The plugin lies in the repository; which others are installed there, nobody knows.
    plugins = ("-p", "nnx_test_helpers.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider")
    paths = [os.fspath(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")]
    settings = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", "-q", *plugins, os.fspath(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    expect(done.returncode == 0, (done.stdout + done.stderr)[-2000:])
    return {"tests": done.stdout.strip().splitlines()[-1]}


if __name__ == "__main__":
    raise SystemExit(main(CARD, SMALL, cards=1, seconds=480))
