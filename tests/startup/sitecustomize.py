"""The first import of every Python that a test starts: it halves the time of importing Lightning.

Importing torch and Lightning makes millions of objects that stay. The collector scans them again and
again, which is a quarter of the import's time, and most of the time of a script's test.

A further two fifths go to optional imports of torchmetrics: transformers for metrics of texts,
scipy for those of sounds, matplotlib for pictures. No test uses these metrics, so torchmetrics is told that
they are not installed. Code that imports one of them directly still finds it.

For every Trainer, Lightning also reads the entry points of all installed packages, some two hundred files.
`_keep_entry_points` caches them.
"""

import gc
import sys

UNUSED = frozenset(["transformers", "scipy", "matplotlib"])


class _BeforeTorchmetrics:
    """Is asked for every module, and finds none; `torchmetrics` makes it act, and go."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchmetrics":
            sys.meta_path.remove(cls)
            _hide_the_unused()
            _keep_entry_points()


def _hide_the_unused():
    """Let the package checks of Lightning and torchmetrics deny the unused packages."""
    import lightning_utilities.core.imports as answers

    is_there, version = answers.package_available, answers._version

    def package_available(name):
        return name not in UNUSED and is_there(name)

    def version_of_installed(name):
        if name in UNUSED:
            raise answers.PackageNotFoundError(name)
        return version(name)

    answers.package_available, answers._version = package_available, version_of_installed


def _keep_entry_points():
    """Cache the entry points of Lightning's groups (until a folder of `sys.path` changes)."""
    from importlib import metadata
    from pathlib import Path

    read, kept = metadata.entry_points, {}

    def changed(folder):
        try:
            return Path(folder).stat().st_mtime_ns
        except OSError:
            return None

    def entry_points(**wanted):
        if not wanted.get("group", "").startswith("lightning."):
            return read(**wanted)
        key = (*wanted.items(), *((folder, changed(folder)) for folder in sys.path))
        if key not in kept:
            kept[key] = read(**wanted)
        return kept[key]

    metadata.entry_points = entry_points


gc.set_threshold(20_000, 20, 20)
sys.meta_path.insert(0, _BeforeTorchmetrics)
