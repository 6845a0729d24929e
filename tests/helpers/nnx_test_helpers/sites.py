"""Fixtures for tests of names and plugins: pretend distributions, and fresh Python processes."""

import importlib
import os
import subprocess
import sys
import textwrap

import pytest


class Site:
    """A folder of pretend installed distributions, each a `.dist-info` and its modules."""

    def __init__(self, path):
        self.path = path
        self.modules = []

    def add(self, distribution, source=None, *, version="1.0", entry=None, modules=None):
        """Install a plugin with an entry point module of this source text.

        The entry point has the distribution's name without its dashes, unless `entry` is given.
        """
        module = distribution.replace("-", "_") + "_plugin"
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        name = entry or distribution.replace("-", "_")
        (info / "entry_points.txt").write_text(f"[nnx]\n{name} = {module}\n")
        if source is not None:
            self.module(module, source)
        for other, text in (modules or {}).items():
            self.module(other, text)
        return name

    def module(self, name, source):
        self.modules.append(name)
        (self.path / f"{name}.py").write_text(textwrap.dedent(source))

    def hide(self, *distributions):
        """Hide installed plugins: the first distribution that is found for each has no entry point."""
        for distribution in distributions:
            info = self.path / f"{distribution.replace('-', '_')}-0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0\n")

    def provide(self, distribution, *names, target="does_not:matter", **options):
        """Install a healthy plugin with these strategies."""
        specs = ", ".join(f"StrategySpec({name!r}, {target!r})" for name in names)
        return self.add(
            distribution,
            f"""
            from nnx import StrategySpec, hookimpl

            @hookimpl
            def nnx_strategies():
                return [{specs}]
            """,
            **options,
        )


@pytest.fixture
def clean_names():
    """Clear this process's discovered and registered names, before and after the test."""
    from nnx_core.names import discovery
    from nnx_core.names.registry import StrategyRegistry

    def forget():
        discovery._State.found = None
        StrategyRegistry._local.clear()
        StrategyRegistry._overriding.clear()
        StrategyRegistry._removed.clear()

    forget()
    yield
    forget()
    StrategyRegistry.synchronize()


@pytest.fixture
def site(clean_names, tmp_path, monkeypatch):
    """Pretend distributions that this process sees; add them before the first discovery.

    `clean_names` comes first so that it ends last, when these distributions are out of sight.
    """
    for variable in ("NNX_DISABLE_PLUGINS", "NNX_LOAD_PLUGINS", "NNX_STRICT_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    site = Site(folder)
    yield site
    for name in site.modules:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.fixture
def run_python(tmp_path):
    """Run a script in a fresh Python, which sees the pretend distributions of `site`."""

    def run(source, *arguments, check=True, **environment):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        places = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
        settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places, **environment}
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            env=settings,
            capture_output=True,
            text=True,
            timeout=240,
            cwd=tmp_path,
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run
