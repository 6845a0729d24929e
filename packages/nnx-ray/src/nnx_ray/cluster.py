"""Connect to the cluster, and start and check the workers of one attempt at a run."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from nnx_core.errors import LaunchError
from nnx_core.launch.launcher import variables
from nnx_ray.actors import Worker, WorkerInfo, versions
from nnx_ray.options import RayOptions

__all__ = ["WorkerGroup", "Resources", "connect", "wait_for_nodes"]

log = logging.getLogger("nnx.ray")
_JOB_KEYS = ("working_dir", "py_modules")
"""Keys of a runtime environment that Ray accepts only in `ray.init`."""


_FORWARDED = ("NNX_", "PL_", "TORCHFT_")
"""Prefixes of the environment variables that processes get from the script."""


class Resources:
    """The resources that each process of a run reserves.

    Args:
        options: The options of the launcher.
        device_type: The type of the process's device.
    """

    def __init__(self, options: RayOptions, device_type: str) -> None:
        others = dict(options.resources_per_worker)
        self.cpus = float(options.cpus_per_worker)
        self.gpus = float(others.pop("GPU", 0 if device_type == "cpu" else 1))
        self.others = others

    def of(self, workers: int) -> dict[str, float]:
        """Return the resources that this many workers reserve together, by Ray's names."""
        one = {"CPU": self.cpus, "GPU": self.gpus, **self.others}
        return {name: amount * workers for name, amount in one.items() if amount}


def connect(options: RayOptions, *, cpus: float) -> None:
    """Connect to the cluster, or start one on this machine.

    Args:
        options: The options of the launcher.
        cpus: The minimum number of CPUs of a cluster started here.

    Raises:
        LaunchError: The address does not answer, or is not a Ray cluster.
    """
    if ray.is_initialized():
        return
    address = options.address or os.environ.get("RAY_ADDRESS") or "local"
    job_env = {name: value for name, value in options.runtime_env.items() if name in _JOB_KEYS} or None
    try:
        if address == "local":
            wanted = max(os.cpu_count() or 1, math.ceil(cpus))
            ray.init(address=address, num_cpus=wanted, include_dashboard=False, runtime_env=job_env)
        else:
            _require_answer(address, options.start_timeout)
            ray.init(address=address, runtime_env=job_env)
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        if isinstance(error, LaunchError):
            raise
        raise _unreachable(address, f"{type(error).__name__}: {error}".strip()) from error
    log.debug("connected")


def _require_answer(address: str, timeout: float) -> None:
    """Check the address in a process of its own.

    A failed connection would make Ray end this process, or wait for long.
    """
    scheme, _, endpoint = address.rpartition("://")
    host, _, port = endpoint.rpartition(":")
    if address == "auto" or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), min(timeout, 10.0)).close()
        if not scheme:
            ask = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", endpoint]
            subprocess.run(ask, check=True, capture_output=True, timeout=timeout)
    except OSError as error:
        raise _unreachable(address, str(error)) from error
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise _unreachable(address, "the server there is not the head of a Ray cluster") from error


def _unreachable(address: str, seen: str) -> LaunchError:
    return LaunchError(
        f"the Ray cluster at {address!r} does not answer: {seen}.",
        remedy="Start it with `ray start --head`, check the address, or leave it out.",
    )


def wait_for_nodes(timeout: float) -> None:
    """Wait until every node that Ray considers alive answers.

    Ray may not have noticed the loss of a node. A placement group requested then would wait for that node.

    Args:
        timeout: The maximum number of seconds to wait.
    """
    asked: dict[str, Any] = {}
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        for node in alive:
            if node not in asked:
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                ask = ray.remote(_answer).options(num_cpus=0, scheduling_strategy=there)
                asked[node] = ask.remote()
        _, silent = ray.wait([asked[node] for node in alive], num_returns=len(alive), timeout=1.0)
        if not silent:
            return


def _answer() -> None:
    """Run on a node to prove that it is alive."""


class WorkerGroup:
    """The workers of one attempt, started in a placement group and compared with the driver.

    Args:
        options: The options of the launcher.
        nodes: The number of nodes; each is a bundle of the placement group.
        devices: The number of workers on each node.
        device_type: The type of each worker's device.
        packages: The distributions that must have the same version everywhere.

    Raises:
        LaunchError: The cluster is too small, a worker cannot start, or versions differ.
    """

    def __init__(
        self, options: RayOptions, *, nodes: int, devices: int, device_type: str, packages: Sequence[str]
    ) -> None:
        self.options, self.nodes, self.devices = options, nodes, devices
        self.resources = Resources(options, device_type)
        self.placement: PlacementGroup | None = None
        self.workers: list[Any] = []
        try:
            self.placement = self._reserve()
            log.debug("placed")
            self.workers = [self._start(rank) for rank in range(nodes * devices)]
            self.infos: list[WorkerInfo] = self._ask("describe", ["ray", "nnx-ray", *packages])
            log.debug("workers answer")
            self._compare(versions(["ray", "nnx-ray", *packages]))
        except BaseException:
            self.end()
            raise

    def environments(self, run: str) -> list[dict[str, str]]:
        """Return each worker's environment variables.

        Args:
            run: A name of the run, the same for all attempts.
        """
        port = ray.get(self.workers[0].free_port.remote(), timeout=self.options.start_timeout)
        common = {name: text for name, text in os.environ.items() if name.startswith(_FORWARDED)}
        address, found = self.infos[0].address, []
        for rank in range(len(self.workers)):
            mine = variables(
                rank, nodes=self.nodes, devices=self.devices, address=address, port=port, run=run
            )
            first = rank // self.devices * self.devices
            gpus = [gpu for info in self.infos[first : first + self.devices] for gpu in info.gpus]
            if gpus:  # each worker sees all GPUs of its node, as under torchrun
                mine["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            found.append({**common, **mine})
        return found

    def last_committed(self, paths: Sequence[str]) -> tuple[str, int] | None:
        """Return the last resumable checkpoint that rank zero's node sees, and its step."""
        found: tuple[str, int] | None = ray.get(self.workers[0].last_committed.remote(paths))
        return found

    def end(self) -> None:
        """Kill every worker and release the placement group."""
        for worker in self.workers:
            with contextlib.suppress(RayError):
                ray.kill(worker, no_restart=True)
        if self.placement is not None and ray.is_initialized():
            with contextlib.suppress(RayError):
                remove_placement_group(self.placement)
        self.workers, self.placement = [], None

    def __str__(self) -> str:
        """List the ranks and their nodes."""
        ranks = range(0, len(self.infos), self.devices)
        last = self.devices - 1
        return ", ".join(f"ranks {rank}-{rank + last} on {self.infos[rank].node}" for rank in ranks)

    def _reserve(self) -> PlacementGroup:
        bundle = self.resources.of(self.devices) or {"CPU": 0.001}
        group = placement_group([bundle] * self.nodes, strategy=self.options.placement.upper())
        if group.wait(self.options.start_timeout):
            return group
        free, nodes = ray.available_resources(), [node for node in ray.nodes() if node["Alive"]]
        remove_placement_group(group)
        totals = "; ".join(
            f"{node['NodeManagerHostname']} has {_amounts(node['Resources'], bundle)}" for node in nodes
        )
        raise LaunchError(
            f"the Ray cluster is too small: {self.nodes} x ({_amounts(bundle, bundle)}) with "
            f"placement={self.options.placement!r} were requested, and within "
            f"{self.options.start_timeout:g} s there was {_amounts(free, bundle)} free on {len(nodes)} nodes "
            f"({totals}).",
            remedy="Lower `devices`, `num_nodes` or `cpus_per_worker`, wait for other runs, or add nodes.",
        )

    def _start(self, rank: int) -> Any:
        own = {name: each for name, each in self.options.runtime_env.items() if name not in _JOB_KEYS}
        where = PlacementGroupSchedulingStrategy(
            self.placement,
            placement_group_bundle_index=rank // self.devices,
        )
        return (
            ray.remote(Worker)
            .options(
                num_cpus=self.resources.cpus,
                num_gpus=self.resources.gpus,
                resources=self.resources.others or None,
                scheduling_strategy=where,
                runtime_env=own or None,
                max_restarts=0,
            )
            .remote()
        )

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all workers and return their answers. The first call waits for their start."""
        answers = [getattr(worker, method).remote(*arguments) for worker in self.workers]
        for rank, answer in enumerate(answers):
            try:
                ray.get(answer, timeout=self.options.start_timeout)
            except GetTimeoutError as error:
                raise LaunchError(
                    f"rank {rank}'s worker did not start within {self.options.start_timeout:g} s.",
                    remedy="Check `ray status`, and pass a larger start_timeout for a slow runtime_env.",
                ) from error
            except RayError as error:
                raise LaunchError(
                    f"rank {rank}'s worker cannot start on {self._node_of(rank)}: {error}",
                    remedy="Install nnx-ray and its dependencies there, or list nnx-ray in runtime_env.",
                ) from error
        return [ray.get(answer) for answer in answers]

    def _node_of(self, rank: int) -> str:
        table = ray.util.placement_group_table(self.placement)
        wanted = table["bundles_to_node_id"].get(rank // self.devices)
        found = [node["NodeManagerHostname"] for node in ray.nodes() if node["NodeID"] == wanted]
        return str(found[0]) if found else "its node"

    def _compare(self, expected: Mapping[str, str | None]) -> None:
        for rank, info in enumerate(self.infos):
            for package, here in expected.items():
                there = info.versions[package]
                if there != here:
                    raise LaunchError(
                        f"{info.node}, where rank {rank} runs, has {package} {there or '(not installed)'}, "
                        f"and this process has {here or 'none'}.",
                        remedy=f"Install the same version on every node, or list it in runtime_env: "
                        f"{{'pip': ['{package}=={here}']}}.",
                    )


def _amounts(resources: Mapping[str, float], names: Mapping[str, float]) -> str:
    """Format the amounts of the named resources."""
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in names)
