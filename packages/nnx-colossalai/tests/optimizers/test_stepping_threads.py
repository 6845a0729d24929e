"""Where a step in the background runs: on how many threads, and in which stream of a card."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from nnx_colossalai.optimizers.stepping import Background, Share


class Chunk:
    """Nobody waits for it."""

    name = "layer"

    def set_pending(self, wait: Any) -> None:
        """There is nothing to show."""


def asked_in_a_step(background: Background, question: Callable[[], Any]) -> Any:
    """What is answered within a step in the background."""
    answers = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    background.submit(optimizer, [Share(Chunk())], lambda *_: answers.append(question()))  # type: ignore[arg-type]
    background.finish()
    background.close()
    (answer,) = answers
    return answer


@pytest.fixture
def twelve_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    yield
    torch.set_num_threads(before)  # of threads that begin later, too


@pytest.mark.usefixtures("twelve_cores")
def test_a_step_has_its_share_of_the_cores_where_torchrun_left_it_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    environment = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO", logger="nnx.colossalai"):
        assert asked_in_a_step(Background(), torch.get_num_threads) == 3
    assert torch.get_num_threads() == 1, "forward and backward are the user's business"
    assert [line for line in caplog.messages if "on 3 threads" in line]


@pytest.mark.usefixtures("twelve_cores")
@pytest.mark.parametrize("other", [{"OMP_NUM_THREADS": "2"}, {"TORCHELASTIC_RUN_ID": None}], ids=str)
def test_threads_that_the_user_has_chosen_stay(
    other: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(2)
    for name, value in {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", **other}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert asked_in_a_step(Background(), torch.get_num_threads) == 2


def test_a_step_runs_in_the_stream_in_which_it_was_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        entered.append(name)
        yield
        entered.remove(name)

    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the user's")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    assert asked_in_a_step(Background(torch.device("cuda", 0)), lambda: list(entered)) == ["the user's"]
    assert entered == []
