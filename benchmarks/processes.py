"""Starts a benchmark once more as several processes that train together."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["start_again"]


def start_again(processes: int, **environment: str) -> int:
    """Run this program, with its arguments, in several processes of one process group.

    Args:
        processes: The number of processes; each has ``LOCAL_RANK`` in its environment.
        **environment: Further environment variables of the processes.

    Returns:
        The exit code.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([*command, *sys.argv], env=variables, check=False).returncode
