"""A module that leaves a thread behind when it is imported, as some libraries do."""

from __future__ import annotations

import threading
import time

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
