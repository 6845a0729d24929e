"""Measurements of machines: made once, stored on disk, and repeated if a file is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nnx_core.communicator import GroupCommunicator
from nnx_core.errors import OptionError
from nnx_core.machine import calibration
from nnx_core.machine.calibration import (
    calibrated,
    link_sizes,
    measure_copies,
    measure_link,
    updated_elements,
)
from nnx_core.machine.hardware import COLLECTIVES, PROFILES, Hardware, Link, MeasuredLink, profile

ALONE = GroupCommunicator(None)


def test_links_interpolate_what_was_measured_and_scale_it_with_ranks() -> None:
    points = dict.fromkeys(("all_reduce", "all_gather"), ((1000.0, 1.0), (3000.0, 2.0)))
    link = MeasuredLink(2, points)
    assert link.seconds("all_gather", 500, 2) == 1.0
    assert link.seconds("all_gather", 2000, 2) == 1.5
    assert link.seconds("all_gather", 5000, 2) == 3.0
    assert link.seconds("all_gather", 2000, 1) == 0.0
    assert link.seconds("all_gather", 2000, 4) == pytest.approx(2.0)  # 3/4 are sent and not 1/2
    assert link.throughput("all_gather", 2) == pytest.approx(1 / 2000)
    assert Link(1e-6, 1e9).seconds("all_reduce", 1e6, 8) > Link(1e-6, 1e9).seconds("all_reduce", 1e6, 2)


@pytest.mark.parametrize(
    "points", [((1e3, 1.0), (2e3, 3.0), (4e3, 3.0)), ((1e3, 3.0), (2e3, 3.0), (4e3, 3.0))]
)
def test_no_link_is_infinitely_fast_where_larger_messages_seemed_to_take_no_longer(
    points: tuple[tuple[float, float], ...],
) -> None:
    link = MeasuredLink(2, {"all_reduce": points})
    assert link.throughput("all_reduce", 2) >= 2 / 3e3 / 4
    assert link.seconds("all_reduce", 1e6, 2) == pytest.approx(
        3.0 + (1e6 - 4e3) * link.throughput("all_reduce", 2)
    )
    assert link.seconds("all_reduce", 3e3, 2) == 3.0


@pytest.mark.parametrize(
    ("device", "rate", "largest"),
    [("cpu", 1e9, 4 * 1024**2), ("cuda", 1e11, 256 * 1024**2), ("cpu", 1e6, 64 * 1024)],
    ids=["cpu", "cuda", "slow"],
)
def test_links_are_measured_beyond_their_latency_and_slow_ones_not_for_long(
    device: str, rate: float, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(*arguments: object) -> float:
        whole = arguments[-1]
        assert isinstance(whole, int)
        return whole / rate

    monkeypatch.setattr(calibration, "_collective_seconds", seconds)
    link = measure_link(ALONE, torch.device(device), float, 2**40)
    for found in link.points.values():
        assert found[0][0] == 4096 and found[-1][0] == largest


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_are_marked_as_published_and_survive_json(name: str) -> None:
    hardware = profile(name)
    assert hardware.origin == "published"
    assert Hardware.of_json(json.loads(json.dumps(hardware.to_json()))) == hardware
    assert hardware.flops("float8_e4m3fn") == hardware.flops("float32")


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"no hardware profile 'tpu'.*a100-nvlink, cpu, h100-ib"):
        profile("tpu")


def test_groups_within_a_node_use_its_link_and_others_the_network() -> None:
    hardware = profile("h100-nvlink")
    assert hardware.link(8) is hardware.inside
    assert hardware.link(16) is hardware.link(4, stride=8) is hardware.across


def measure(*, fresh: bool = False) -> Hardware:
    return calibrated(ALONE, torch.device("cpu"), group=None, fresh=fresh)


@pytest.mark.full
def test_the_machine_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_LAPS", 4)
    monkeypatch.setenv("NNX_CACHE_DIR", str(tmp_path))
    hardware = measure()
    assert hardware.origin == "measured"
    (kept,) = (tmp_path / "measured").iterdir()
    for kind in COLLECTIVES:
        assert isinstance(hardware.inside, MeasuredLink)
        seconds = [seconds for _, seconds in hardware.inside.points[kind]]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0
    assert measure() == hardware == Hardware.of_json(json.loads(kept.read_text())["hardware"])


@pytest.fixture
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The bandwidth that was found in each of the measurements, which are made up."""
    found: list[float] = []
    figures = ("matmul", "special", "random", "overhead", "update", "update_overhead", "fused_update")

    def compute(*_: object) -> dict[str, object]:
        found.append(1e9 + len(found))
        rates = {name: getattr(profile("cpu"), name) for name in (*figures, "host_update")}
        return {**rates, "bandwidth": found[-1]}

    monkeypatch.setenv("NNX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "measure_compute", compute)
    monkeypatch.setattr(calibration, "measure_copies", lambda *_: {"to_device": 1.0, "to_host": 1.0})
    monkeypatch.setattr(calibration, "_collective_seconds", lambda *_: 1.0)
    return found


def test_a_damaged_measurement_is_made_again(tmp_path: Path, measurements: list[float]) -> None:
    first = measure()
    (kept,) = (tmp_path / "cache" / "measured").iterdir()
    content = json.loads(kept.read_text())
    other = {**content["key"], "hosts": ["elsewhere"]}
    for damage in ("", "{", "[]", "{}", json.dumps({"key": other, "hardware": first.to_json()})):
        kept.write_text(damage)
        assert measure().bandwidth == measurements[-1] == measure().bandwidth
    assert len(measurements) == 6
    assert json.loads(kept.read_text())["hardware"]["bandwidth"] == measurements[-1]
    assert measure(fresh=True).bandwidth == measurements[6]


def test_a_directory_that_cannot_be_written_is_done_without(
    tmp_path: Path, measurements: list[float]
) -> None:
    (tmp_path / "cache").write_text("")
    assert measure() != measure()
    assert len(measurements) == 2


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "fast", None])
def test_figures_that_are_no_rates_are_not_believed(value: object) -> None:
    for figures in ({"to_host": value}, {"update": value}, {"matmul": {"float32": value}}):
        with pytest.raises((ValueError, TypeError)):
            Hardware.of_json({**profile("cpu").to_json(), **figures})


def test_a_card_is_measured_at_sizes_at_which_launching_kernels_takes_no_share() -> None:
    large = 20 * 2**30
    assert (updated_elements("cuda", large), link_sizes("cuda", large)[-1]) == (2**27, 256 * 2**20)
    assert (updated_elements("cpu", large), link_sizes("cpu", large)[-1]) == (2**21, 4 * 2**20)


@pytest.mark.parametrize("room", [2**20, 2**28, 3 * 2**28])
def test_measuring_takes_no_more_of_a_card_than_it_may(room: int) -> None:
    assert 16 * updated_elements("cuda", room) <= room
    assert 4 * link_sizes("cuda", room)[-1] <= room


def test_a_full_card_is_measured_with_what_little_there_is() -> None:
    assert updated_elements("cuda", 0) == 1
    assert link_sizes("cuda", 0) == (4096, 65536)
    assert set(measure_copies(torch.device("cpu"), clock=iter(range(99)).__next__, room=0)) == {
        "to_device",
        "to_host",
    }


def test_a_bus_is_measured_where_its_latency_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = {torch.device("cpu"): 1e9, torch.device("meta"): 2e9}

    def seconds(target: torch.Tensor, *_: object) -> float:
        return 1e-4 + target.nbytes / rates[target.device]

    monkeypatch.setattr(calibration, "_copy_seconds", seconds)
    found = measure_copies(torch.device("meta"), float, 2**30)
    assert found == pytest.approx({"to_device": 2e9, "to_host": 1e9}, rel=0.05)
