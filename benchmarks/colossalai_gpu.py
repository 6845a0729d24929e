"""Chunked memory on one CUDA device against FSDP2's CPUOffloadPolicy.

    python benchmarks/colossalai_gpu.py largest                   the largest GPT that trains; goal 1.5x
    python benchmarks/colossalai_gpu.py step                      3 B on a card capped to 24 GiB; goal 2x
    python benchmarks/colossalai_gpu.py memory                    predicted against measured peak; goal 5%

Needs a CUDA device, this repository and torch 2.11 or later. Every training runs in its own process, so
that running out of memory affects no other training. The card is capped with
``torch.cuda.set_per_process_memory_fraction``. Models are random, in bf16 with float32 masters and AdamW, and
recompute the activations of every layer.

It has not been run yet: the machines that it was written on have no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nnscaler_step import GPT, Block
from torch import Tensor, nn

GIB = 2**30
WIDTH, CONTEXT, VOCABULARY = 4096, 1024, 32_000
BLOCK = 12 * WIDTH**2  # parameters of a layer, but for biases and norms

SIDES = {
    "ours": "nnx-colossalai",
    "fsdp2": "FSDP2 CPUOffloadPolicy, AdamW as it comes",
    "fsdp2_fused": "FSDP2 CPUOffloadPolicy, AdamW(fused=True)",
}


# --- one training, in a process of its own --------------------------------------------------------


def train_once(arguments: argparse.Namespace) -> int:
    """Train a few steps and print the measurements as one line of JSON."""
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = min(total, int(arguments.card * GIB)) if arguments.card else total
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(layers=arguments.layers, width=WIDTH, vocabulary=VOCABULARY, context=CONTEXT)
    numel = sum(parameter.numel() for parameter in model.parameters())
    build = _ours if arguments.side == "ours" else _fsdp2
    step, predicted = build(model, allowed, arguments)
    tokens = torch.randint(VOCABULARY, (arguments.batch, CONTEXT + 1), device="cuda")
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    seconds = []
    for index in range(arguments.warmup + arguments.steps):
        if index == arguments.warmup:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = step(ids, labels)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    seen = {
        "parameters": numel,
        "loss": float(loss),
        "seconds": statistics.median(seconds[arguments.warmup :]),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "predicted": predicted,
    }
    print("RESULT " + json.dumps(seen), flush=True)
    return 0


Step = Callable[[Tensor, Tensor], Tensor]


def _ours(model: GPT, allowed: int, arguments: argparse.Namespace) -> tuple[Step, int]:
    from nnx_colossalai.backend import ColossalAIBackend
    from nnx_colossalai.options import ColossalAIOptions
    from nnx_core.backend import ParallelContext

    plan_file = arguments.plan_file or str(Path(tempfile.mkdtemp()) / "plan.json")
    options = ColossalAIOptions(
        device_memory=int(allowed * 0.95),
        overlap=arguments.overlap,
        activation_checkpointing=Block,
        plan_file=plan_file,
        timeline_file=arguments.timeline_file,
    )
    backend = ColossalAIBackend(options)
    backend.setup(ParallelContext(device=torch.device("cuda", 0), precision="bf16-mixed"))
    ids = torch.zeros(arguments.batch, CONTEXT, dtype=torch.long)
    backend.parallelize(model, lambda: ((ids, ids), {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    backend.setup_optimizers(model, [optimizer])

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = backend.run_step(model, model, ids, labels)
        backend.backward(model, loss)
        backend.optimizer_step(optimizer, optimizer.step)
        optimizer.zero_grad()
        return loss.detach()

    return step, json.loads(Path(plan_file).read_text())["predicted"]["device_bytes"]


def _fsdp2(model: GPT, allowed: int, arguments: argparse.Namespace) -> tuple[Step, int]:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.utils.checkpoint import checkpoint

    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    policies: dict[str, Any] = {
        "offload_policy": CPUOffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    model.to_empty(device="cpu")
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    fused = {"fused": True} if arguments.side == "fsdp2_fused" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **fused)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = nn.Module.__call__(model, ids, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, 0


# --- what is asked --------------------------------------------------------------------------------


def attempt(side: str, layers: int, arguments: argparse.Namespace, *more: str) -> dict[str, Any] | None:
    """Train in a process of its own; None if it ran out of memory."""
    command = [sys.executable, __file__, "train", "--side", side, "--layers", str(layers)]
    command += ["--card", str(arguments.card), "--steps", str(arguments.steps), "--batch"]
    command += [str(arguments.batch), "--overlap", arguments.overlap, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=arguments.timeout)
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if lines:
        seen: dict[str, Any] = json.loads(lines[0])
        print(f"  {SIDES[side]:45} {layers:4} layers {_shown(seen)}", flush=True)
        return seen
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    print(f"  {SIDES[side]:45} {layers:4} layers: {reason[:160]}", flush=True)
    memory = ("out of memory", "OutOfMemory", "MemoryError", "PlanError", "No room")
    if done.returncode == -9 or any(word in done.stderr for word in memory):
        return None
    raise RuntimeError(done.stderr)


def _shown(seen: dict[str, Any]) -> str:
    return (
        f"{seen['parameters'] / 1e9:6.2f} B {seen['seconds']:7.3f} s/step, allocated "
        f"{seen['allocated'] / GIB:6.2f} GiB, reserved {seen['reserved'] / GIB:6.2f} GiB"
    )


def largest(arguments: argparse.Namespace) -> int:
    """Search by bisection how many layers each side trains."""
    found = {side: _most_layers(side, arguments) for side in ("ours", "fsdp2_fused")}
    ratio = found["ours"] / max(1, found["fsdp2_fused"])
    print(f"largest: ours {found['ours']} layers ({found['ours'] * BLOCK / 1e9:.1f} B), ratio {ratio:.2f}")
    return 0 if ratio >= 1.5 else 1


def _most_layers(side: str, arguments: argparse.Namespace) -> int:
    fits, fails = 0, arguments.most + 1
    while fails - fits > max(1, fits // 20):  # to 5%
        middle = (fits + fails) // 2
        if attempt(side, middle, arguments) is None:
            fails = middle
        else:
            fits = middle
    return fits


def step(arguments: argparse.Namespace) -> int:
    """Time the same model on a capped card."""
    arguments.card = arguments.card or 24.0
    layers = max(1, round(3e9 / BLOCK))
    seen = {side: attempt(side, layers, arguments) for side in SIDES}
    ours, other = seen["ours"], seen["fsdp2"]
    if ours is None or other is None:
        print("A side ran out of memory.")
        return 1
    print(f"step: {other['seconds'] / ours['seconds']:.2f} times as fast as {SIDES['fsdp2']}")
    return 0 if other["seconds"] / ours["seconds"] >= 2 else 1


def memory(arguments: argparse.Namespace) -> int:
    """Compare the plan's peak with the allocator's."""
    errors = []
    for layers in (4, 8, 16):
        seen = attempt("ours", layers, arguments)
        if seen is not None:
            errors.append(abs(seen["predicted"] / seen["allocated"] - 1))
            print(f"  predicted {seen['predicted'] / GIB:.2f} GiB, off by {errors[-1]:.1%}")
    return 0 if errors and max(errors) <= 0.05 else 1


def main() -> int:
    """Ask one question, or be the process of one training."""
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        print("Not run: this needs a CUDA device.", file=sys.stderr)
        return 2
    questions = {"train": train_once, "largest": largest, "step": step, "memory": memory}
    return questions[arguments.question](arguments)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("question", choices=("largest", "step", "memory", "train"))
    parser.add_argument("--card", type=float, default=0.0, help="GiB of the card that may be used; 0: all")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--overlap", choices=("none", "exact"), default="exact")
    parser.add_argument("--most", type=int, default=80, help="layers at which the search begins to fail")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one training")
    training = parser.add_argument_group("of one training")
    training.add_argument("--side", choices=tuple(SIDES), default="ours")
    training.add_argument("--layers", type=int, default=8)
    training.add_argument("--plan-file")
    training.add_argument("--timeline-file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
