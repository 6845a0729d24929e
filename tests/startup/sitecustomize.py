"""The first import of every Python that a test starts: it halves the time of importing Lightning.

Importing torch and Lightning makes millions of objects that stay. The collector scans them again and
again, which is a quarter of the import's time, and most of the time of a script's test.

A further two fifths go to optional imports of torchmetrics: transformers for metrics of texts,
scipy for those of sounds, matplotlib for pictures. No test uses these metrics, so torchmetrics is told that
they are not installed. Code that imports one of them directly still finds it.

For every Trainer, Lightning also reads the entry points of each installed package, some two hundred files.
They are cached as long as the folder of a package's metadata is the same.
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
    """Cache the contents of ``entry_points.txt`` files, by folder and modification time."""
    from importlib import metadata

    read, kept = metadata.PathDistribution.read_text, {}

    def read_text(self, filename):
        if filename != "entry_points.txt":
            return read(self, filename)
        try:
            changed = self._path.stat().st_mtime_ns
        except (OSError, AttributeError):  # in an archive
            return read(self, filename)
        key = (str(self._path), changed)
        if key not in kept:
            kept[key] = read(self, filename)
        return kept[key]

    metadata.PathDistribution.read_text = read_text


gc.set_threshold(20_000, 20, 20)
sys.meta_path.insert(0, _BeforeTorchmetrics)
