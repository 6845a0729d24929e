"""What every Python that a test starts imports first: it halves what importing Lightning costs.

Importing torch and Lightning makes millions of objects that stay. The collector looks at them again and
again, which is a quarter of the time that the import takes, and most of what a test of a script costs.

A further two fifths go to what torchmetrics imports where it is installed: transformers for metrics of texts,
scipy for those of sounds, matplotlib for pictures. No test uses these metrics, so torchmetrics is told that
they are not there. Whoever imports one of them itself finds it as ever.
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


def _hide_the_unused():
    """Let what Lightning and torchmetrics ask about installed packages deny the unused ones."""
    import lightning_utilities.core.imports as answers

    is_there, version = answers.package_available, answers._version

    def package_available(name):
        return name not in UNUSED and is_there(name)

    def version_of_installed(name):
        if name in UNUSED:
            raise answers.PackageNotFoundError(name)
        return version(name)

    answers.package_available, answers._version = package_available, version_of_installed


gc.set_threshold(20_000, 20, 20)
sys.meta_path.insert(0, _BeforeTorchmetrics)
