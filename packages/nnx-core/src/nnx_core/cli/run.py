"""``nnx run --on NAME -- train.py ...``: start a script in every process of a run.

Also the two launchers that start nothing but scripts, and need nothing of Python's for it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from nnx_checkpoint.cli.output import print_text
from nnx_core.errors import LaunchError, OptionError
from nnx_core.launcher import Job, Launcher, LauncherOptions, make_launcher
from nnx_core.options import option

__all__ = ["run_script"]


def run_script(
    name: str, command: Sequence[str], *, nodes: int, devices: int, options: Sequence[str], dry_run: bool
) -> int:
    """Start a script by a launcher.

    Args:
        name: The launcher.
        command: The script and its arguments.
        nodes: The number of nodes.
        devices: The number of processes on each node.
        options: Options of the launcher, each as ``name=value``.
        dry_run: Print what would be done, and do nothing.

    Returns:
        The exit code.

    Raises:
        OptionError: There is no script, or an option is unknown.
    """
    if not command:
        raise OptionError("no script is given.", remedy=f"Write `nnx run --on {name} -- train.py`.")
    launcher, unknown = make_launcher(name, _read(options))
    if unknown:
        known = ", ".join(item.name for item in fields(launcher.Options)) or "none"
        raise OptionError(
            f"launcher {name!r} has no option {next(iter(unknown))!r}.", remedy=f"Its options are {known}."
        )
    words = [sys.executable, *command] if command[0].endswith(".py") or command[0] == "-m" else [*command]
    if dry_run:
        print_text(launcher.describe(words, nodes=nodes, devices=devices))
        return 0
    return launcher.run_script(words, nodes=nodes, devices=devices)


def _read(options: Sequence[str]) -> dict[str, Any]:
    """Options as values: what is JSON is read as JSON, and all else is text."""
    values: dict[str, Any] = {}
    for text in options:
        key, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"--option {text!r} has no value.", remedy="Write --option name=value.")
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    return values


# --- launchers of scripts only --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions(LauncherOptions):
    """Options of torchrun, as it calls them."""

    node_rank: int = option(0, help="The number of this node.", types=(int,))
    master_addr: str = option("", help="The address of the first node.", types=(str,))
    master_port: int = option(29500, help="A port that is free there.", types=(int,))
    max_restarts: int = option(0, help="How often torchrun starts all processes again.", types=(int,))


class Torchrun(Launcher):
    """Starts a script on this node by torchrun; it is called on each node."""

    Options = TorchrunOptions

    def run(self, job: Job) -> Any:
        """Refuse: torchrun starts scripts."""
        raise _starts_scripts("torchrun")

    def run_script(self, command: Sequence[str], *, nodes: int, devices: int) -> int:
        """Run torchrun."""
        return subprocess.run(self._words(command, nodes, devices), check=False).returncode

    def describe(self, command: Sequence[str], *, nodes: int, devices: int) -> str:
        """The command line of torchrun."""
        return " ".join(["torchrun", *self._words(command, nodes, devices)[3:]])

    def _words(self, command: Sequence[str], nodes: int, devices: int) -> list[str]:
        given = asdict(self.options)
        if nodes > 1 and not given["master_addr"]:
            raise OptionError(
                f"torchrun is to start {nodes} nodes, and no master_addr is given.",
                remedy="On each node, pass --option master_addr=ADDRESS --option node_rank=NUMBER.",
            )
        words = [
            f"--nnodes={nodes}",
            f"--nproc-per-node={devices}",
            f"--max-restarts={given['max_restarts']}",
        ]
        if nodes > 1:
            names = ("node_rank", "master_addr", "master_port")
            words += [f"--{name.replace('_', '-')}={given[name]}" for name in names]
        else:
            words.append("--standalone")
        return [sys.executable, "-m", "torch.distributed.run", *words, *_script(command)]


class Slurm(Launcher):
    """Starts a script by srun, inside of an allocation or asking for one."""

    def run(self, job: Job) -> Any:
        """Refuse: srun starts scripts."""
        raise _starts_scripts("slurm")

    def run_script(self, command: Sequence[str], *, nodes: int, devices: int) -> int:
        """Run srun."""
        if shutil.which("srun") is None:
            raise LaunchError(
                "there is no srun on the PATH, which starts processes under SLURM.",
                remedy="Run this on a node of a SLURM cluster, or choose --on torchrun or --on ray.",
            )
        words = self._words(command, nodes, devices)
        return subprocess.run(words, check=False, env={**os.environ, "PYTHONUNBUFFERED": "1"}).returncode

    def describe(self, command: Sequence[str], *, nodes: int, devices: int) -> str:
        """The command line of srun."""
        return " ".join(self._words(command, nodes, devices))

    def _words(self, command: Sequence[str], nodes: int, devices: int) -> list[str]:
        return ["srun", f"--nodes={nodes}", f"--ntasks-per-node={devices}", sys.executable, *_script(command)]


def _script(command: Sequence[str]) -> Sequence[str]:
    """A script and its arguments, without the python that `nnx run` puts before them."""
    return command[1:] if command[0] == sys.executable else command


def _starts_scripts(name: str) -> LaunchError:
    return LaunchError(
        f"launcher={name!r} starts scripts, and not the processes of a Trainer in a running script.",
        remedy=f"Leave `launcher` out and start the script with `nnx run --on {name} -- train.py`.",
    )
