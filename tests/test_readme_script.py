"""README's script succeeds under every strategy of README's table, in real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nnx_core.names.registry import StrategyRegistry

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def strategies() -> list[str]:
    """The names in the first column of the table; `_2` after `nnx_deepspeed_1` is `nnx_deepspeed_2`."""
    table = README.partition("## Strategies")[2].partition("\n## ")[0]
    names: list[str] = []
    for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        first, *more = re.findall(r"`(\w+)`", row)
        stem = first.rpartition("_")[0]
        names += [first, *(stem + name if name.startswith("_") else name for name in more)]
    return names


def script(strategy: str) -> str:
    """README's script with another name in its second Trainer."""
    (text,) = (
        text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "trainer.fit" in text
    )
    assert text.count('strategy="nnscaler_zero"') == 1
    return str(text.replace('strategy="nnscaler_zero"', f'strategy="{strategy}"'))


def test_the_table_names_strategies_that_exist() -> None:
    assert len(strategies()) > 15
    assert set(strategies()) <= set(StrategyRegistry)


@pytest.mark.full  # `test_docs_code.py` runs the script as it stands
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", [name for name in strategies() if not name.startswith("torchft")])
def test_the_script_ends_well_under_every_strategy_of_the_table(strategy: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        script(strategy)
        + "\nprint(f'epoch {trainer.current_epoch} step {trainer.global_step}\\n', end='', flush=True)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, file],
        cwd=tmp_path,
        env=environment,
        timeout=580,  # it takes a minute where nothing else runs
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("epoch 2 step ") == 2
    assert f"{strategy}: 2 ranks on 1 node" in done.stdout + done.stderr
