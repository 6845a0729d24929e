"""The job of the processes of one run of ``nnx diff``, as plain data, and the capture that all runs share."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from pickle import PicklingError
from typing import Any

import torch
from torch import Tensor, nn

from nnx_conformance.diff.recorder import all_tensors, size_of
from nnx_core.errors import OptionError, UnsupportedError

VARIABLE = "NNX_DIFF_JOB"
"""The environment variable with the path of the job's file."""


_WAIT = 120.0
"""The seconds that other ranks wait for rank zero to capture."""


class Done(BaseException):
    """The job's steps are recorded. No ``except Exception`` of a script catches it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job of the processes of one run.

    Attributes:
        directory: The directory of the records.
        capture: The directory of the captured state and batches, which all runs begin with.
        captures: True if rank zero of this run captures them.
        script: The user's script, and its arguments in `words`.
        strategy: The strategy's name; empty keeps the script's own.
        options: Options of the strategy.
        devices: The number of processes.
        precision: The precision; empty keeps the script's own.
        accelerator: The accelerator; empty keeps the script's own.
        steps: The number of optimizer steps.
        batches: The number of batches for each step of a loop without a Trainer.
        seed: The random seed.
        outputs: True to record the outputs of modules.
        no_dropout: True to set the rate of dropout layers to zero.
        whole: The tensors to record whole: step, kind, name.
        explain: Step, kind, name and number of shares, to compute what a fault would give instead.
        limit: The most bytes of captured batches.
    """

    directory: str
    capture: str
    captures: bool = False
    script: str = ""
    words: Sequence[str] = ()
    strategy: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    devices: int = 1
    precision: str = ""
    accelerator: str = ""
    steps: int = 3
    batches: int = 1
    seed: int = 1
    outputs: bool = True
    no_dropout: bool = False
    whole: Sequence[tuple[int, str, str]] = ()
    explain: tuple[int, str, str, int] | None = None
    limit: int = 1 << 30

    def write(self, path: Path) -> None:
        """Write the job for its processes."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The initial parameters and buffers."""
        found: dict[str, Tensor] = torch.load(self._captured("state"), weights_only=True)
        return found

    @cached_property
    def data(self) -> Captured:
        """The global batches."""
        found: Captured = torch.load(self._captured("batches"), weights_only=False)  # of our own process
        return found

    def _captured(self, name: str) -> Path:
        """Return the path of a captured file, once rank zero has written it."""
        path = Path(self.capture) / f"{name}.pt"
        end = time.monotonic() + _WAIT
        while not path.is_file():
            if not self.captures or time.monotonic() > end:
                raise UnsupportedError(
                    f"the first run captured no {name}.",
                    remedy="Set the model up before the loader, and train on rank zero, too.",
                )
            time.sleep(0.05)
        return path

    def _write_captured(self, name: str, value: Any) -> None:
        path = Path(self.capture) / f"{name}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    @property
    def is_to_capture(self) -> bool:
        """True on rank zero of the run that captures."""
        return self.captures and os.environ.get("RANK", "0") == "0"

    def capture_state(self, module: nn.Module) -> None:
        """Save the state of a module, if this process captures."""
        if self.is_to_capture:
            values = module.state_dict().items()
            tensors = {
                n: v.detach().cpu().clone() for n, v in values if isinstance(v, Tensor) and not v.is_meta
            }
            self._write_captured("state", tensors)

    def capture_batches(self, loader: Callable[[], Iterable[Any]], *, accumulate: int) -> None:
        """Save the first batches of a loader, if this process captures.

        Raises:
            OptionError: The loader has too few batches, they need more memory than the job's limit, or they
                cannot be saved.
        """
        if not self.is_to_capture:
            return
        batches = list(islice(iter(loader()), self.steps * accumulate))
        if len(batches) < accumulate:
            raise OptionError(
                f"the script's data have {len(batches)} batches, and a step needs {accumulate}.",
                remedy="Give the script more data, or accumulate fewer batches.",
            )
        needed = sum(t.numel() * t.element_size() for batch in batches for t in all_tensors(batch))
        if needed > self.limit:
            raise OptionError(
                f"{len(batches)} global batches have {needed} bytes, and --memory allows {self.limit}.",
                remedy="Pass fewer --steps, or a larger --memory.",
            )
        whole = len(batches) // accumulate * accumulate
        try:
            self._write_captured("batches", Captured(batches[:whole], accumulate))
        except (PicklingError, AttributeError, TypeError) as error:
            raise OptionError(
                f"a batch of type {type(batches[0]).__name__} cannot be saved for the other runs: {error}.",
                remedy="Let the loader yield tensors, or objects that pickle can save.",
            ) from error

    @property
    def wanted(self) -> list[tuple[int, str, str]]:
        """The tensors to record whole, as keys of `read_whole`."""
        return [(int(step), kind, name) for step, kind, name in self.whole]


def active_job() -> Job | None:
    """Return the job of this process; None outside of ``nnx diff``."""
    path = os.environ.get(VARIABLE)
    return None if not path else Job(**json.loads(Path(path).read_text(encoding="utf-8")))


@dataclass
class Captured:
    """The data of both runs.

    Attributes:
        batches: The global batches, in order.
        accumulate: The number of batches for each step.
    """

    batches: list[Any]
    accumulate: int


def load_state(job: Job, module: nn.Module) -> None:
    """Begin with the captured state.

    Raises:
        UnsupportedError: The model has other parameters than the captured one.
    """
    state = job.state
    own = {name for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    if any(parameter.is_meta for parameter in module.parameters()) or not own:
        return  # configure_model makes the weights later, from the seed
    missing, further = sorted(state.keys() - own), sorted(own - state.keys())
    shapes = [n for n, v in module.state_dict().items() if n in state and v.shape != state[n].shape]
    if missing or further or shapes:
        raise UnsupportedError(
            f"the models differ: {_some(missing)} only in the first, {_some(further)} only in the second, "
            f"{_some(shapes)} of another shape.",
            remedy="Give both runs the same model, or map the names in the script.",
        )
    module.load_state_dict(state, strict=False)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}" if names else "nothing"


class Shares:
    """Gives each share of the ranks its rows of the captured batches: the same indices, divided.

    Args:
        job: The job.
        share: Returns the number of this rank's share, and of all shares.
    """

    def __init__(self, job: Job, share: Any) -> None:
        self._batches, self._share = job.data.batches, share

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        index, count = self._share()
        for batch in self._batches:
            yield share_of(batch, index, count)


def share_of(batch: Any, index: int, count: int) -> Any:
    """Return one of several equal shares of a batch, by rows.

    Raises:
        OptionError: The samples cannot be divided.

    Example:
        >>> share_of({"x": torch.arange(4), "name": ["a", "b", "c", "d"]}, 1, 2)
        {'x': tensor([2, 3]), 'name': ['c', 'd']}
    """
    size = size_of(batch)
    if count == 1:
        return batch
    if not size or size % count:
        raise OptionError(
            f"a global batch of {size} samples cannot be divided by {count} ranks.",
            remedy="Choose a batch size in the script that both numbers of ranks divide.",
        )
    return _cut(batch, slice(index * size // count, (index + 1) * size // count), size)


def _cut(value: Any, where: slice, size: int) -> Any:
    if isinstance(value, Tensor):
        return value[where] if value.dim() and value.shape[0] == size else value
    if isinstance(value, Mapping):
        cut = {key: _cut(item, where, size) for key, item in value.items()}
        return cut if type(value) is dict else type(value)(cut)  # type: ignore[call-arg] # such as a BatchEncoding
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(item, where, size) for item in value))
    if isinstance(value, (list, tuple)):
        if len(value) == size and not any(isinstance(item, Tensor) for item in value):
            return value[where]
        return type(value)(_cut(item, where, size) for item in value)
    return value


def without_dropout(module: nn.Module) -> None:
    """Set the rate of every dropout layer to zero."""
    for layer in module.modules():
        if isinstance(layer, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)):
            layer.p = 0.0
        elif isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)):
            layer.dropout = 0.0
