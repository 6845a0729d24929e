"""The names of torchft that this package uses; the only module that imports torchft.

Checked with torchft 0.2.0. Its manager retries nothing after a quorum that raised: `forget_quorum` allows it.
"""

from __future__ import annotations

import logging
import os
from typing import Any, cast

_LOGGERS = (
    *("torchft.manager", "torchft.process_group", "torchft.checkpointing.http_transport"),
    *("torchft_quorums", "torchft_commits", "torchft_errors"),
)
"""Loggers of torchft: they print several lines a step, and a traceback for each lost group."""


class _OnDemand(logging.Filter):
    """Passes torchft's own lines while the logger ``nnx.torchft`` shows those of level DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.CRITICAL or logging.getLogger("nnx.torchft").isEnabledFor(
            logging.DEBUG
        )


for _name in _LOGGERS:
    logging.getLogger(_name).addFilter(_OnDemand())
os.environ.setdefault("RUST_LOG", "error")  # of its lighthouse and managers

from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL  # noqa: E402
from torchft.checkpointing import HTTPTransport  # noqa: E402
from torchft.coordination import LighthouseServer  # noqa: E402
from torchft.process_group import create_store_client  # noqa: E402

__all__ = [
    "HTTPTransport",
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
