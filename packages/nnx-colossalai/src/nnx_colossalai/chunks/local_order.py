"""In which order chunks are used, as the last step of the same kind went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nnx_colossalai.chunks.local_chunk import LocalChunk

__all__ = ["Order"]


class Order:
    """Remembers uses, and says what will probably be used next.

    Args:
        chunks: In the order in which they probably will be used first.
    """

    def __init__(self, chunks: Sequence[LocalChunk]) -> None:
        self._last: dict[bool, list[LocalChunk]] = {}
        self._now: list[LocalChunk] = []
        self._kind, self._place = True, 0
        number(chunks)

    def start(self, *, with_gradients: bool) -> LocalChunk | None:
        """A step begins; what it will probably use first."""
        self._kind, self._place, self._now = with_gradients, 0, []
        expected = self._last.get(with_gradients, [])
        return expected[0] if expected else None

    def used(self, chunk: LocalChunk) -> LocalChunk | None:
        """A chunk is used; what will probably follow."""
        self._now.append(chunk)
        expected = self._last.get(self._kind, [])
        try:
            self._place = expected.index(chunk, self._place) + 1
        except ValueError:
            return None
        return expected[self._place] if self._place < len(expected) else None

    def end(self, chunks: Iterable[LocalChunk]) -> None:
        """A step is over: what it used is what the next of its kind will."""
        self._last[self._kind] = self._now
        if self._kind:
            number([*dict.fromkeys(self._now), *(chunk for chunk in chunks if chunk not in self._now)])


def number(chunks: Iterable[LocalChunk]) -> None:
    """Give chunks their places."""
    for index, chunk in enumerate(chunks):
        chunk.index = index
