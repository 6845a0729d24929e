"""A launcher as a third party would write it: local processes by multiprocessing."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from typing import Any

from nnx_core.launch.launcher import Job, Launcher, Work, variables


class SpawningLauncher(Launcher):
    """Starts all processes here, however many nodes there are."""

    def run(self, job: Job) -> Any:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        results = context.Queue()
        processes = []
        work = pickle.dumps(job.work)  # by itself multiprocessing would let the processes share parameters
        for rank in range(job.nodes * job.devices):
            mine = variables(rank, nodes=job.nodes, devices=job.devices, address="127.0.0.1", port=port)
            processes.append(context.Process(target=_work, args=(work, mine, results)))
        for process in processes:
            process.start()
        try:
            ended = [pickle.loads(results.get(timeout=120)) for _ in processes]
        finally:
            for process in processes:
                process.join(10)
                process.kill()
        for _, error, text in ended:
            if error is not None:
                raise error from RuntimeError(text)
        return next(result for result, _, _ in ended if result is not None)


def _work(pickled: bytes, mine: dict[str, str], results: Any) -> None:
    os.environ.update(mine)
    try:
        work: Work = pickle.loads(pickled)
        ended: tuple[Any, Exception | None, str] = (work(lambda kind, text: None), None, "")
    except Exception as error:
        ended = (None, error, traceback.format_exc())
    results.put(pickle.dumps(ended))
