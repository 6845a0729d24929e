"""The cluster: how it is reached, what it has, the workers of one attempt at a run, and their journal."""

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
from nnx_ray.actors import Place, Worker, versions
from nnx_ray.options import RayOptions

__all__ = ["Crew", "Resources", "connect", "wait_for_nodes"]

log = logging.getLogger("nnx.ray")
_OF_A_JOB = ("working_dir", "py_modules")
"""What of a runtime environment Ray takes only where it is connected to."""


class Resources:
    """What one process of a run reserves.

    Args:
        options: The options of the launcher.
        device_type: The type of its device.
    """

    def __init__(self, options: RayOptions, device_type: str) -> None:
        others = dict(options.resources_per_worker)
        self.cpus = float(options.cpus_per_worker)
        self.gpus = float(others.pop("GPU", 0 if device_type == "cpu" else 1))
        self.others = others

    def of(self, workers: int) -> dict[str, float]:
        """What so many of them reserve together, by Ray's names."""
        one = {"CPU": self.cpus, "GPU": self.gpus, **self.others}
        return {name: amount * workers for name, amount in one.items() if amount}


def connect(options: RayOptions, *, cpus: float) -> None:
    """Connect to the cluster, or start one of this machine alone.

    Args:
        options: The options of the launcher.
        cpus: The smallest number of CPUs of a cluster that is started here.

    Raises:
        LaunchError: The address does not answer, or not as Ray does.
    """
    if ray.is_initialized():
        return
    address = options.address or os.environ.get("RAY_ADDRESS") or "local"
    of_job = {name: value for name, value in options.runtime_env.items() if name in _OF_A_JOB} or None
    try:
        if address == "local":
            wanted = max(os.cpu_count() or 1, math.ceil(cpus))
            ray.init(address=address, num_cpus=wanted, include_dashboard=False, runtime_env=of_job)
        else:
            _require_answer(address, options.start_timeout)
            ray.init(address=address, runtime_env=of_job)
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        if isinstance(error, LaunchError):
            raise
        raise _no_answer(address, f"{type(error).__name__}: {error}".strip()) from error
    log.debug("connected")


def _require_answer(address: str, timeout: float) -> None:
    """Ask whether a cluster is there, in a process of its own: Ray would end this one, or wait for long."""
    scheme, _, place = address.rpartition("://")
    host, _, port = place.rpartition(":")
    if address == "auto" or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), min(timeout, 10.0)).close()
        if not scheme:
            ask = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", place]
            subprocess.run(ask, check=True, capture_output=True, timeout=timeout)
    except OSError as error:
        raise _no_answer(address, str(error)) from error
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise _no_answer(address, "what answers there is no head of a Ray cluster") from error


def _no_answer(address: str, seen: str) -> LaunchError:
    return LaunchError(
        f"the Ray cluster at {address!r} does not answer: {seen}.",
        remedy="Start it with `ray start --head`, check the address, or leave it out.",
    )


def wait_for_nodes(timeout: float) -> None:
    """Wait until every node that Ray takes for alive answers.

    A placement group that is asked for while a node is gone and Ray has not noticed keeps waiting for it.

    Args:
        timeout: Seconds to wait at most.
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
    """What a node does to say that it is there."""


class Crew:
    """The workers of one attempt: started in a placement group, numbered, and compared with the driver.

    Args:
        options: The options of the launcher.
        nodes: The number of nodes; each is a bundle of the group.
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
        self.group: PlacementGroup | None = None
        self.workers: list[Any] = []
        try:
            self.group = self._reserve()
            log.debug("placed")
            self.workers = [self._start(rank) for rank in range(nodes * devices)]
            self.places: list[Place] = self._ask("describe", ["ray", "nnx-ray", *packages])
            log.debug("workers answer")
            self._compare(versions(["ray", "nnx-ray", *packages]))
        except BaseException:
            self.end()
            raise

    def environments(self) -> list[dict[str, str]]:
        """Each worker's environment variables."""
        port = ray.get(self.workers[0].free_port.remote(), timeout=self.options.start_timeout)
        common = {name: text for name, text in os.environ.items() if name.startswith(("NNX_", "PL_"))}
        address, found = self.places[0].address, []
        for rank in range(len(self.workers)):
            mine = variables(rank, nodes=self.nodes, devices=self.devices, address=address, port=port)
            first = rank // self.devices * self.devices
            gpus = [gpu for place in self.places[first : first + self.devices] for gpu in place.gpus]
            if gpus:  # each sees all of its node's, as under torchrun
                mine["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            found.append({**common, **mine})
        return found

    def last_committed(self, paths: Sequence[str]) -> tuple[str, int] | None:
        """The last checkpoint that can be resumed, as rank 0's node sees it, and its step."""
        found: tuple[str, int] | None = ray.get(self.workers[0].last_committed.remote(paths))
        return found

    def end(self) -> None:
        """End every worker at once, and give back what was reserved."""
        for worker in self.workers:
            with contextlib.suppress(RayError):
                ray.kill(worker, no_restart=True)
        if self.group is not None and ray.is_initialized():
            with contextlib.suppress(RayError):
                remove_placement_group(self.group)
        self.workers, self.group = [], None

    def __str__(self) -> str:
        """Which ranks are where."""
        ranks = range(0, len(self.places), self.devices)
        last = self.devices - 1
        return ", ".join(f"ranks {rank}-{rank + last} on {self.places[rank].node}" for rank in ranks)

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
            f"placement={self.options.placement!r} were asked for, and within "
            f"{self.options.start_timeout:g} s there was {_amounts(free, bundle)} free on {len(nodes)} nodes "
            f"({totals}).",
            remedy="Lower `devices`, `num_nodes` or `cpus_per_worker`, wait for others to end, or add nodes.",
        )

    def _start(self, rank: int) -> Any:
        own = {name: each for name, each in self.options.runtime_env.items() if name not in _OF_A_JOB}
        where = PlacementGroupSchedulingStrategy(
            self.group,
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
        """What all workers answer; the first thing that they are asked."""
        answers = [getattr(worker, method).remote(*arguments) for worker in self.workers]
        for rank, answer in enumerate(answers):
            try:
                ray.get(answer, timeout=self.options.start_timeout)
            except GetTimeoutError as error:
                raise LaunchError(
                    f"rank {rank}'s worker did not start within {self.options.start_timeout:g} s.",
                    remedy="Look at `ray status`, and pass a larger start_timeout for a slow runtime_env.",
                ) from error
            except RayError as error:
                raise LaunchError(
                    f"rank {rank}'s worker cannot start on {self._node_of(rank)}: {error}",
                    remedy="Install nnx-ray and what it needs there, or name it in runtime_env.",
                ) from error
        return [ray.get(answer) for answer in answers]

    def _node_of(self, rank: int) -> str:
        table = ray.util.placement_group_table(self.group)
        wanted = table["bundles_to_node_id"].get(rank // self.devices)
        found = [node["NodeManagerHostname"] for node in ray.nodes() if node["NodeID"] == wanted]
        return str(found[0]) if found else "its node"

    def _compare(self, expected: Mapping[str, str | None]) -> None:
        for rank, place in enumerate(self.places):
            for package, here in expected.items():
                there = place.versions[package]
                if there != here:
                    raise LaunchError(
                        f"{place.node}, where rank {rank} runs, has {package} {there or '(not installed)'}, "
                        f"and this process has {here or 'none'}.",
                        remedy=f"Install the same version on every node, or name it in runtime_env: "
                        f"{{'pip': ['{package}=={here}']}}.",
                    )


def _amounts(resources: Mapping[str, float], names: Mapping[str, float]) -> str:
    """Amounts of the resources that matter."""
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in names)
