"""Assert in a test that two runs are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nnx_conformance.diff.report import as_text
from nnx_conformance.diff.session import Result, compare_records, compare_runs
from nnx_conformance.diff.sides import Side
from nnx_core.errors import OptionError


def assert_equal_runs(
    script: str | Path = "", *, a: str | Path, b: str | Path, words: tuple[str, ...] = (), **settings: Any
) -> Result:
    """Assert that a script trains alike on both sides, up to rounding.

    Args:
        script: The script; without one, `a` and `b` are directories that ``nnx.record(..., to=...)`` wrote.
        a: The reference, such as ``"ddp@1"``.
        b: The other side, such as ``"fsdp_auto@2:bf16-mixed"``.
        words: The arguments of the script.
        settings: ``steps``, ``seed``, ``accelerator``, ``no_dropout``, ``timeout`` and further settings of
            ``nnx diff``.

    Returns:
        The comparison, which agrees.

    Raises:
        AssertionError: The runs differ; the message is that of ``nnx diff``.
        OptionError: A side is not written correctly.
    """
    if script:
        result = compare_runs(str(script), Side.parse(str(a)), Side.parse(str(b)), words=words, **settings)
    elif Path(a).is_dir() and Path(b).is_dir():
        result = compare_records(Path(a), Path(b))
    else:
        raise OptionError(
            f"there is no script, and {str(a)!r} and {str(b)!r} are no records.", remedy="Pass a script."
        )
    if not result.same:
        raise AssertionError(as_text(result))
    return result
