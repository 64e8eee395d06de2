"""Threads: every task once, BLAS as it was before, and calls from other threads and from inside a call."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from sdpa_xp import masks, scaled_dot_product_attention, scaled_dot_product_attention_vjp, threads
from sdpa_xp_export import reference


def blas() -> list[int]:
    """The threads of NumPy's BLAS, among those that other tests have loaded."""
    found = [each for each in threadpool_info() if each["user_api"] == "blas"]
    return [each["num_threads"] for each in found if "numpy" in each["filepath"]]


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine with two cores, whatever the environment of the tests says."""
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    with threadpool_limits(2, "blas"):
        yield


@pytest.fixture
def call(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Large enough for threads."""
    return tuple(rng.standard_normal((2, 4, 600, 16)).astype(np.float32) for _ in range(3))


def test_each_task_is_done_once_and_blas_has_one_thread_meanwhile() -> None:
    done: Counter[int] = Counter()
    names, seen = set(), set()
    barrier = threading.Barrier(2, timeout=10)

    def task(number: int) -> None:
        if number < 2:
            barrier.wait()  # passes only if two threads are at work
        names.add(threading.current_thread().name)
        seen.update(blas())
        done[number] += 1

    threads.run(task, range(50), None)
    assert done == Counter(range(50))
    assert len(names) == 2
    assert seen == {1}
    assert set(blas()) == {2}


def test_an_error_comes_out_and_blas_has_its_threads_again() -> None:
    def task(number: int) -> None:
        if number == 3:
            raise ZeroDivisionError("task 3")

    with pytest.raises(ZeroDivisionError, match="task 3"):
        threads.run(task, range(10), None)
    assert set(blas()) == {2}
    threads.run(lambda _: None, range(10), None)


def test_a_call_inside_a_task_runs_in_its_thread() -> None:
    inside = []

    def task(_: int) -> None:
        own = threading.current_thread()
        threads.run(lambda _: inside.append(threading.current_thread() is own), range(3), None)

    threads.run(task, range(4), None)
    assert inside == [True] * 12
    assert set(blas()) == {2}


def test_as_many_threads_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_by(asked: int | None, expected: int) -> bool:
        """Whether as many threads as expected have a task at one time, and no more."""
        found, barrier = set(), threading.Barrier(expected, timeout=10)

        def task(_: int) -> None:
            found.add(threading.current_thread().name)
            barrier.wait()

        threads.run(task, range(expected), asked)
        return len(found) == expected

    assert run_by(1, 1)
    assert run_by(3, 3)
    monkeypatch.setenv(threads.VARIABLE, "3")
    assert run_by(None, 3)
    assert run_by(1, 1)
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv(threads.VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{threads.VARIABLE} must be a positive integer; got"):
            run_by(None, 1)


def test_calls_from_many_threads(call: tuple[np.ndarray, ...]) -> None:
    """Each gets its own numbers, to the last bit those of a call alone."""
    rules: list[dict[str, Any]] = [{}, {"is_causal": True}, {"attn_mask": masks.padding([300, 600])}]
    alone = [scaled_dot_product_attention(*call, **each) for each in rules]
    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda n: scaled_dot_product_attention(*call, **rules[n % 3]), range(12))]
    for number, output in enumerate(found):
        np.testing.assert_array_equal(output, alone[number % 3])
    assert set(blas()) == {2}


def test_what_else_goes_on_changes_no_bit(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products so large that a BLAS with several threads sums them in another order."""
    x = rng.standard_normal((1, 600, 300)).astype(np.float32)
    alone = scaled_dot_product_attention(x, x, x)
    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda _: scaled_dot_product_attention(x, x, x), range(30))]
    assert all(np.array_equal(each, alone) for each in found)
    monkeypatch.setenv(threads.VARIABLE, "1")
    assert np.array_equal(scaled_dot_product_attention(x, x, x), alone)
    assert set(blas()) == {2}


def test_there_are_no_more_threads_than_were_needed_at_once() -> None:
    threads._workers.cache_clear()
    before = threading.active_count()
    for count in (2, 3, 9, 17):
        threads.run(lambda _: None, range(4), count)
    assert threading.active_count() - before <= 3


def test_the_number_of_threads_changes_no_bit(
    call: tuple[np.ndarray, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for count in ("1", "2", "5"):
        monkeypatch.setenv(threads.VARIABLE, count)
        results.append(scaled_dot_product_attention(*call, is_causal=True))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])
    expected = reference.attention(*call, is_causal=True)[0]
    np.testing.assert_allclose(results[0], expected, rtol=0, atol=4e-6)


SHARED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a scale": {"scale": np.asarray(0.5, np.float32)},
    "a bias": {"bias": np.zeros((1, 4, 600, 1), np.float32)},
    "all": {"bias": np.zeros((600, 600), np.float32)},
}


@pytest.mark.parametrize("rules", SHARED.values(), ids=SHARED)
def test_the_number_of_threads_changes_no_bit_of_a_gradient(
    call: tuple[np.ndarray, ...], monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any]
) -> None:
    """Nor does what else goes on, though several parts of a call add to what they share."""
    output, pullback = scaled_dot_product_attention_vjp(*call, is_causal=True, **rules)
    monkeypatch.setenv(threads.VARIABLE, "1")
    alone = pullback(output)
    monkeypatch.setenv(threads.VARIABLE, "5")
    for _ in range(3):
        found = pullback(output)
        assert all(np.array_equal(found[name], alone[name]) for name in alone)
    assert set(blas()) == {2}


def test_what_shares_a_large_array_is_one_task(
    call: tuple[np.ndarray, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads and batch entries have tasks of their own, those that add to the gradient of one bias have not."""
    monkeypatch.setattr("sdpa_xp.tiles.os.cpu_count", lambda: 8)
    counts: list[int] = []
    run = threads.run
    found = {}
    for name, rules in SHARED.items():
        output, pullback = scaled_dot_product_attention_vjp(*call, **rules)
        with monkeypatch.context() as patch:
            patch.setattr(threads, "run", lambda f, tasks, n: counts.append(len(tasks)) or run(f, tasks, n))
            pullback(output)
        found[name] = counts.pop()
    assert found == {"nothing": 8, "a scale": 8, "a bias": 4, "all": 1}


def test_a_warning_of_numpy_stays_quiet_in_each_thread(call: tuple[np.ndarray, ...]) -> None:
    """exp of -inf - 0 and the like are meant; the tests make an error of each warning."""
    query, key, value = (x.copy() for x in call)
    key[:, :, 7] = np.inf
    output = scaled_dot_product_attention(query, key, value)
    assert not np.all(np.isfinite(output))


STORY = """
import atexit, os, time
import numpy as np
from sdpa_xp import scaled_dot_product_attention, threads

x = np.random.default_rng(0).standard_normal((4, 600, 16)).astype(np.float32)
expected = scaled_dot_product_attention(x, x, x)
same = lambda: np.array_equal(scaled_dot_product_attention(x, x, x), expected)

with threads._FREE:  # as if another thread of the parent were computing
    child = os.fork()
if child == 0:
    found, names = same(), set()
    threads.run(lambda _: names.add(threads.threading.current_thread().name) or time.sleep(0.01), range(9), 2)
    os._exit(0 if found and len(names) == 2 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
atexit.register(lambda: print(same()))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_and_an_ending_one_compute_too() -> None:
    """The first has no threads but its own; the second starts none."""
    environment = os.environ | {threads.VARIABLE: "2"}
    command = [sys.executable, "-c", STORY]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.stdout.split() == ["0", "True"], done.stderr
