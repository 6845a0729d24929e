"""Judge one case after the other in a separate process, which is replaced when it dies or hangs."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import shutil
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

import nnx_checkpoint
from fuzz.documents import sign
from fuzz.edits import Case, Special, apply
from fuzz.references import bits, explains, stored_sums
from fuzz.samples import make_samples
from nnx_checkpoint.cli.command import app
from nnx_core.errors import CheckpointError, NnxError

__all__ = ["Judge", "Verdict"]

MOST_GROWTH = 64 << 20
"""Bytes that opening may take beside four times the file's size."""
MOST_SECONDS = 5.0
"""The limit of processor time, for files below two megabytes; a command may take twice as long."""
PATIENCE = 30.0
"""Seconds of processor time after which a case hangs; it may wait ten times as long."""
_COMMANDS = (
    ("inspect", "{}"),
    ("inspect", "--json", "{}"),
    ("verify", "{}"),
    ("verify", "--json", "{}"),
    ("ls", "{}"),
    ("diff", "{}", "{good}"),
    ("diff", "{good}", "{}"),
    ("merge", "{}", "{out}.ckpt"),
    ("merge", "{}", "{out}.safetensors"),
    ("convert", "{}", "{out}"),
    ("convert", "{}", "{out}", "--to", "dcp"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a case.

    Attributes:
        kind: ``"refused"``, ``"right"`` (as before the change), ``"forged"`` (different, as the files say),
            ``"skipped"`` (it cannot be written), or ``"wrong"``.
        why: The defect or the error.
    """

    kind: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A checkpoint before it is changed."""

    path: Path
    files: Mapping[str, bytes]
    found: Any

    def below(self, root: Path) -> Path:
        """Return the path to open in a copy: the only file, or the directory if there are several."""
        return root / next(iter(self.files)) if len(self.files) == 1 else root


class Judge:
    """Judges cases of one format in a child process.

    Args:
        format: Name of the format.
        place: An empty directory.
    """

    def __init__(self, format: str, place: Path) -> None:
        self._place = place
        self._format = format
        self._samples = [_sample(path) for path in make_samples(format, place / "samples")]
        self._child: Any = None
        self._line: Any = None
        first = self._samples[0]
        for arguments in _COMMANDS:  # now, so that no child has to import what they need
            _commanded(arguments, first.below(first.path), first, place / "out")

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def judge(self, case: Case) -> Verdict:
        """Apply a case, open the result, and judge it."""
        if self._child is None or not self._child.is_alive():
            self._start()
        try:
            self._line.send(case)
            started, before = time.monotonic(), self._spent()
            while not self._line.poll(5):
                waited, spent = time.monotonic() - started, self._spent() - before
                if spent > PATIENCE or waited > 10 * PATIENCE:
                    verdict = Verdict("wrong", f"no end after {spent:.0f} s")
                    break
            else:
                found: Verdict = self._line.recv()
                return found
        except (EOFError, OSError):
            self._child.join(5)
            verdict = Verdict("wrong", f"the process ended with code {self._child.exitcode}")
        self.stop()
        return verdict

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._line, theirs = context.Pipe()
        self._child = context.Process(target=self._serve, args=(theirs,), daemon=True)
        self._child.start()
        theirs.close()

    def _spent(self) -> float:
        """Seconds of processor time of the child."""
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End the child; the next case starts another."""
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._line.close()
            self._child = None

    def _serve(self, line: Connection) -> None:
        gc.freeze()  # destructors of other tests' objects abort: their threads are not in a fork
        self._line.close()
        torch.set_num_threads(1)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (4 << 30),) * 2)
        errors = os.open(self._place / "stderr", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(errors, 2)
        with contextlib.suppress(EOFError):
            while True:
                verdict = self._judged(line.recv())
                if b"Traceback" in os.pread(errors, 1 << 20, 0):
                    verdict = Verdict("wrong", "a traceback is printed")
                os.ftruncate(errors, 0)
                os.lseek(errors, 0, os.SEEK_SET)
                line.send(verdict)

    def _judged(self, case: Case) -> Verdict:
        sample = self._samples[case.sample % len(self._samples)]
        try:
            files, special = apply(case.edits, dict(sample.files))
            if self._format == "nnx" and case.signed:
                sign(files, dict(sample.files), stored_sums)
        except Exception as error:  # no file can be made of this
            return Verdict("skipped", _signature(error))
        root = self._place / "case"
        shutil.rmtree(root, ignore_errors=True)
        try:
            _write(root, files, special)
        except OSError as error:
            return Verdict("skipped", str(error))
        size = sum(map(len, files.values()))
        path = sample.below(root)
        verdict = _opened(path, sample, self._format, files, size)
        if verdict.kind != "wrong" and case.edits and case.edits[0].other % 4 == 0:
            arguments = _COMMANDS[case.edits[0].where % len(_COMMANDS)]
            started = time.process_time()
            verdict = _commanded(arguments, path, sample, root.with_name("out")) or verdict
            spent = time.process_time() - started
            if spent > 2 * max(MOST_SECONDS, 2 * size / 1e6):
                verdict = Verdict("wrong", f"nnx ckpt {arguments[0]} took {spent:.0f} s")
        return verdict


# --- one case -------------------------------------------------------------------------------------


def _sample(path: Path) -> Sample:
    files = {
        str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()
    }
    sample = Sample(path, files, None)
    return Sample(path, files, _read(sample.below(path)).comparable())


def _write(root: Path, files: Mapping[str, bytes], special: Mapping[str, Special]) -> None:
    root.mkdir()
    for name, data in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        kind, other = special.get(name, ("", ""))
        if kind == "link":
            file.with_name("linked").write_bytes(data)
            file.symlink_to("linked" if other == name else (root / other).resolve())
        elif kind == "pipe":
            os.mkfifo(file)
        elif kind == "directory":
            file.mkdir()
        else:
            file.write_bytes(data)


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a checkpoint has.

    Attributes:
        tensors: The tensors by name.
        objects: The common objects, and those of the first ranks.
        aliases: The names of tied tensors.
        world_size: The number of ranks that wrote it.
    """

    tensors: dict[str, Any]
    objects: list[Any]
    aliases: dict[str, str]
    world_size: int

    def comparable(self) -> Any:
        """Return it as values that compare."""
        kinds = {n: (str(value.dtype), tuple(value.shape), bits(value)) for n, value in self.tensors.items()}
        return kinds, self.aliases, [*map(repr, self.objects)], self.world_size


def _read(path: Path) -> Contents:
    """Read a checkpoint in every way."""
    opened = nnx_checkpoint.open_checkpoint(path)
    tensors = opened.read_all()
    ranks = [opened.rank_objects(rank) for rank in range(min(opened.world_size, 3))]
    return Contents(tensors, [opened.objects, *ranks], dict(opened.aliases), opened.world_size)


def _opened(path: Path, sample: Sample, format: str, files: Mapping[str, bytes], size: int) -> Verdict:
    before, started = _peak(), time.process_time()
    try:
        nnx_checkpoint.open_checkpoint(path)
        growth = _peak(reset=False) - before
        contents = _read(path)
        damage = nnx_checkpoint.verify(path) if format == "nnx" else []
        spent = time.process_time() - started
        verdict = _compared(contents.tensors, contents.comparable(), sample, format, files, damage)
    except CheckpointError as error:
        spent, growth = time.process_time() - started, _peak(reset=False) - before
        verdict = Verdict("refused", str(error))
    except Exception as error:  # any is a finding
        return Verdict("wrong", _signature(error))
    if growth > 4 * size + MOST_GROWTH:
        return Verdict("wrong", f"opening took {growth >> 20} MB")
    if spent > max(MOST_SECONDS, 2 * size / 1e6):
        return Verdict("wrong", f"opening took {spent:.0f} s")
    return verdict


def _compared(
    tensors: Any, found: Any, sample: Sample, format: str, files: Mapping[str, bytes], damage: Any
) -> Verdict:
    if found == sample.found:
        return Verdict("right")
    if damage:  # what could be read was right, as everything that is read is checked
        return Verdict("forged", damage[0].problem)
    changed = {
        name: value for name, value in tensors.items() if found[0].get(name) != sample.found[0].get(name)
    }
    try:
        wrong = explains(format, files, changed) if changed else []
    except Exception as error:
        return Verdict(
            "wrong", f"nnx reads it, and the reference does not: {type(error).__name__}: {error}"[:150]
        )
    return Verdict("wrong", f"not what the files say: {wrong[0]}") if wrong else Verdict("forged")


def _commanded(arguments: tuple[str, ...], path: Path, sample: Sample, out: Path) -> Verdict | None:
    """Run a command as in a terminal, and return a verdict if it is wrong."""
    for old in out.parent.glob(f"{out.name}*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    names = {"good": sample.below(sample.path), "out": out}
    result = CliRunner().invoke(app, [argument.format(path, **names) for argument in arguments])
    if isinstance(result.exception, NnxError) or (
        result.exit_code in (0, 1, 2) and _is_plain(result.exception)
    ):
        shown = result.output.replace("\n", "").replace("\t", "")
        return None if shown.isprintable() else Verdict("wrong", f"{arguments[0]} prints {shown!r}"[:150])
    return Verdict("wrong", f"nnx ckpt {arguments[0]}: {_signature(result.exception)}")


def _is_plain(error: BaseException | None) -> bool:
    return error is None or isinstance(error, SystemExit)


def _signature(error: BaseException | None) -> str:
    """The error and where it came from, the same for all cases of one fault."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    ours = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in frames
        if "/nnx" in frame.filename or "/fuzz/" in frame.filename
    ]
    text = str(error).split("\n")[0][:80]
    return f"{type(error).__name__} at {' < '.join(ours[:-4:-1])}: {text}"


def _peak(*, reset: bool = True) -> int:
    """Return the peak memory of this process since the last reset; with `reset`, its present memory."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0
