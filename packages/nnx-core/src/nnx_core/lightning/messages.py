"""What nnx tells the user while training: shown like Lightning's own messages."""

from __future__ import annotations

import logging


def show_messages() -> None:
    """Print the ``nnx`` loggers' INFO messages to stderr, unless the application configured logging."""
    logger = logging.getLogger("nnx")
    if logger.handlers or logging.getLogger().handlers:
        return
    logger.addHandler(logging.StreamHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    logger.propagate = False
