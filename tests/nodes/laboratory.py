"""A simulation of several nodes on one machine, as Linux namespaces joined by a switch.

Each node has its own address, hostname, processes, shared memory and private disk, and a link to
the switch whose rate can be set, cut and read. The machine's own network is unchanged, and no traffic
leaves the machine. The kernel removes everything when the laboratory's process ends, in any way.

    with Laboratory(2, folder=tmp_path, rate="100mbit") as lab:
        runs = [node.start("hostname") for node in lab.nodes]
        print([run.wait(10).output for run in runs])

Needs root, iproute2 and util-linux (`why_not` names the missing ones).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Ended", "Laboratory", "Node", "Run", "why_not"]

_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
_FIRST = 11
"""The last byte of the first node's address."""
_BURST = 512 * 1024
"""Bytes that a link lets through at once: more than the largest packet that the kernel makes."""
_ALL_OF_IT = (
    "ip link add bridge type bridge && ip link add port type veth peer name eth0 && hostname node"
    f" && tc qdisc replace dev eth0 root tbf rate 1gbit burst {_BURST} latency 200ms"
    " && mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm"
)
"""The commands that a laboratory runs in its namespaces."""
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")


@cache
def why_not() -> str:
    """Return the reason that this machine cannot run a laboratory; empty if it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "sh", "-ec", _ALL_OF_IT], capture_output=True, text=True
    )
    return "" if tried.returncode == 0 else f"cannot make namespaces and links: {tried.stderr.strip()}"


@dataclass(frozen=True)
class Ended:
    """The end of a command.

    Attributes:
        code: The exit code; that of a signal is negative, or 128 more than its number from a shell.
        output: The output of the command and of all processes that it started.
        seconds: The time from its start to its end.
    """

    code: int
    output: str
    seconds: float


class Run:
    """A command that runs on a node."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process, self._output = process, output
        self._begun = time.monotonic()

    @property
    def output(self) -> str:
        """Return the output so far."""
        return self._output.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Return True until the command has ended."""
        return self._process.poll() is None

    def wait(self, seconds: float) -> Ended:
        """Wait for the end.

        Args:
            seconds: The time to wait at most.

        Raises:
            TimeoutError: It is still running; the message has the end of its output.
        """
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"still running after {seconds:.0f} s: {shlex.join(map(str, self._process.args))}\n"  # type: ignore[arg-type]
                f"{self.output[-3000:]}"
            ) from None
        return Ended(code, self.output, time.monotonic() - self._begun)

    def wait_for(self, text: str, seconds: float) -> None:
        """Wait until a text has been printed.

        Args:
            text: The text.
            seconds: The time to wait at most.

        Raises:
            TimeoutError: It was not printed, or the command ended before.
        """
        end = time.monotonic() + seconds
        while text not in self.output:
            if time.monotonic() > end or not self.is_running:
                raise TimeoutError(f"{text!r} was not printed:\n{self.output[-3000:]}")
            time.sleep(0.05)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Send a signal to the command."""
        self._process.send_signal(number)


class _Space:
    """Namespaces that last as long as a process which does nothing in them."""

    def __init__(self, *namespaces: str) -> None:
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "--fork", "--kill-child=KILL",
             "sleep", "infinity"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what unshare says of being killed
        )  # fmt: skip
        self.pid = _until(self._find_child, "a namespace did not begin")

    def _find_child(self) -> int | None:
        path = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        children = path.read_text().split()
        if not children:
            return None
        command = Path(f"/proc/{children[0]}/comm").read_text().strip()
        return int(children[0]) if command == "sleep" else None

    def inside(self, *command: str) -> list[str]:
        """The command line that runs another one in here, as a user at its shell."""
        return ["nsenter", f"--target={self.pid}", "--all", "--", *command]

    def do(self, script: str) -> str:
        """Run a shell script in the namespaces, and return its output."""
        done = subprocess.run(self.inside("sh", "-ec", script), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{script!r} failed: {done.stderr.strip()}")
        return done.stdout

    def kill(self) -> None:
        """End everything that runs in here, at once."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait()


class Node:
    """One machine of the laboratory.

    Attributes:
        number: Its number, from 0.
        name: Its hostname, which every node resolves: ``"node0"``.
        address: Its address.
    """

    def __init__(self, lab: Laboratory, number: int) -> None:
        self.number, self.name = number, f"node{number}"
        self.address = f"10.77.0.{_FIRST + number}"
        self._lab = lab
        self._space = _Space(*_NAMESPACES)
        self._runs = 0

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> Run:
        """Start a command in a shell's place, in the node's own folder on its private disk.

        Args:
            *command: The program and its arguments.
            env: Variables beside those that this process has; launchers' are not handed on.
        """
        self._runs += 1
        output = self._lab.folder / f"{self.name}-{self._runs}.txt"
        environment = {key: value for key, value in os.environ.items() if key not in _OF_LAUNCHERS}
        environment |= {"HOME": str(self._lab.private), "TMPDIR": str(self._lab.private), **(env or {})}
        with output.open("wb") as file:
            process = subprocess.Popen(
                self._space.inside("sh", "-c", 'cd "$HOME" && exec "$@"', "sh", *command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return Run(process, output)

    def do(self, script: str) -> str:
        """Run a short shell script on the node, and return its output."""
        return self._space.do(script)

    def vanish(self) -> None:
        """End all its processes at once and take it off the switch, as a power cut does."""
        self.cut()
        self._space.kill()

    def cut(self) -> None:
        """Cut its link: packets are lost without an error."""
        self._lab.switch(f"ip link set port{self.number} down")

    def mend(self) -> None:
        """Put the plug in again."""
        self._lab.switch(f"ip link set port{self.number} up")

    def limit(self, rate: str) -> None:
        """Set the rate of its link in both directions.

        Args:
            rate: A rate in the syntax of ``tc``: ``"100mbit"``, ``"1gbit"``.
        """
        shape = f"root tbf rate {rate} burst {_BURST} latency 200ms"
        self.do(f"tc qdisc replace dev eth0 {shape}")
        self._lab.switch(f"tc qdisc replace dev port{self.number} {shape}")

    def traffic(self) -> tuple[int, int]:
        """Bytes that it has sent and received over its link, headers included."""
        found: list[dict[str, Any]] = json.loads(self.do("ip -json -statistics link show eth0"))
        counted = found[0]["stats64"]
        return counted["tx"]["bytes"], counted["rx"]["bytes"]


class Laboratory:
    """Nodes, a switch between them, and a folder that they share.

    Args:
        count: The number of nodes.
        folder: An empty folder for the output of nodes, for the shared disk and the private ones.
        rate: The rate of every link, as ``tc`` takes it; as fast as the kernel can by default.

    Attributes:
        nodes: The nodes.
        shared: A folder that all nodes see, as one on a network disk.
        private: A folder at the same path on every node, with other contents on each.
    """

    def __init__(self, count: int, *, folder: Path, rate: str = "") -> None:
        self.folder, self.shared, self.private = folder, folder / "shared", folder / "private"
        self._count, self._rate = count, rate
        self._stack = ExitStack()
        self.nodes: list[Node] = []

    def __enter__(self) -> Laboratory:
        for made in (self.shared, self.private):
            made.mkdir(parents=True)
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _build(self) -> None:
        switch = _Space("--net", "--pid")
        self._stack.callback(switch.kill)
        self.switch: Callable[[str], str] = switch.do
        switch.do("ip link add bridge type bridge && ip link set bridge up")
        for number in range(self._count):
            node = Node(self, number)
            self.nodes.append(node)
            self._stack.callback(node._space.kill)
        names = "".join(f"{node.address} {node.name}\n" for node in self.nodes)
        hosts = self.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{names}")
        for node in self.nodes:
            self._connect(switch, node)
            node.do(
                f"hostname {node.name} && ip link set lo up && ip link set eth0 up"
                f" && ip address add {node.address}/24 dev eth0"
                f" && mount --make-rprivate / && mount -t proc proc /proc"
                f" && mount -t tmpfs tmpfs {shlex.quote(str(self.private))}"
                f" && mount -t tmpfs tmpfs /dev/shm"
                f" && mount --bind {shlex.quote(str(hosts))} /etc/hosts"
            )
            if self._rate:
                node.limit(self._rate)

    def _connect(self, switch: _Space, node: Node) -> None:
        port = f"port{node.number}"
        # Made in the switch's network and handed to the node's: names of the machine's own never collide.
        command = (
            f"ip link add {port} type veth peer name eth0 netns {node._space.pid}"
            f" && ip link set {port} master bridge up"
        )
        subprocess.run(
            ["nsenter", f"--target={switch.pid}", "--net", "--", "sh", "-ec", command],
            check=True,
            capture_output=True,
        )


def _until(look: Callable[[], int | None], otherwise: str, seconds: float = 10.0) -> int:
    """Call a function until it returns a result, and return that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError):
            found = look()
            if found is not None:
                return found
        time.sleep(0.01)
    raise TimeoutError(otherwise)
