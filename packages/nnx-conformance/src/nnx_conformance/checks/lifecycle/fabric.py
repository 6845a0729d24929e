"""The strategy works in a training loop with Fabric."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.comparing import TOLERANCE, expect_equal_losses
from nnx_conformance.training import Loop, Seen, interrupted, train

_CLIP = 0.3
"""Below every gradient norm of these loops, so that clipping always acts."""


def _compare(ranks: Sequence[Seen], alone: Seen, *, tolerance: float = TOLERANCE["float32"]) -> None:
    for rank, seen in enumerate(ranks):
        where = f"Fabric, rank {rank} of {len(ranks)}"
        expect_equal_losses(seen.losses, alone.losses, tolerance=tolerance, where=where)


@check("fabric")
def fabric_loop(bench: Bench) -> None:
    """A training loop in Fabric gives the losses of one process."""
    loop = Loop()
    _compare(bench.run(train, loop), bench.alone(train, loop))


@check("fabric", "gradient_accumulation")
def fabric_accumulation(bench: Bench) -> None:
    """Fabric's ``no_backward_sync`` accumulates gradients, which the next backward reduces."""
    loop = Loop(accumulate=2, steps=3)
    _compare(bench.run(train, loop), bench.alone(train, loop))


@check("fabric", "clip_by_norm")
def fabric_clipping_by_norm(bench: Bench) -> None:
    """Fabric's ``clip_gradients(max_norm=)`` clips by the norm over all ranks, and returns it."""
    loop = Loop(clip_norm=_CLIP)
    ranks, alone = bench.run(train, loop), bench.alone(train, loop)
    _compare(ranks, alone)
    for rank, seen in enumerate(ranks):
        for norm, wanted in zip(seen.norms, alone.norms, strict=True):
            expect(
                abs(norm - wanted) <= 1e-4 * wanted,
                f"rank {rank}: clip_gradients returned the norm {norm:.6g}, one process has {wanted:.6g}.",
            )


@check("fabric", "clip_by_value")
def fabric_clipping_by_value(bench: Bench) -> None:
    """Fabric's ``clip_gradients(clip_val=)`` clips every element of the reduced gradients."""
    loop = Loop(clip_value=0.02)
    _compare(bench.run(train, loop), bench.alone(train, loop))


@check("fabric")
def fabric_checkpoint(bench: Bench) -> None:
    """New objects load a checkpoint of Fabric and train as without the interruption."""
    loop = Loop()
    path = str(bench.directory / "fabric.ckpt")
    _compare(bench.run(interrupted, loop, path), bench.alone(train, loop))


@check("fabric", "precisions:bf16-mixed")
def fabric_precision(bench: Bench) -> None:
    """``Fabric(precision="bf16-mixed")`` computes in bfloat16, with the losses of one process."""
    loop = Loop(precision="bf16-mixed")
    ranks, alone = bench.run(train, loop), bench.alone(train, loop)
    for rank, seen in enumerate(ranks):
        expect(
            seen.output_dtype == torch.bfloat16,
            f"rank {rank}: activations are {seen.output_dtype}, expected torch.bfloat16.",
        )
    _compare(ranks, alone, tolerance=0.02)
