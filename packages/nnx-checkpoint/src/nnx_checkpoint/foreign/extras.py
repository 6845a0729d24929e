"""Store entries that another format has no field for beside its own contents.

So a conversion back loses nothing. The entries are typed JSON of `nnx_checkpoint.format.codec`. The writer
stores their tensors under logical names, and the JSON refers to them by name. So programs that do not know
these entries can still read the file, and no pickle is needed.
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
    """An `Encoder` that refers to stored tensors by their existing names."""

    def encode(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """Encode a value; see `Encoder.encode`."""
        if isinstance(value, StoredName):
            return {"$": "tensor", "name": value.key}
        return super().encode(value, path)


def pack(checkpoint: Described, objects: Mapping[str, Any], aliases: Mapping[str, str]) -> str:
    """Encode the entries without a field in the target format.

    Args:
        checkpoint: The source; the objects of its ranks are included.
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
    """Restore the entries of `pack`: objects, the objects of ranks, aliases.

    Args:
        text: The result of `pack`.
        contents: The contents to add the entries to.
        tensor: Function from a name to the value that represents its tensor.
        source: The path of the text, used in messages.

    Returns:
        World size and provenance, as `Contents.opened` takes them.

    Raises:
        CheckpointError: The text is malformed or newer.
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
    raise LookupError(f"the object at {place!r} is missing")
