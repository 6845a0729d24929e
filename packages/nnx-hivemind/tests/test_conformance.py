"""A peer alone keeps the promises of a strategy on one rank; `test_swarm.py` has several peers.

A target of one sample lets it step after each batch.
"""

from __future__ import annotations

import pytest

pytest.importorskip("nnx_hivemind._hivemind_compat", reason="hivemind is not installed")

from nnx_conformance import StrategyConformance


@pytest.mark.quick(checks=("loss_falls_as_in_one_process",))
class TestHivemind(StrategyConformance):
    strategy = "hivemind"
    options = {  # noqa: RUF012
        "target_batch_size": 1,
        "host_maddrs": ["/ip4/127.0.0.1/tcp/0"],
    }
    one_rank = True
    only = ("converges", "numbers", "stages", "checkpoints", "models")
