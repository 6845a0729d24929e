"""The parts of elastic training that need no process: options, shares, marks, the launcher."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("nnx_torchft._torchft_compat", reason="torchft is not installed")

import torch

from nnx_core.errors import LaunchError, OptionError, UnsupportedError
from nnx_core.launch.launcher import make_launcher
from nnx_torchft.data import ElasticLoader, Share, refuse_loader
from nnx_torchft.finished import Mark
from nnx_torchft.options import ElasticOptions


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 12])
def test_the_shares_of_a_batch_are_its_samples_and_their_weights_are_one(groups: int) -> None:
    batch = list(range(100, 110))
    shares = [Share(index, groups) for index in range(groups)]
    counted = [row for share in shares if share.weight(10) for row in share.take(batch)]
    assert sorted(counted) == batch
    assert sum(share.weight(10) for share in shares) == pytest.approx(1, abs=1e-15)
    assert all(share.take(batch) for share in shares)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_were_fetched_for_another_quorum_are_loaded_again(workers: int) -> None:
    data = TensorDataset(torch.arange(40))
    shares = [Share(0, 2)] * 3 + [Share(1, 3)] * 4 + [Share(0, 1)] * 3
    loader = DataLoader(data, batch_size=4, num_workers=workers, shuffle=True)
    elastic = ElasticLoader(loader, seed=5, epoch=lambda: 2, before=shares.__getitem__)
    seen = [batch[0].tolist() for batch in elastic]
    again = ElasticLoader(loader, seed=5, epoch=lambda: 2, before=lambda position: Share(0, 1))
    whole = [batch[0].tolist() for batch in again]
    assert seen == [share.take(batch) for share, batch in zip(shares, whole, strict=True)]
    assert sorted(row for batch in whole for row in batch) == list(range(40))
    elastic.close()
    again.close()


def test_the_order_of_an_epoch_does_not_depend_on_what_was_drawn_before() -> None:
    loader = DataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True)
    orders = []
    for epoch in (0, 0, 1):
        torch.rand(7)
        elastic = ElasticLoader(loader, seed=5, epoch=lambda epoch=epoch: epoch, before=lambda _: Share(0, 1))
        orders.append([batch[0].tolist() for batch in elastic])
    assert orders[0] == orders[1] != orders[2]


def test_loaders_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="divides the batches of a DataLoader, and got a list"):
        refuse_loader([1, 2])
    with pytest.raises(UnsupportedError, match="batch_size=None"):
        refuse_loader(DataLoader(TensorDataset(torch.arange(4)), batch_size=None))
    words = DataLoader(TensorDataset(torch.arange(4)), batch_sampler=[["a"], ["b"]])
    with pytest.raises(UnsupportedError, match=r"the sampler yields \['a'\]"):
        iter(ElasticLoader(words, seed=0, epoch=lambda: 0, before=lambda _: Share(0, 1)))


def test_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(OptionError, match="elastic training needs a lighthouse, and none is given"):
        _ = ElasticOptions().address
    with pytest.raises(OptionError, match="lighthouse='here' is no address"):
        _ = ElasticOptions(lighthouse="here").address
    with pytest.raises(OptionError, match="group_timeout=0 is not a positive number"):
        ElasticOptions(group_timeout=0)
    with pytest.raises(OptionError, match="min_groups=0 is no number of groups"):
        ElasticOptions(min_groups=0)
    assert ElasticOptions(lighthouse="http://a:1").address == "a:1"


def test_a_finished_run_has_a_mark_and_another_has_none(tmp_path: Path) -> None:
    assert Mark(str(tmp_path), "one").read() is None
    Mark(str(tmp_path), "one").write(12)
    assert Mark(str(tmp_path), "one").read() == 12
    assert Mark(str(tmp_path), "two").read() is None


@pytest.mark.parametrize("name", ["torchft.manager", "torchft_commits", "torchft_quorums"])
def test_the_own_lines_of_torchft_are_shown_on_demand(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logging.getLogger(name).info("should_commit=True")
        logging.getLogger("nnx.torchft").info("elastic: step 1")
    assert [record.message for record in caplog.records if record.name == name] == []
    with caplog.at_level(logging.DEBUG, "nnx.torchft"), caplog.at_level(logging.INFO):
        logging.getLogger(name).info("should_commit=True")
    assert [record.message for record in caplog.records if record.name == name] == ["should_commit=True"]


def test_the_launcher_checks_what_it_gets() -> None:
    with pytest.raises(OptionError, match="is of a run whose name is not given"):
        make_launcher("elastic", {"lighthouse": "a:1"})
    launcher, _ = make_launcher("elastic", {})
    with pytest.raises(OptionError, match="starts the groups of one machine"):
        launcher.run_script(["true"], nodes=2, devices=1)
    with pytest.raises(LaunchError, match="starts scripts"):
        launcher.run(None)  # type: ignore[arg-type]


def test_a_process_that_dies_takes_its_group_with_it_and_all_start_again(tmp_path: Path) -> None:
    script = tmp_path / "process.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "group, rank = os.environ['NNX_ELASTIC_GROUP'], os.environ['RANK']\n"
        "starts = pathlib.Path(f'{group}.{rank}.starts')\n"
        "starts.write_text(starts.read_text() + '.' if starts.exists() else '.')\n"
        "assert os.environ['WORLD_SIZE'] == os.environ['LOCAL_WORLD_SIZE'] == '2'\n"
        "first = pathlib.Path(f'{group}.0.starts')\n"
        "while not (first.exists() and first.read_text()): time.sleep(0.1)\n"
        "if len(starts.read_text()) == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if rank == '1' else time.sleep(100)\n"
        "others = list(pathlib.Path('.').glob('*.0.starts'))\n"
        "while any(len(other.read_text()) < 2 for other in others): time.sleep(0.1)\n"
    )
    command = [sys.executable, "-c", "from nnx_checkpoint.cli.command import main; main()", "run"]
    ended = subprocess.run(
        [*command, "--elastic", "2", "--devices", "2", "--", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout.count("died with -9; starting it again")) == (0, 2), ended
    starts = {path.name.partition(".")[2]: path.read_text() for path in tmp_path.glob("*.starts")}
    assert set(starts.values()) == {".."}
    shown = subprocess.run(
        [*command, "--elastic", "2", "--devices", "2", "--dry-run", "--", "x.py"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "# 2 groups of 2 processes, lighthouse: a new one" in shown.stdout


@pytest.mark.full
def test_the_command_starts_dead_groups_again_and_gives_up_after_errors(tmp_path: Path) -> None:
    script = tmp_path / "group.py"
    script.write_text(
        "import os, signal, sys, pathlib\n"
        "starts = pathlib.Path(os.environ['NNX_ELASTIC_GROUP'] + '.starts')\n"
        "starts.write_text(starts.read_text() + '.' if starts.exists() else '.')\n"
        "if len(starts.read_text()) == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", "from nnx_checkpoint.cli.command import main; main()", "run"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )

    ended = run("--elastic", "1", "--", str(script), "0")
    assert (ended.returncode, ended.stdout.count("died with -9; starting it again")) == (0, 1), ended
    failed = run("--elastic", "1", "--", str(script), "3")
    assert failed.returncode == 3
    assert failed.stdout.count("died with 3; starting it again") == 2
    assert "died with 3; not starting it again" in failed.stdout
    both = run("--elastic", "2", "--on", "ray", "--", str(script))
    assert both.returncode == 1
    assert "one of --on and --elastic is needed" in both.stderr
