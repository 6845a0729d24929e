"""The accounts of a device do not grow with the number of steps."""

from __future__ import annotations

import torch

from nnx_colossalai.device.device import Ledger


def test_what_every_step_drops_is_forgotten_without_anyone_asking() -> None:
    ledger = Ledger("cpu", capacity=2**40)
    kept = [torch.empty(1) for _ in range(10)]
    for tensor in kept:
        ledger.reserve(4)
        ledger.add_device(tensor)
    for _ in range(20_000):
        ledger.reserve(4)
        ledger.add_device(torch.empty(1))
        ledger.add_host(torch.empty(1))
    assert len(ledger._entries) < 2_000
    assert ledger.used == 4 * len(kept)


def test_many_that_are_alive_are_not_asked_again_for_each_new_one() -> None:
    ledger = Ledger("cpu", capacity=2**40)
    looks = 0

    def counted() -> None:
        nonlocal looks
        looks += 1

    ledger._forget_expired = counted  # type: ignore[method-assign]
    kept = [torch.empty(1) for _ in range(5_000)]
    for tensor in kept:
        ledger.reserve(4)
        ledger.add_device(tensor)
    assert 1 <= looks <= 4
