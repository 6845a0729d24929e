"""Run a page of the documentation in the ranks of a pool: its prelude, then its blocks, in order.

Python runs on every rank in one namespace, like a script that several processes run. Commands run once,
on rank 0, while the others wait; `nnx` runs in that process, because importing torch takes longer than all
other work.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from docs_table import reason_not_to_compare, reason_not_to_run
from jobs.docs_blocks import ROOT, Block, blocks_of, here, same_output, words

if sys.version_info >= (3, 11):
    import tomllib
else:  # tomli is what pytest itself needs below 3.11
    import tomli as tomllib

PRELUDES = ROOT / "tests" / "docs_preludes"
_WAIT = 60.0


class PageError(AssertionError):
    """A block does not do as its page says."""


def make_checkpoints(folder: str) -> None:
    """Write the checkpoints that pages name, with the model of their prelude."""
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "docs_checkpoints"}
    exec((PRELUDES / "everywhere.py").read_text(), names)
    trainer = names["Trainer"](
        strategy="fsdp_auto", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False
    )
    trainer.fit(names["model"])
    for name in ("last", "a", "b"):
        trainer.save_checkpoint(f"{name}.ckpt")


def run_page(page: str, folder: str) -> list[str]:
    """Run one page in `folder`, which all ranks share.

    Returns:
        The places of the blocks that were run, compared or parsed.
    """
    return Page(ROOT / page, Path(folder)).run()


class Page:
    """One page while it runs: its namespace, and the output of the last block."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self.folder = folder
        self.rank = int(os.environ["RANK"])
        self.ranks = int(os.environ["WORLD_SIZE"])
        self.module = types.ModuleType(f"docs_{re.sub(r'[^a-z]', '_', path.stem)}")
        self.printed = ""
        self.previous: Block | None = None

    def run(self) -> list[str]:
        """The preludes, then every block."""
        os.chdir(self.folder)
        sys.modules[self.module.__name__] = self.module
        with _registrations_undone(), _devices_found(self.ranks):
            self.prelude()
            return [block.place for block in blocks_of(self.path) if self.run_block(block)]

    def prelude(self) -> None:
        """Run the prelude of all pages, then that of this page."""
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else Path(self.path.name)
        name = path.with_suffix("").as_posix().replace("/", "_").lower()
        for file in (PRELUDES / "everywhere.py", PRELUDES / f"{name}.py"):
            if file.is_file():
                exec(compile(file.read_text(), str(file), "exec"), vars(self.module))

    def run_block(self, block: Block) -> bool:
        """Return True if the block was run or parsed."""
        try:
            act: Callable[[Block], bool] = getattr(self, f"run_{block.language}")
            return act(block)
        except (Exception, SystemExit) as error:
            (self.folder / ".failed").touch()
            raise PageError(f"{block.place} ({block.language}): {type(error).__name__}: {error}") from error
        finally:
            self.previous = block

    def run_python(self, block: Block) -> bool:
        if reason_not_to_run(block.page, block.text):
            return False
        source = "\n" * block.line + here(block.text, ranks=self.ranks)
        file = self.folder / f".rank{self.rank}" / f"line_{block.line}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)  # a file, so that engines which look at the source of a model find it
        with _captured() as output:
            exec(compile(source, str(file), "exec", dont_inherit=True), vars(self.module))
        self.printed = output.getvalue()
        return True

    def run_diff(self, block: Block) -> bool:
        """The new half of a difference."""
        new = [line[1:] for line in block.text.splitlines() if not line.startswith("-")]
        return self.run_python(replace(block, text="\n".join(new)))

    def run_bash(self, block: Block) -> bool:
        commands = [each for each in block.commands() if not reason_not_to_run(block.page, each)]
        if commands:
            self.alone(block, lambda: [self.command(each) for each in commands])
        return bool(commands)

    def run_console(self, block: Block) -> bool:
        if any(reason_not_to_run(block.page, each) for each in block.commands()):
            return False
        self.alone(block, lambda: self.compare_commands(block))
        return True

    def compare_commands(self, block: Block) -> None:
        for command, shown in zip(block.commands(), block.outputs(), strict=True):
            printed = self.command(command, codes=(0, 1, 2))
            wrong = same_output(shown, printed)
            if wrong:
                raise PageError(f"$ {command}\nshown, but not printed: {wrong}\nprinted:\n{printed}")

    def run_text(self, block: Block) -> bool:
        if reason_not_to_compare(block.page, block.text):
            return False
        if self.rank == 0:
            if self.previous is None or self.previous.language != "python":
                raise PageError("no Python block stands before this output")
            wrong = same_output("...\n" + block.text, self.printed)  # a Trainer prints more than one shows
            if wrong:
                raise PageError(f"shown, but not printed: {wrong}\nprinted:\n{self.printed}")
        return True

    def run_yaml(self, block: Block) -> bool:
        """Read it as LightningCLI does, where it configures a Trainer."""
        content = yaml.safe_load(block.text)
        if "trainer" in content:
            from lightning.pytorch.cli import LightningCLI

            file = self.folder / f"rank{self.rank}.yaml"
            file.write_text(here(block.text, ranks=self.ranks))
            LightningCLI(vars(self.module)["Net"], run=False, args=["--config", str(file)])
        return True

    def run_toml(self, block: Block) -> bool:
        return bool(tomllib.loads(block.text))

    def run_json(self, block: Block) -> bool:
        json.loads(block.text)
        return True

    def alone(self, block: Block, act: Callable[[], object]) -> None:
        """Let rank 0 act while the others wait."""
        done = self.folder / f".done_{block.line}"
        if self.rank == 0:
            act()
            done.touch()
            return
        end = time.monotonic() + _WAIT
        while not done.exists():
            if (self.folder / ".failed").exists() or time.monotonic() > end:
                raise PageError("rank 0 failed here")
            time.sleep(0.02)

    def command(self, command: str, *, codes: tuple[int, ...] = (0,)) -> str:
        """Run one command and return its output."""
        code, printed = _nnx(words(command)[1:]) if command.startswith("nnx ") else _shell(command)
        if code not in codes:
            raise PageError(f"$ {command}\nexit code {code}\n{printed}")
        return printed


def _nnx(arguments: list[str]) -> tuple[int, str]:
    """The `nnx` command, outside of the world that this process is a rank of."""
    from typer.testing import CliRunner

    from nnx_checkpoint.cli.command import _application

    outside = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
    result = CliRunner().invoke(_application(arguments), arguments, env={**outside, "COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def _shell(command: str) -> tuple[int, str]:
    """A command in a shell that finds this Python first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        ["bash", "-c", command],
        env={**outside, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_WAIT,
        check=False,
    )
    return done.returncode, done.stdout


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    """Capture printed and logged output."""
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    named = [logging.getLogger(name) for name in ("nnx", "lightning.pytorch", "lightning.fabric")]
    loggers = [logging.getLogger(), *(logger for logger in named if not logger.propagate)]
    for logger in loggers:
        logger.addHandler(handler)
    logging.getLogger("nnx").setLevel(logging.INFO)  # as in a script that has not set up logging
    try:
        with contextlib.redirect_stdout(output):
            yield output
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextlib.contextmanager
def _devices_found(count: int) -> Iterator[None]:
    """Let `devices="auto"`, which is one process on CPU, mean all that the page has."""
    from lightning.pytorch.accelerators import CPUAccelerator

    before = CPUAccelerator.auto_device_count
    CPUAccelerator.auto_device_count = staticmethod(lambda: count)  # type: ignore[method-assign]
    try:
        yield
    finally:
        CPUAccelerator.auto_device_count = before  # type: ignore[method-assign]


@contextlib.contextmanager
def _registrations_undone() -> Iterator[None]:
    """Undo the registrations of a page."""
    from nnx import StrategyRegistry

    before: set[Any] = set(StrategyRegistry.names())
    try:
        yield
    finally:
        for name in set(StrategyRegistry.names()) - before:
            StrategyRegistry.remove(name)
