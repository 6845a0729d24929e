"""Launchers: classes that start the processes of a run in place of Lightning.

A launcher is a small class that a plugin names in a `LauncherSpec`. It gets a `Job`, starts a process for
each device of each node, sets torchrun's variables in it, and calls the job's work there.
`nnx_core.lightning.launcher` makes the job of a Trainer's run. A launcher can also start a script, for
``nnx run --on NAME``. This module imports neither torch nor Lightning.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from nnx_core.errors import LaunchError, NnxError, OptionError, PluginError
from nnx_core.names.discovery import launchers
from nnx_core.names.spec import LauncherSpec, import_reference
from nnx_core.options import check_options, option

__all__ = ["Job", "Launcher", "LauncherOptions", "Work", "last_committed", "make_launcher", "variables"]

_PACKAGES = {"elastic": "nnx-torchft", "ray": "nnx-ray"}
"""The distributions of launchers that may not be installed."""
_OURS = (
    LauncherSpec("slurm", "nnx_core.launch.launcher:Slurm", description="scripts, by srun"),
    LauncherSpec("torchrun", "nnx_core.launch.launcher:Torchrun", description="scripts, by torchrun"),
)


class Work(ABC):
    """The work of each process of a run. It is pickled, by value if necessary."""

    @abstractmethod
    def __call__(self, report: Callable[[str, str], None], resume_from: str | None = None) -> Any:
        """Run the work in a process with torchrun's variables.

        Args:
            report: Sends a message to the launcher at once: ``("save", path)`` on rank zero when a save
                begins, and ``("failed", text)`` on any rank that fails, before it waits for other ranks.
            resume_from: The checkpoint to resume from, in place of the user's.

        Returns:
            The results of rank zero; None on other ranks.
        """

    @abstractmethod
    def parts(self) -> Iterable[tuple[str, Any]]:
        """Return the objects to send with their names, for errors about objects that cannot be pickled."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, as a launcher starts it.

    Attributes:
        work: The work of each process.
        nodes: The number of nodes.
        devices: The number of processes on each node.
        device_type: The type of each process's device, such as ``"cpu"`` or ``"cuda"``.
        packages: The distributions that must have the same version everywhere.
    """

    work: Work
    nodes: int
    devices: int
    device_type: str
    packages: tuple[str, ...] = ()


def variables(
    rank: int, *, nodes: int, devices: int, address: str, port: int, run: str = "nnx"
) -> dict[str, str]:
    """Return torchrun's variables for one process; with them Lightning starts no processes.

    Args:
        rank: The global rank; the ranks of a node are consecutive.
        nodes: The number of nodes.
        devices: The number of processes on each node.
        address: The address of rank zero's node.
        port: A free port there.
        run: A name for the run.

    Example:
        >>> variables(5, nodes=2, devices=4, address="10.0.0.1", port=29500)["GROUP_RANK"]
        '1'
    """
    node, local = divmod(rank, devices)
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": nodes * devices,
        "LOCAL_WORLD_SIZE": devices,
        "GROUP_RANK": node,
        "NODE_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_PORT": port,
    }
    texts = {name: str(number) for name, number in numbers.items()}
    return {**texts, "MASTER_ADDR": address, "TORCHELASTIC_RUN_ID": run}


def last_committed(paths: Sequence[str]) -> tuple[str, int] | None:
    """Return the last resumable checkpoint and its global step; None if there is none.

    Args:
        paths: The paths of started saves, in order; some may not be committed, or may be deleted.
    """
    from nnx_checkpoint import open_checkpoint

    for path in dict.fromkeys(reversed(paths)):
        try:
            trainer = open_checkpoint(path).tree(None, lambda name: None)["trainer"]
            return path, int(trainer["global_step"])
        except (NnxError, OSError, KeyError, TypeError):
            continue
    return None


@dataclass(frozen=True, kw_only=True)
class LauncherOptions:
    """Options of every launcher; a launcher with further options extends this class."""

    weights: Literal["auto", "rank0", "none"] = option(
        "auto",
        help="Return the unsharded weights of rank 0 to the process that calls `fit`: 'auto' is 'none' for "
        "strategies that shard parameters, whose checkpoints have the weights.",
        choices=("auto", "rank0", "none"),
    )

    def __post_init__(self) -> None:
        check_options(self)


class Launcher(ABC):
    """Starts the processes of a run.

    Args:
        options: An instance of the class's `Options`. A launcher must be picklable.
    """

    Options: ClassVar[type[LauncherOptions]] = LauncherOptions

    def __init__(self, options: LauncherOptions | None = None) -> None:
        self.options = options or self.Options()

    @abstractmethod
    def run(self, job: Job) -> Any:
        """Run a job's work in every process, and return the result of rank zero.

        It always ends all processes, also on Ctrl-C. It raises the error of the rank that failed first, with
        its traceback as the cause.
        """

    def run_script(self, command: Sequence[str], *, nodes: int, devices: int) -> int:
        """Run a command in every process, and return an exit code for the shell.

        Args:
            command: The program and its arguments.
            nodes: The number of nodes.
            devices: The number of processes on each node.
        """
        raise LaunchError(f"{type(self).__name__} starts no scripts.", remedy="Run the script with python.")

    def describe(self, command: Sequence[str], *, nodes: int, devices: int) -> str:
        """Return the command of `run_script`, in a line."""
        return f"{' '.join(command)}   # {nodes} x {devices} processes"


def make_launcher(name: str, options: Mapping[str, Any]) -> tuple[Launcher, dict[str, Any]]:
    """Build a launcher by its name.

    Args:
        name: A name that a plugin has declared, or ``torchrun`` or ``slurm``.
        options: Options, of the launcher and others.

    Returns:
        The launcher, and the other options.

    Raises:
        OptionError: There is no such launcher, or an option has a wrong value.
        LaunchError: A package that it needs is not installed.
    """
    known = {spec.name: spec for spec in (*_OURS, *launchers().values())}
    if name not in known:
        raise _unknown(name, sorted(known))
    spec = known[name]
    for module, package in spec.needs.items():
        if find_spec(module) is None:
            raise LaunchError(
                f"launcher={name!r} needs {package}, which is not installed.",
                remedy=f"Run `pip install '{package}'`.",
            )
    cls = import_reference(spec.target, what=f"launcher {name!r}")
    if not (isinstance(cls, type) and issubclass(cls, Launcher)):
        raise PluginError(
            f"launcher {name!r} is declared as {spec.target!r}, which is no "
            "nnx_core.launch.launcher.Launcher.",
            remedy="Upgrade or remove the plugin that declares it.",
        )
    names = {item.name for item in fields(cls.Options)}
    own = {key: value for key, value in options.items() if key in names}
    return cls(cls.Options(**own)), {key: value for key, value in options.items() if key not in names}


def _unknown(name: str, known: Sequence[str]) -> OptionError:
    if name in _PACKAGES:
        return LauncherNotInstalledError(
            f"launcher={name!r} is provided by the package {_PACKAGES[name]}, which is not installed.",
            remedy=f"Run `pip install {_PACKAGES[name]}`.",
        )
    near = get_close_matches(str(name), [*known, *_PACKAGES], n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return OptionError(
        f"launcher={name!r} is unknown.",
        remedy=f"{hint}Use one of {', '.join(map(repr, sorted({*known, *_PACKAGES})))}.",
    )


class LauncherNotInstalledError(OptionError, ImportError):
    """The launcher is known, but its distribution is not installed."""


# The launchers of the core start only scripts, by external programs.


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions(LauncherOptions):
    """Options of torchrun, by its own names."""

    node_rank: int = option(0, help="The number of this node.", types=(int,))
    master_addr: str = option("", help="The address of the first node.", types=(str,))
    master_port: int = option(29500, help="A free port there.", types=(int,))
    max_restarts: int = option(0, help="How many times torchrun restarts all processes.", types=(int,))
    rdzv_id: str = option(
        "", help="A name for the run, the same on all nodes; needed for restarts on several.", types=(str,)
    )


class Torchrun(Launcher):
    """Starts a script on this node by torchrun; run it on each node."""

    Options = TorchrunOptions
    options: TorchrunOptions

    def run(self, job: Job) -> Any:
        """Raise, because torchrun starts scripts."""
        raise _starts_scripts("torchrun")

    def run_script(self, command: Sequence[str], *, nodes: int, devices: int) -> int:
        """Run torchrun."""
        # With one store for all starts, new processes read addresses of dead ones (pytorch #135712).
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.options.max_restarts else {}
        words = self._words(command, nodes, devices)
        return subprocess.run(words, check=False, env={**os.environ, **own_store}).returncode

    def describe(self, command: Sequence[str], *, nodes: int, devices: int) -> str:
        """Return the command line of torchrun."""
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
        if given["rdzv_id"]:
            words.append(f"--rdzv-id={given['rdzv_id']}")
        if nodes > 1 and given["max_restarts"]:
            words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={given['master_addr']}:{given['master_port']}"]
        elif nodes > 1:
            names = ("node_rank", "master_addr", "master_port")
            words += [f"--{name.replace('_', '-')}={given[name]}" for name in names]
        else:
            words.append("--standalone")
        return [sys.executable, "-m", "torch.distributed.run", *words, *_script(command)]


class Slurm(Launcher):
    """Starts a script by srun, inside an allocation or with a new one."""

    def run(self, job: Job) -> Any:
        """Raise, because srun starts scripts."""
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
        """Return the command line of srun."""
        return " ".join(self._words(command, nodes, devices))

    def _words(self, command: Sequence[str], nodes: int, devices: int) -> list[str]:
        return ["srun", f"--nodes={nodes}", f"--ntasks-per-node={devices}", sys.executable, *_script(command)]


def _script(command: Sequence[str]) -> Sequence[str]:
    """Return a script and its arguments, without the Python interpreter that `nnx run` adds."""
    return command[1:] if command[0] == sys.executable else command


def _starts_scripts(name: str) -> LaunchError:
    return LaunchError(
        f"launcher={name!r} starts scripts, and not the processes of a Trainer in a running script.",
        remedy=f"Leave `launcher` out and start the script with `nnx run --on {name} -- train.py`.",
    )
