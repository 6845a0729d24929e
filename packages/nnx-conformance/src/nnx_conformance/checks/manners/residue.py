"""Residue: when training has ended, the process is as it was before."""

from __future__ import annotations

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.residue_jobs import (
    DESCRIPTORS,
    changes,
    files_left,
    survivors,
)


def _expect_unchanged(bench: Bench, name: str) -> None:
    for rank, of_rank in enumerate(bench.run_once(changes)):
        change = of_rank[name]
        expect(
            not change.new and not change.gone,
            f"rank {rank}: {name} after training: new {change.new}, gone {change.gone}; expected no change.",
        )


def _expect_no_growth(bench: Bench, name: str) -> None:
    for rank, of_rank in enumerate(bench.run_once(changes)):
        new = of_rank[name].new
        expect(not new, f"rank {rank}: further runs added {new} {name}, expected none.")


@check()
def no_process_groups(bench: Bench) -> None:
    """Further runs in a process leave no further process groups."""
    _expect_no_growth(bench, "process groups")


@check()
def no_threads(bench: Bench) -> None:
    """No thread goes on when training has ended."""
    _expect_no_growth(bench, "threads")


@check("leaves_no_files")
def no_files(bench: Bench) -> None:
    """No file is left, neither in the working directory nor in that for temporary files."""
    for rank, files in enumerate(bench.run(files_left, str(bench.directory))):
        expect(not files, f"rank {rank} found {files} after a run that saves nothing.")


@check()
def no_environment_variables(bench: Bench) -> None:
    """Environment variables are as before."""
    _expect_unchanged(bench, "environment")


@check()
def no_torch_settings(bench: Bench) -> None:
    """Torch's defaults are as before: dtype, device, grad mode, determinism, precision, threads."""
    _expect_unchanged(bench, "torch settings")


@check()
def no_signal_handlers(bench: Bench) -> None:
    """Signals are handled as before."""
    _expect_unchanged(bench, "signal handlers")


@check()
def no_descriptors(bench: Bench) -> None:
    """Further runs in a process leave no further open files and sockets."""
    if not DESCRIPTORS.is_dir():
        bench.not_applicable(f"this system has no {DESCRIPTORS}")
    _expect_no_growth(bench, "descriptors")


@check()
def no_survivors(bench: Bench) -> None:
    """When the user drops a trained module, it and its parameters and optimizer are freed."""
    for rank, alive in enumerate(bench.run(survivors)):
        expect(not alive, f"rank {rank}: {', '.join(alive)} stayed alive after its Trainer was gone.")


@check()
def no_tensors(bench: Bench) -> None:
    """Further runs in a process leave no further tensors."""
    _expect_no_growth(bench, "tensors")
