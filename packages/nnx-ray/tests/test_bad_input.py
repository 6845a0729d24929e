"""A run that cannot start soon raises one error with its remedy; so do the commands of docs/machines.md."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

import nnx
from nnx_conformance.task import Plain, Task
from nnx_core.errors import LaunchError, OptionError


def trainer_of(nodes: int = 2, devices: int = 1, **options: Any) -> Trainer:
    return Trainer(
        strategy=nnx.strategy("fsdp_auto", launcher="ray", **options),
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


class Locked(Plain):
    """Has an attribute that cannot be pickled."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.guard = {"lock": threading.Lock()}


@pytest.fixture
def dumb_server() -> Iterator[str]:
    """Something that accepts connections, and is no Ray."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_module_that_cannot_be_pickled_is_named_with_its_attribute() -> None:
    with pytest.raises(
        LaunchError, match=r"the module's attribute 'guard', a dict.* cannot be pickled"
    ) as caught:
        trainer_of().fit(Locked(Task(steps=1)))
    assert "Create it in `setup` or `configure_model`" in caught.value.remedy


def test_an_address_where_nothing_answers_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"cluster at '127.0.0.1:9' does not answer: .*Connection refused"):
        trainer_of(address="127.0.0.1:9").fit(Task(steps=1).module())
    assert time.monotonic() - began < 10


def test_an_address_where_something_else_answers_is_named(dumb_server: str) -> None:
    with pytest.raises(LaunchError, match="the server there is not the head of a Ray cluster"):
        trainer_of(address=dumb_server, start_timeout=6).fit(Task(steps=1).module())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"placement": "apart"}, "placement='apart' is not allowed. Use one of 'spread', 'pack'"),
        ({"max_failures": -1}, "max_failures=-1 is negative"),
        ({"start_timeout": 0}, "start_timeout=0 is not a positive number of seconds"),
        ({"resources_per_worker": 3}, "resources_per_worker=3 is of type int"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(OptionError, match=expected):
        nnx.strategy("fsdp_auto", launcher="ray", **options)


@pytest.mark.full
def test_a_cluster_that_is_too_small_says_what_was_asked_for_and_what_is_free(cluster: Any) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        trainer_of(nodes=2, devices=3, placement="strict_spread", start_timeout=2).fit(Task(steps=1).module())
    assert "2 x (CPU 3) with placement='strict_spread' were requested" in caught.value.message
    assert "CPU 6 free on 4 nodes" in caught.value.message and "has CPU 2" in caught.value.message
    assert "Lower `devices`" in caught.value.remedy
    assert time.monotonic() - began < 20
    with pytest.raises(LaunchError, match=r"1 x \(CPU 1, tpu 2\).* tpu 0 free"):
        trainer_of(nodes=1, resources_per_worker={"tpu": 2}, start_timeout=2).fit(Task(steps=1).module())


@pytest.mark.full
def test_a_node_with_another_version_is_named_with_it(empty_cluster: Any, tmp_path: Path) -> None:
    old = tmp_path / "nnx_core-0.0.9.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: nnx-core\nVersion: 0.0.9\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    node = empty_cluster.add_node(num_cpus=2, resources={"odd": 2}, env_vars={"PYTHONPATH": path})
    try:
        with pytest.raises(
            LaunchError, match=r"where rank 0 runs, has nnx-core 0\.0\.9, and .* has 0\.1\.0"
        ) as caught:
            trainer_of(nodes=1, devices=1, resources_per_worker={"odd": 1}).fit(Task(steps=1).module())
        assert "Install the same version on every node" in caught.value.remedy
    finally:
        empty_cluster.remove_node(node)


@pytest.mark.full
def test_a_script_is_started_in_every_process_and_its_exit_code_comes_back(
    cluster: Any, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys
            from pathlib import Path
            names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_PORT")
            text = " ".join(os.environ[name] for name in names)
            Path(sys.argv[1], os.environ["RANK"]).write_text(text)
            sys.exit(3 if os.environ["RANK"] == sys.argv[2] else 0)
            """
        )
    )
    words = [sys.executable, "-m", "nnx", "run", "--on", "ray", "--nodes", "2", "--devices", "2"]
    words += ["--option", f"address={cluster.address}", "--", str(script), str(tmp_path)]
    good = subprocess.run([*words, "none"], capture_output=True, text=True, timeout=120, check=False)
    assert good.returncode == 0, good.stderr
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(4)]
    assert [each[:4] for each in found] == [
        ["0", "0", "0", "4"],
        ["1", "1", "0", "4"],
        ["2", "0", "1", "4"],
        ["3", "1", "1", "4"],
    ]
    assert len({each[4] for each in found}) == 1
    bad = subprocess.run([*words, "2"], capture_output=True, text=True, timeout=120, check=False)
    assert bad.returncode == 3
    assert "rank 2 on" in bad.stderr and "ended with exit code 3" in bad.stderr
