"""Entries without a place in another format, kept beside its own contents.

So nothing is lost on the way back. It is the typed JSON
of `nnx_checkpoint.format.codec`; tensors in it are stored under their logical names by whoever writes, and
are referred to by name. So a file that carries it stays readable for programs that know nothing of it, and
no pickle is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import Contents
from nnx_checkpoint.format.codec import Encoder, decode
from nnx_checkpoint.format.manifest import load_json
from nnx_checkpoint.reading.naming import Described, StoredName

_VERSION = 1


class StoredEncoder(Encoder):
    """An `Encoder` that refers to stored tensors by the names they have."""

    def encode(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """Encode a value; see `Encoder.encode`."""
        if isinstance(value, StoredName):
            return {"$": "tensor", "name": value.key}
        return super().encode(value, path)


def pack(checkpoint: Described, objects: Mapping[str, Any], aliases: Mapping[str, str]) -> str:
    """Encode the entries that are left over.

    Args:
        checkpoint: The checkpoint that it comes from; the objects of its ranks are included.
        objects: Common objects, by their key in `Checkpoint.objects`.
        aliases: Tied names.

    Raises:
        CheckpointError: An object has no JSON form.
    """
    ranks = {rank: checkpoint.rank_objects(rank) for rank in checkpoint.own_ranks}
    body = {
        "version": _VERSION,
        "objects": StoredEncoder("objects").encode(dict(objects)),
        "ranks": {
            str(rank): StoredEncoder(f"rank.{rank}").encode(tree)
            for rank, tree in ranks.items()
            if tree is not None
        },
        "aliases": dict(aliases),
        "world_size": checkpoint.world_size,
        "provenance": dict(checkpoint.provenance),
    }
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def unpack(text: str, contents: Contents, tensor: Callable[[str], Any], *, source: str) -> dict[str, Any]:
    """Restore the entries left over: objects, the objects of ranks, aliases.

    Args:
        text: The text that `pack` gave.
        contents: The contents to add it to.
        tensor: Gives what stands for the tensor of a name.
        source: The origin of it, used in messages.

    Returns:
        World size and provenance, as `Contents.opened` takes them.

    Raises:
        CheckpointError: It is malformed or newer.
    """
    decoded = partial(decode, tensor=tensor, opaque=_no_opaque, source=source)
    try:
        body = load_json(text.encode())
        version = body["version"]
        if version != _VERSION:
            raise CheckpointError(
                f"'{source}' holds data of nnx in version {version}; this nnx reads version {_VERSION}.",
                remedy="Upgrade with `pip install --upgrade nnx-core`.",
            )
        contents.objects |= dict(decoded(body["objects"]))
        contents.rank_objects |= {int(rank): decoded(tree) for rank, tree in dict(body["ranks"]).items()}
        contents.aliases |= {str(alias): str(name) for alias, name in dict(body["aliases"]).items()}
        return {"world_size": int(body["world_size"]), "provenance": dict(body["provenance"])}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"'{source}' holds malformed data of nnx: {type(error).__name__}: {error}.",
            remedy="Restore it from a backup, or use another checkpoint.",
        ) from error


def _no_opaque(place: str) -> Any:
    raise LookupError(f"the object at {place!r} is not here")
