"""The names of torchft that this package uses; the only module that imports torchft.

Checked with torchft 0.2.0. Its manager retries nothing after a quorum that raised: `forget_quorum` allows it.
"""

from __future__ import annotations

import logging
import os
from typing import Any, cast

os.environ.setdefault("RUST_LOG", "error")  # torchft prints several lines a step otherwise
# The loss of a group is no failure, and `nnx_torchft.quorum` logs it with its cause.
for _name in ("torchft.manager", "torchft.checkpointing.http_transport"):
    if logging.getLogger(_name).level == logging.NOTSET:
        logging.getLogger(_name).setLevel(logging.CRITICAL)

from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL  # noqa: E402
from torchft.coordination import LighthouseServer  # noqa: E402
from torchft.process_group import create_store_client  # noqa: E402

__all__ = [
    "LighthouseServer",
    "Manager",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "create_store_client",
    "forget_quorum",
]

PRIVATE_NAMES = {"Manager._quorum_future": "0.2.0"}
"""Private names of torchft, with the versions that have them."""


def forget_quorum(manager: Manager) -> None:
    """Allow another quorum after one that raised: the manager would raise the old error again."""
    cast(Any, manager)._quorum_future = None
