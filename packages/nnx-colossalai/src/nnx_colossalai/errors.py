"""The error of a device that has no room: what was asked for, what is in use, and what is allowed.

Everything else that can go wrong here is one of `nnx_core.errors`.
"""

from __future__ import annotations

from nnx_core.errors import NnxError

_KNOB = (
    "Raise device_memory, let more of the model lie in host memory (a higher offload_fraction or "
    "stream_fraction), or lower the batch size."
)
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def format_bytes(number: int) -> str:
    """A number of bytes as people read it, exact as well where it is rounded.

    Example:
        >>> format_bytes(512)
        '512 bytes'
        >>> format_bytes(3 * 2**29)
        '1.50 GiB (1610612736 bytes)'
    """
    if abs(number) < 1024:
        return f"{number} bytes"
    value, unit = number / 1024, 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {_UNITS[unit]} ({number} bytes)"


class DeviceMemoryError(NnxError, MemoryError):
    """A device has no room for what was asked for.

    Args:
        message: A sentence that says what failed.
        remedy: A sentence that tells the user what to do about it.
        asked: Bytes that were asked for.
        used: Bytes in use at that moment.
        allowed: Bytes that this rank may use.
    """

    def __init__(
        self, message: str, *, remedy: str = _KNOB, asked: int = 0, used: int = 0, allowed: int = 0
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.asked, self.used, self.allowed = asked, used, allowed

    @classmethod
    def no_room(cls, device: str, *, asked: int, used: int, allowed: int) -> DeviceMemoryError:
        """The error for one allocation.

        Example:
            >>> print(DeviceMemoryError.no_room("cpu", asked=100, used=950, allowed=1000).message)
            No room on cpu for 100 bytes: 950 bytes are in use, and 1000 bytes are allowed.
        """
        message = (
            f"No room on {device} for {format_bytes(asked)}: {format_bytes(used)} are in use, "
            f"and {format_bytes(allowed)} are allowed."
        )
        return cls(message, asked=asked, used=used, allowed=allowed)

    def __reduce__(self) -> tuple[object, ...]:
        # An error that travels from one rank to the others keeps its numbers.
        return (_rebuild, (type(self), self.message, self.remedy, self.asked, self.used, self.allowed))


def _rebuild(
    cls: type[DeviceMemoryError], message: str, remedy: str, asked: int, used: int, allowed: int
) -> DeviceMemoryError:
    return cls(message, remedy=remedy, asked=asked, used=used, allowed=allowed)
