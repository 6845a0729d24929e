"""Test nnx on several GPUs; print a line of JSON for each step, and a verdict.

    python benchmarks/gpu/eight_gpus.py                    on a machine with two to eight cards
    python benchmarks/gpu/eight_gpus.py --dry-run          the same code, small, with two processes on the CPU
    python benchmarks/gpu/eight_gpus.py --only negative_zeros speed

Run `one_gpu.py` first. Each step takes as many of the available cards as it needs. Several machines are not
tried here. Needs this repository, torch 2.11 or later, and the packages of nnx.

No part of this has run on cards yet: the machines that it was written on have none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from steps import NNX, ROOT, Figures, Machine, expect, furthest, main, run_limited, step, train
from torch.utils.data import DataLoader, TensorDataset

ALL = (
    *(
        "fsdp_auto",
        "fsdp_hybrid",
        "fsdp_offload",
        "colossalai",
        "nnscaler_dp",
        "nnscaler_tp",
        "nnscaler_zero",
    ),
    *("nnx_deepspeed_1", "nnx_deepspeed_2", "nnx_deepspeed_3", "fairscale_fsdp", "fairscale_oss"),
)
CARD = Machine("cuda", layers=32, width=4096, batch=2, context=2048)
SMALL = Machine("cpu", layers=2, width=64, batch=4, context=32)
LITTLE = Machine("cuda", layers=4, width=512, batch=8, context=256)
TIME_TO_END = 60.0
"""Seconds in which every process of a run has to end after an error in one of them."""


def little(machine: Machine) -> Machine:
    """The machine with a model that takes no time."""
    return LITTLE if machine.is_card else SMALL


@contextmanager
def world(machine: Machine) -> Iterator[torch.device]:
    """A world without a Trainer; yields this process's device."""
    device = torch.device("cpu")
    if machine.is_card:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if machine.is_card else "gloo")
    try:
        yield device
        dist.barrier()
    finally:
        dist.destroy_process_group()


# --- steps ----------------------------------------------------------------------------------------


@step(limit=7200)
def conformance(machine: Machine) -> Figures:
    """Every strategy's promises, on up to three cards."""
    figures: Figures = {}
    for strategy in ALL if machine.is_card else ("nnscaler_dp",):
        command = [*NNX, "conformance", strategy]
        command += ["--accelerator", machine.accelerator]
        command += [] if machine.is_card else ["--ranks", "2", "--only", "losses_float32"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        figures[strategy] = (done.stdout.strip().splitlines() or [""])[-1]
        expect(done.returncode == 0, f"{strategy}: {(done.stdout + done.stderr)[-1500:]}")
    return figures


@step(ranks=8)
def negative_zeros(machine: Machine) -> Figures:
    """Check that a sum of -0.0 over the ranks stays -0.0, by which nnscaler detects unused parameters.

    Run it with NCCL_NVLS_ENABLE=0 and =1: reductions in the switch do not guarantee it.
    """
    wrong: Figures = {}
    sizes = (1, 256, 1 << 20, 1 << 26) if machine.is_card else (1, 256)
    with world(machine) as device:
        for dtype, numel in product((torch.float32, torch.bfloat16, torch.float16), sizes):
            zeros = torch.full((numel,), -0.0, dtype=dtype, device=device)
            dist.all_reduce(zeros)
            lost = int((~torch.signbit(zeros)).sum())
            if lost:
                wrong[f"{dtype}, {numel}"] = lost
    expect(not wrong, f"signs were lost: {wrong}")
    return {"NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "")}


@step(ranks=2)
def narrow_integers(machine: Machine) -> Figures:
    """Buffers of integers that NCCL lacks reach the other ranks."""
    from nnx_base.ranks import broadcast_tensor

    dtypes = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool)
    with world(machine) as device:
        for dtype in dtypes:
            value = torch.full((3,), 1 - dist.get_rank(), device=device).to(dtype)
            broadcast_tensor(value)
            expect(value.tolist() == [1, 1, 1], f"{dtype} became {value.tolist()}.")
    return {"dtypes": len(dtypes)}


@step(limit=600, ranks=8)
def equal_losses(machine: Machine) -> Figures:
    """Check that each strategy has one plain process's losses, with the same batch on every rank."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    chosen = little(machine)
    figures: Figures = {}
    plain, _, _ = train(chosen, "ddp", steps=4)
    for strategy in ALL:
        found, _, _ = train(chosen, strategy, steps=4)
        figures[f"{strategy}, losses off by"] = apart = furthest(found, plain)
        expect(apart <= 1e-4, f"{strategy}: losses are {apart:.1e} off those of ddp.")
    return figures


@step(limit=300, ranks=4)
def groups_made_again(machine: Machine) -> Figures:
    """Two runs one after the other in one process, each with groups of its own."""
    chosen = little(machine)
    for strategy in ("fsdp_hybrid", "nnscaler_tp", "fsdp_hybrid"):
        train(chosen, strategy, steps=2)
    return {"runs": 3}


@step(limit=300)
def errors_on_one_rank(machine: Machine) -> Figures:
    """A rank that fails ends the run on all of them, with its own error."""
    figures: Figures = {}
    for place in ("forward", "backward", "validation", "save"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [__file__, "--step", "failing_run", *([] if machine.is_card else ["--dry-run"])]
        begun = time.perf_counter()
        code, out, errors = run_limited(
            command, limit=TIME_TO_END + 60, env=os.environ | {"NNX_FAILS_IN": place}
        )
        expect(code is not None, f"a run whose rank 1 failed in {place} did not end.")
        expect(code != 0, f"a run whose rank 1 failed in {place} ended as if nothing had been.")
        expect(f"planted in {place}" in out + errors, f"the error in {place} is not told: {errors[-800:]}")
        figures[f"{place}, s"] = round(time.perf_counter() - begun, 1)
    return figures


def failing_run(machine: Machine) -> Figures:
    """Run a training in which rank 1 fails at the place of NNX_FAILS_IN."""
    from lightning.pytorch import Callback

    place = os.environ["NNX_FAILS_IN"]

    class Failing(Callback):
        def fail(self, trainer: Any, where: str) -> None:
            if trainer.global_rank == 1 and where == place:
                raise RuntimeError(f"planted in {place}")

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.fail(trainer, "forward")

        def on_after_backward(self, trainer: Any, *_: Any) -> None:
            self.fail(trainer, "backward")

        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            self.fail(trainer, "validation")

        def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
            self.fail(trainer, "save")

    _, _, trainer = train(little(machine), "fsdp_auto", steps=2, callbacks=[Failing()])
    tokens = torch.zeros(2, 4, dtype=torch.long)
    data = DataLoader(TensorDataset(tokens, tokens), batch_size=1)
    trainer.validate(trainer.lightning_module, data, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(trainer.strategy.broadcast(f"{folder}/at2"))
    return {}


@step(limit=300, ranks=2)
def out_of_memory(machine: Machine) -> Figures:
    """One rank has less room than the other: an error or a lower plan on both, and never other losses."""
    if not machine.is_card:
        return {"left out": "only a card runs out of memory in the middle of NCCL's calls"}
    import nnx

    plain, _, _ = train(LITTLE, "ddp", steps=3)
    if int(os.environ["RANK"]) == 1:
        ballast = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.97), dtype=torch.uint8, device="cuda")
    try:
        found, _, _ = train(LITTLE, nnx.strategy("colossalai"), steps=3)
    except Exception as error:
        return {"refused": str(error)[:500]}
    finally:
        if int(os.environ["RANK"]) == 1:
            del ballast
    apart = furthest(found, plain)
    expect(apart <= 1e-4, f"losses are {apart:.1e} off after running out of memory.")
    return {"losses off by": apart}


@step(limit=300)
def other_devices(machine: Machine) -> Figures:
    """A Trainer with ``devices=[2, 3]`` touches no other card."""
    if not machine.is_card or torch.cuda.device_count() < 4:
        return {"left out": "it takes four cards"}
    figures: Figures = {}
    for strategy in ALL:
        before = [torch.cuda.mem_get_info(card)[0] for card in (0, 1)]
        train(LITTLE, strategy, steps=2, devices=[2, 3])
        after = [torch.cuda.mem_get_info(card)[0] for card in (0, 1)]
        taken = max(b - a for b, a in zip(before, after, strict=True))
        figures[f"{strategy}, bytes on other cards"] = taken
        expect(taken < 64 << 20, f"{strategy} took {taken} bytes of a card that it was not given.")
    return figures


@step(limit=300, ranks=2)
def equal_replicas(machine: Machine) -> Figures:
    """Ranks that hold the same weights hold the same bits after training with dropout."""
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

    import nnx

    class Dropping(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.3), nn.Linear(256, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(x)
            return out

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(400, 64)), batch_size=8)
    trainer = Trainer(
        accelerator=machine.accelerator,
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=nnx.strategy("nnscaler_tp", check_every=10),  # which compares the bits of all replicas
        max_steps=50,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Dropping(), data)
    return {"steps": trainer.global_step}


@step(limit=1800, ranks=8)
def speed(machine: Machine) -> Figures:
    """Tokens per second and peaks of memory of a model of 6.5 billion parameters, beside Lightning's own."""
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

    import nnx

    figures: Figures = {}
    lightnings = {
        "Lightning's FSDP": FSDPStrategy,
        "Lightning's DeepSpeed 3": lambda: DeepSpeedStrategy(stage=3),
    }
    ours = ("fsdp_auto", "colossalai", "nnscaler_zero", "nnx_deepspeed_3")
    chosen: dict[str, Any] = dict(lightnings if machine.is_card else {})
    chosen |= {name: lambda name=name: nnx.strategy(name, gather_at_end="none") for name in ours}
    for name, make in chosen.items():
        if machine.is_card:
            torch.cuda.reset_peak_memory_stats()
        _, seconds, _ = train(machine, make(), steps=8, precision="bf16-mixed")
        median = sorted(seconds[3:])[len(seconds[3:]) // 2]
        ranks = int(os.environ["WORLD_SIZE"])
        figures[f"{name}, tokens/s"] = ranks * machine.batch * machine.context / median
        if machine.is_card:
            figures[f"{name}, peak bytes"] = torch.cuda.max_memory_allocated()
            figures[f"{name}, bytes left"] = torch.cuda.memory_allocated()
    return figures


@step(limit=600, ranks=8)
def overlap(machine: Machine) -> Figures:
    """The share of NCCL's time in which the card computes as well."""
    if not machine.is_card:
        return {"left out": "kernels are on cards"}
    from torch.profiler import ProfilerActivity, profile

    figures: Figures = {}
    for strategy in ("fsdp_auto", "colossalai", "nnscaler_zero"):
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            train(LITTLE, strategy, steps=8)
        spans = [(e.time_range.start, e.time_range.end, "nccl" in e.name) for e in found.events() or []]
        figures[f"{strategy}, hidden share of NCCL"] = hidden_share(spans)
    return figures


def hidden_share(spans: list[tuple[float, float, bool]]) -> float:
    """The share of the time of communicating kernels in which another kernel runs.

    Args:
        spans: Begin and end of each kernel, and whether it communicates.
    """
    points = sorted(point for begin, end, sends in spans for point in ((begin, 1, sends), (end, -1, sends)))
    running, sent, hidden, last = {True: 0, False: 0}, 0.0, 0.0, 0.0
    for at, change, sends in points:
        if running[True]:
            sent += at - last
            hidden += (at - last) if running[False] else 0.0
        running[sends] += change
        last = at
    return hidden / sent if sent else 0.0


if __name__ == "__main__":
    if os.environ.get("NNX_FAILS_IN"):
        step()(failing_run)
    raise SystemExit(main(CARD, SMALL, cards=2))
