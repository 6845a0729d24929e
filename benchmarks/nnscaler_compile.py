"""Measure the time from a module to running code: trace, plan and code generation, on one process.

    python benchmarks/nnscaler_compile.py            GPTs of 4 and 16 layers, for every policy, 2 ranks
    python benchmarks/nnscaler_compile.py llama      Llama-3-8B shapes on the meta device, 8 ranks
    python benchmarks/nnscaler_compile.py mesh       the same for 1,024 devices: any unit, ZeRO on and off

The output is medians over rounds, in seconds of processor time (one thread, so that a busy machine matters
less), with wall times beside them; exit code 1 if a processor time is above its bar. For comparison,
Microsoft's nnScaler took 1.5 s (4 layers) and 9 s (16) with a fixed policy and 83 s with autodist on a
machine of the same kind (measured for this project; it cannot be installed beside this torch).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, NamedTuple

import torch
from nnscaler_step import GPT
from torch import nn

POLICIES = ("data", "zero", "tp", "autodist")
BARS = {4: 3.0, 16: 8.0}
LLAMA_BAR, MESH_BAR = 15.0, 120.0
RANKS, DEVICES = 8, 1024


class Times(NamedTuple):
    """Seconds of each part."""

    trace: float
    plan: float
    emit: float
    wall: float

    @property
    def total(self) -> float:
        """All of it, in processor time."""
        return self.trace + self.plan + self.emit


def main() -> int:
    """Run the selected measurements."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    return {"gpt": gpt, "llama": llama, "mesh": mesh}[arguments.what](arguments)


def gpt(arguments: argparse.Namespace) -> int:
    """Small GPTs under every policy."""
    slow = 0
    for layers, bar in BARS.items():
        for policy in POLICIES:
            times = medians([compile_gpt(layers, policy) for _ in range(arguments.rounds)])
            slow += report(f"GPT of {layers:2} layers, {policy:9}", times, bar)
    return 1 if slow else 0


def llama(arguments: argparse.Namespace) -> int:
    """Llama-3-8B over eight ranks under every policy."""
    module, kwargs = llama_8b(), llama_inputs()
    slow = 0
    for policy in POLICIES:
        taken = [
            compile_module(module, (), kwargs, size=RANKS, policy=policy) for _ in range(arguments.rounds)
        ]
        slow += report(f"Llama-3-8B over {RANKS}, {policy:9}", medians(taken), LLAMA_BAR)
    return 1 if slow else 0


def mesh(arguments: argparse.Namespace) -> int:
    """Llama-3-8B for a world that is not here."""
    from nnx_core.machine.hardware import profile
    from nnx_nnscaler.plan.cost import CostModel
    from nnx_nnscaler.plan.mesh import plan_mesh
    from nnx_nnscaler.trace.forward import trace_forward

    start, clock = time.process_time(), time.perf_counter()
    graph = trace_forward(llama_8b(), (), llama_inputs())
    found = plan_mesh(graph, world_size=DEVICES, costs=CostModel(hardware=profile("h100-nvlink")))
    taken, wall = time.process_time() - start, time.perf_counter() - clock
    for plan in found.tried:
        memory = plan.program.prediction.memory / 2**30
        print(
            f"units of {plan.program.size:3} ranks, {'ZeRO' if plan.zero else '    '}: "
            f"{plan.seconds_per_batch * 1e3:7.3f} ms for a batch, {memory:5.1f} GiB"
        )
    print(f"{len(found.refused)} shapes do not fit; best: units of {found.best.program.size} ranks")
    print(f"Llama-3-8B over {DEVICES}: trace and search {taken:.2f} s ({wall:.2f} wall), bar {MESH_BAR:.0f}")
    return 1 if taken > MESH_BAR else 0


def compile_gpt(layers: int, policy: str) -> Times:
    """One compilation from scratch."""
    model = GPT(layers=layers, width=256, vocabulary=1000, context=128)
    ids = torch.randint(1000, (4, 128))
    return compile_module(model, (ids, ids), {}, size=2, policy=policy)


def compile_module(module: nn.Module, args: Any, kwargs: Any, *, size: int, policy: str) -> Times:
    """Trace, plan and emit, timed."""
    from nnx_core.machine.hardware import profile
    from nnx_nnscaler.codegen.emit import emit
    from nnx_nnscaler.plan.cost import CostModel
    from nnx_nnscaler.plan.planning import plan_program
    from nnx_nnscaler.trace.forward import trace_forward

    costs = CostModel(hardware=profile("h100-nvlink"))
    clock, start = time.perf_counter(), time.process_time()
    graph = trace_forward(module, args, kwargs)
    traced = time.process_time()
    plan = plan_program(graph, size=size, policy=policy, costs=costs)
    planned = time.process_time()
    emit(graph, plan)
    end = time.process_time()
    return Times(traced - start, planned - traced, end - planned, time.perf_counter() - clock)


def medians(taken: list[Times]) -> Times:
    """The median of each part."""
    return Times(*(statistics.median(part) for part in zip(*taken, strict=True)))


def llama_inputs() -> dict[str, torch.Tensor]:
    """Two sequences of 4,096 tokens with their labels."""
    ids = torch.zeros(2, 4096, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def llama_8b() -> nn.Module:
    """Llama-3-8B as the transformers package builds it, without memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    return model


def report(what: str, times: Times, bar: float) -> bool:
    """Print one line; whether it is above the bar."""
    parts = f"trace {times.trace:6.2f}  plan {times.plan:6.2f}  emit {times.emit:6.2f}"
    print(f"{what} {parts}  total {times.total:6.2f} s ({times.wall:.2f} wall), bar {bar:.0f}", flush=True)
    return times.total > bar


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("gpt", "llama", "mesh"), nargs="?", default="gpt")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
