"""``python -m fuzz N [format ...]``: judge N cases of each format, and print the results."""

from __future__ import annotations

import os
import sys
import time

from fuzz.running import survey
from fuzz.samples import FORMATS

if __name__ == "__main__":
    count, names = int((sys.argv[1:] or ["300"])[0]), sys.argv[2:] or [*FORMATS]
    failed = 0
    for name in names:
        started = time.monotonic()
        figures = survey(name, count, start=int(os.environ.get("FUZZ_START", "0")))
        print(f"{figures}\n  ({time.monotonic() - started:.0f} s)", flush=True)
        failed += figures.counts["wrong"]
    raise SystemExit(1 if failed else 0)
