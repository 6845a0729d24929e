"""What an error about memory says, and that it survives the way to another rank."""

from __future__ import annotations

import pickle

import pytest

from nnx_colossalai.errors import DeviceMemoryError, format_bytes
from nnx_core.errors import NnxError


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB (1024 bytes)"),
        (24 * 2**30, "24.00 GiB (25769803776 bytes)"),
        (2**60, "1048576.00 TiB (1152921504606846976 bytes)"),
    ],
)
def test_bytes_are_readable_and_exact(number: int, text: str) -> None:
    assert format_bytes(number) == text


def test_the_error_names_bytes_and_knobs() -> None:
    error = DeviceMemoryError.no_room("cuda:1", asked=3 * 2**30, used=2**30, allowed=3 * 2**30)
    assert str(error) == (
        "No room on cuda:1 for 3.00 GiB (3221225472 bytes): 1.00 GiB (1073741824 bytes) are in use, "
        "and 3.00 GiB (3221225472 bytes) are allowed. Raise device_memory, let more of the model lie in host "
        "memory (a higher offload_fraction or stream_fraction), or lower the batch size."
    )
    assert isinstance(error, NnxError)
    assert isinstance(error, MemoryError)


def test_the_error_keeps_its_numbers_on_the_way_to_another_rank() -> None:
    error = DeviceMemoryError("no room.", remedy="Buy more.", asked=1, used=2, allowed=3)
    other = pickle.loads(pickle.dumps(error))
    assert (str(other), other.asked, other.used, other.allowed) == ("no room. Buy more.", 1, 2, 3)
