"""The laboratory itself: nodes are isolated, and it leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodes.laboratory import Laboratory, why_not

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.nodes]

RECEIVE = """
import socket, sys
with socket.create_server(("", 4000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    size = 0
    while data := connection.recv(1 << 20):
        size += len(data)
    print("received", size, flush=True)
"""
SEND = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection(("node0", 4000), timeout=20) as connection:
    connection.sendall(bytes(int(sys.argv[1])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print("seconds", time.monotonic() - began)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """Two nodes."""
    with Laboratory(2, folder=tmp_path_factory.mktemp("lab")) as made:
        yield made


def send(lab: Laboratory, size: int) -> float:
    """Send bytes from node 1 to node 0; the seconds that it took."""
    receiving = lab.nodes[0].start(sys.executable, "-c", RECEIVE)
    receiving.wait_for("ready", 20)
    sent = lab.nodes[1].start(sys.executable, "-c", SEND, str(size)).wait(60)
    assert sent.code == 0, sent.output
    assert f"received {size}" in receiving.wait(20).output
    return float(sent.output.split()[-1])


def test_each_node_has_its_own_name_address_and_processes(lab: Laboratory) -> None:
    for node in lab.nodes:
        assert node.do("hostname").strip() == node.name
        assert node.address in node.do("ip -brief address show eth0")
        assert len(node.do("ls -d /proc/[0-9]*").split()) < 8
        assert node.do("getent hosts node1").split() == [lab.nodes[1].address, "node1"]


def test_disks_and_shared_memory_are_private_and_one_folder_is_shared(lab: Laboratory) -> None:
    first, second = lab.nodes
    for folder in (lab.private, Path("/dev/shm")):
        first.do(f"echo here > {folder}/file")
        assert second.do(f"ls {folder}").strip() == ""
        assert not (folder / "file").exists()
    first.do(f"echo here > {lab.shared}/file")
    assert second.do(f"cat {lab.shared}/file").strip() == "here"


@pytest.mark.full
def test_links_count_bytes_and_keep_to_their_rate(lab: Laboratory) -> None:
    size = 8_000_000
    before = [node.traffic() for node in lab.nodes]
    quick = send(lab, size)
    after = [node.traffic() for node in lab.nodes]
    sent = after[1][0] - before[1][0]
    received = after[0][1] - before[0][1]
    assert size < sent < 1.1 * size
    assert size < received < 1.1 * size
    lab.nodes[0].limit("16mbit")
    assert send(lab, size) > max(3.0, 2 * quick)  # 4 s, less what goes through at once
    lab.nodes[0].limit("10gbit")


def test_a_cut_link_loses_what_is_sent_until_it_is_mended(lab: Laboratory) -> None:
    lab.nodes[1].cut()
    receiving = lab.nodes[0].start(sys.executable, "-c", RECEIVE)
    receiving.wait_for("ready", 20)
    sending = lab.nodes[1].start(sys.executable, "-c", SEND, "1000")
    time.sleep(2)
    assert sending.is_running
    assert receiving.is_running
    lab.nodes[1].mend()
    assert "received 1000" in receiving.wait(30).output


def test_a_node_vanishes_with_all_its_processes(tmp_path: Path) -> None:
    with Laboratory(2, folder=tmp_path / "lab") as lab:
        run = lab.nodes[1].start("sleep", "1000")
        lab.nodes[1].vanish()
        assert run.wait(10).code != 0
        assert lab.nodes[0].do("hostname").strip() == "node0"


def test_nothing_stays_when_the_owner_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from nodes.laboratory import Laboratory\n"
        f"lab = Laboratory(2, folder=pathlib.Path({str(tmp_path / 'lab')!r})).__enter__()\n"
        "lab.nodes[0].start('sleep', '31415926')\n"
        "print('built', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": root, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    assert "built" in done.stdout, done.stderr
    end = time.monotonic() + 10
    while _is_there("31415926") and time.monotonic() < end:
        time.sleep(0.1)
    assert not _is_there("31415926")
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert "port0" not in links
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def _is_there(argument: str) -> bool:
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_bytes())
        except OSError:
            continue
    return any(argument.encode() in command.split(b"\0") for command in commands)
