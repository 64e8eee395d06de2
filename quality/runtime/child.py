"""`python -m quality.runtime.child FOLDER JOB...`: run graphs in the onnxruntime that this process finds.

Each job is a folder with a graph and inputs, and gets its outputs, or a file with the error. The name of a job
is printed before it is begun, after the release: if the process dies, the last one is to blame.
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
from internals import PROVIDERS, open_session, run_session, version

from quality.runtime.arrays import load, save


def main(folder: Path, names: list[str]) -> None:
    """Run the jobs of these names, or if there are none, all of them in the order of their names."""
    print(version(), flush=True)
    for name in names:
        print(name, flush=True)
        try:
            _run(folder / name)
        except ValueError as error:  # what the session makes of whatever onnxruntime raises
            (folder / name / "error").write_text(str(error))


def _run(job: Path) -> None:
    session = open_session(onnx.load(job / "model.onnx"), PROVIDERS["cpu"])
    for feeds in sorted(job.glob("feeds-*")):
        save(job / feeds.name.replace("feeds", "outputs"), run_session(session, load(feeds)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
