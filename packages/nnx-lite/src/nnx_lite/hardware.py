"""Choose the accelerator and its devices from the flags and from a strategy object."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from nnx_core.errors import OptionError, UnsupportedError
from nnx_core.names.catalog import historical
from nnx_lite.copies import fabric_module, is_from_lightning, root_of

__all__ = ["ChosenHardware", "accelerator_name", "choose_hardware", "parse_devices", "take_accelerator"]

ACCELERATORS = ("cpu", "gpu", "cuda", "mps", "tpu", "auto")
"""The names that Lite accepts, in addition to those registered with Fabric."""
GONE_ACCELERATORS = {
    "ipu": "Graphcore's IPUs are no longer supported by Lightning",
    "hpu": "Intel Gaudi moved to the package lightning-habana",
}
"""Removed names, and the fate of each accelerator."""
_NAMES = {
    "CPUAccelerator": "cpu",
    "CUDAAccelerator": "cuda",
    "MPSAccelerator": "mps",
    "XLAAccelerator": "tpu",
}
_CLASSES = {name: cls for cls, name in _NAMES.items()}
_CPU_HAS_NO_INDICES = "Devices of the CPU are processes: pass their number, such as `devices=2`."


@dataclass(frozen=True, slots=True)
class ChosenHardware:
    """The accelerator and devices to request from Fabric.

    Attributes:
        accelerator: A name, or an accelerator object of the user.
        devices: A number, indices, or ``"auto"``.
    """

    accelerator: Any
    devices: int | list[int] | str


def choose_hardware(
    accelerator: Any, devices: Any, gpus: Any = None, tpu_cores: Any = None
) -> ChosenHardware:
    """Combine the four flags.

    Args:
        accelerator: A name or object. None means the CPU, unless `gpus` or `tpu_cores` is set.
        devices: A number, indices, a string of either, ``"auto"``, or -1 for all. None and 0 mean the CPU.
        gpus: The same for GPUs.
        tpu_cores: The same for cores of a TPU.

    Raises:
        OptionError: A value cannot be read, or two flags contradict each other.
        UnsupportedError: This machine has no such accelerator.

    Example:
        >>> choose_hardware(None, "2")
        ChosenHardware(accelerator='cpu', devices=2)
    """
    chosen, amount = _join_shorthands(
        accelerator_name(accelerator),
        parse_devices("devices", devices),
        {"gpus": parse_devices("gpus", gpus), "tpu_cores": parse_devices("tpu_cores", tpu_cores)},
    )
    if amount in (0, []):
        if chosen not in (None, "cpu", "auto"):
            raise OptionError(
                f"devices={devices!r} requests no device of accelerator={accelerator!r}.",
                remedy="Pass the number of devices, or `accelerator='cpu'`.",
            )
        return ChosenHardware("cpu", 1)
    chosen = "cpu" if chosen is None else chosen
    _check_available(chosen)
    if chosen == "cpu" and isinstance(amount, list):
        raise OptionError(
            f"devices={devices!r} are indices of devices, and the accelerator is the CPU.",
            remedy=f"{_CPU_HAS_NO_INDICES} For GPUs add `accelerator='gpu'`.",
        )
    return ChosenHardware(chosen, "auto" if amount is None else amount)


def parse_devices(flag: str, value: Any) -> int | list[int] | str | None:
    """Read one flag that counts or lists devices; -1 is ``"auto"``.

    Args:
        flag: The name of the flag, for messages.
        value: The user's value.

    Raises:
        OptionError: The value is not a number, indices, or a string of either.

    Example:
        >>> parse_devices("devices", "1, 4"), parse_devices("gpus", "-1"), parse_devices("devices", "2")
        ([1, 4], 'auto', 2)
    """
    if isinstance(value, str):
        value = _from_text(flag, value)
    if value is None or value == "auto":
        return value  # type: ignore[no-any-return]
    if isinstance(value, (list, tuple)) and all(_is_count(index) and index >= 0 for index in value):
        return list(value)
    if _is_count(value) and value >= -1:
        return "auto" if value == -1 else int(value)
    raise _unreadable(flag, value)


def _from_text(flag: str, text: str) -> Any:
    words = [word.strip() for word in text.split(",")]
    if text.strip().lower() == "auto":
        return "auto"
    try:
        numbers = [int(word) for word in words if word]
    except ValueError:
        raise _unreadable(flag, text) from None
    if not numbers:
        raise _unreadable(flag, text)
    return numbers if "," in text else numbers[0]


def _unreadable(flag: str, value: Any) -> OptionError:
    return OptionError(
        f"{flag}={value!r} is neither a number of devices nor indices of devices.",
        remedy=f"Pass a number, -1 or 'auto' for all, a list such as [1, 4], or a string of these as {flag}.",
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _join_shorthands(accelerator: Any, devices: Any, shorthands: dict[str, Any]) -> tuple[Any, Any]:
    """Replace `gpus` and `tpu_cores` by an accelerator and its devices; 0 of them means neither."""
    meant = {"gpus": ("gpu", "cuda", "mps"), "tpu_cores": ("tpu",)}
    given = {flag: amount for flag, amount in shorthands.items() if amount not in (None, 0, [])}
    if len(given) > 1:
        raise OptionError(
            f"gpus={given['gpus']!r} and tpu_cores={given['tpu_cores']!r} request two accelerators.",
            remedy="Keep one of the two.",
        )
    for flag, amount in given.items():
        if accelerator not in (None, "auto", *meant[flag]):
            raise OptionError(
                f"{flag}={amount!r} contradicts accelerator={accelerator!r}.",
                remedy=f"Drop one of them; {flag} means `accelerator={meant[flag][0]!r}`.",
            )
        if devices not in (None, amount):
            raise OptionError(
                f"{flag}={amount!r} contradicts devices={devices!r}.",
                remedy=f"Drop one of them; {flag} means `devices` with `accelerator={meant[flag][0]!r}`.",
            )
        return accelerator if accelerator in meant[flag] else meant[flag][0], amount
    return accelerator, devices


def accelerator_name(accelerator: Any) -> Any:
    """Return the name of an accelerator given as name or object; a user's own object stays itself.

    Raises:
        OptionError: The accelerator is unknown, or an object of another copy of Lightning.
    """
    if accelerator is None:
        return None
    if isinstance(accelerator, str):
        return _known_name(accelerator.lower())
    if is_from_lightning(accelerator) and type(accelerator).__name__ in _NAMES:
        return _NAMES[type(accelerator).__name__]
    if isinstance(accelerator, fabric_module("accelerators").Accelerator) and not _is_trainers(accelerator):
        return accelerator
    counts = isinstance(accelerator, (int, list, tuple))
    hint = (
        f"Did you mean `devices={accelerator!r}`? The first argument is the accelerator. " if counts else ""
    )
    raise OptionError(
        f"accelerator={accelerator!r} is not an accelerator of Fabric.",
        remedy=f"{hint}Pass one of {', '.join(ACCELERATORS)}, or an object of a class that inherits from "
        f"{fabric_module('accelerators').__name__}.Accelerator.",
    )


def _is_trainers(accelerator: Any) -> bool:
    root = root_of(accelerator, "accelerators", "Accelerator")
    return root in ("lightning.pytorch", "pytorch_lightning")


def _known_name(name: str) -> str:
    registered = fabric_module("accelerators").ACCELERATOR_REGISTRY.available_accelerators()
    if name in ACCELERATORS or name in registered:
        return name
    if name in GONE_ACCELERATORS:
        raise OptionError(
            f"accelerator={name!r}: {GONE_ACCELERATORS[name]}.",
            remedy=f"Use one of {', '.join(ACCELERATORS)}.",
        )
    near = get_close_matches(name, [*ACCELERATORS, *registered], n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    if name in fabric_module("strategies").STRATEGY_REGISTRY or name in historical():
        hint = f"It is a strategy: the first argument is the accelerator, so pass `strategy={name!r}`. "
    raise OptionError(
        f"accelerator={name!r} is unknown.", remedy=f"{hint}Use one of {', '.join(ACCELERATORS)}."
    )


def _check_available(accelerator: Any) -> None:
    """Refuse hardware that this machine does not have.

    Raises:
        UnsupportedError: The machine lacks it. The error names the available accelerators.
    """
    accelerators = fabric_module("accelerators")
    here = [name for name, cls in _CLASSES.items() if getattr(accelerators, cls).is_available()]
    if accelerator in ("cpu", "auto") or accelerator in here:
        return
    if accelerator == "gpu" and {"cuda", "mps"} & set(here):
        return
    if accelerator == "gpu" or accelerator in _CLASSES:
        raise UnsupportedError(
            f"accelerator={accelerator!r} was requested, and torch finds none on this machine; it finds "
            f"{', '.join(here)}.",
            remedy="Run on a machine with one, or pass `accelerator='auto'` to use an available one.",
        )


def take_accelerator(strategy: Any, flag: Any) -> Any:
    """Return the accelerator of a strategy object, or else the flag's.

    The strategy object loses its accelerator, because Fabric sets it.

    Args:
        strategy: The strategy for the Fabric in use.
        flag: The accelerator flag; None if it was not given.

    Raises:
        OptionError: The two differ.
    """
    own = accelerator_name(strategy._accelerator)
    strategy._accelerator = None
    if own is None:
        own = _kind_of_devices(strategy)
    if own is None or flag in (None, "auto", own) or (flag == "gpu" and own in ("cuda", "mps")):
        return flag if own is None else own
    raise OptionError(
        f"accelerator={flag!r} contradicts the {own!r} of strategy={type(strategy).__name__}().",
        remedy="Drop one of them.",
    )


def _kind_of_devices(strategy: Any) -> str | None:
    devices = getattr(strategy, "parallel_devices", None)
    first = devices[0] if devices else getattr(strategy, "_root_device", None)
    kind = str(getattr(first, "type", "")) or None
    return "tpu" if kind == "xla" else kind
