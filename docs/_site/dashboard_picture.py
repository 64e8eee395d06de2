"""The picture of Dask's dashboard in the tutorial of a million keys, taken while the example runs.

Take it again: PYTHONPATH=examples NODE_PATH=.venv/site/node_modules python docs/_site/dashboard_picture.py
It needs bokeh, `make docs` for playwright-core, and Debian's chromium, or CHROMIUM=/path/of/another.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import million_keys
from distributed import Client, LocalCluster

HERE = Path(__file__).parent
PICTURE = HERE.parent / "assets" / "dashboard.png"
KEYS_READ = 30
"""The chunks of keys that are attended when the picture is taken."""


def attended(client: Client) -> int:
    """Return how many chunks of keys are attended."""

    def count(dask_scheduler: Any) -> int:
        partial = [task for task in dask_scheduler.tasks.values() if "attention-partial" in str(task.key)]
        return sum(task.state in ("memory", "released") for task in partial)

    return int(client.run_on_scheduler(count))


def main() -> None:
    """Open the dashboard, run the example, and take the picture before it ends."""
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=1, threads_per_worker=2, memory_limit=million_keys.MEMORY_LIMIT, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        million_keys.make(folder)
        command = ["node", str(HERE / "browser" / "dashboard.cjs"), client.dashboard_link, str(PICTURE)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as browser:
            assert browser.stdout is not None
            assert browser.stdin is not None
            assert browser.stdout.readline() == "ready\n"
            asking = threading.Thread(target=million_keys.ask, args=(client, folder))
            asking.start()
            while asking.is_alive() and attended(client) < KEYS_READ:
                asking.join(0.1)
            browser.stdin.close()
            asking.join()


if __name__ == "__main__":
    main()
