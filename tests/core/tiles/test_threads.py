"""Threads: every task once, BLAS as it was before, and calls from other threads and from inside a call."""

from __future__ import annotations

import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from internals import VARIABLE, override, program, reference, threads
from threadpoolctl import threadpool_info, threadpool_limits

from sdpa_xp import attention_state, masks, scaled_dot_product_attention, scaled_dot_product_attention_vjp


def blas() -> list[int]:
    """The threads of NumPy's BLAS, among those that other tests have loaded."""
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return [pool["num_threads"] for pool in pools if "numpy" in pool["filepath"]]


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine with two cores, whatever the environment of the tests says."""
    monkeypatch.delenv(VARIABLE, raising=False)
    with threadpool_limits(2, "blas"):
        yield


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks there are, each time that some run."""
    lengths, run = list[int](), threads.run_tasks
    monkeypatch.setattr(
        threads, "run_tasks", lambda f, tasks, n: lengths.append(len(tasks)) or run(f, tasks, n)
    )
    return lengths


@pytest.fixture
def call(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, ...]:
    """Large enough for threads, each head too."""
    override(monkeypatch, "LEAST_WORK_FOR_THREADS", 2**20)
    return tuple(rng.standard_normal((2, 4, 600, 16)).astype(np.float32) for _ in range(3))


@pytest.mark.rule("R9")
def test_each_task_is_done_once_and_blas_has_one_thread_meanwhile() -> None:
    done: Counter[int] = Counter()
    idents, blas_threads = set(), set()
    barrier = threading.Barrier(2, timeout=60)

    def task(number: int) -> None:
        if number < 2:
            barrier.wait()  # passes only if two threads are at work
        idents.add(threading.get_ident())
        blas_threads.update(blas())
        done[number] += 1

    threads.run_tasks(task, range(50), None)
    assert done == Counter(range(50))
    assert len(idents) == 2
    assert blas_threads == {1}
    assert set(blas()) == {2}


def test_an_error_comes_out_and_blas_has_its_threads_again() -> None:
    def task(number: int) -> None:
        if number == 3:
            raise ZeroDivisionError("task 3")

    with pytest.raises(ZeroDivisionError, match="task 3"):
        threads.run_tasks(task, range(10), None)
    assert set(blas()) == {2}
    threads.run_tasks(lambda _: None, range(10), None)


def test_a_call_inside_a_task_runs_in_its_thread() -> None:
    inside = []

    def task(_: int) -> None:
        thread = threading.get_ident()
        threads.run_tasks(lambda _: inside.append(threading.get_ident() == thread), range(3), None)

    threads.run_tasks(task, range(4), None)
    assert inside == [True] * 12
    assert set(blas()) == {2}


def test_as_many_threads_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_by(num_threads: int | None, expected: int) -> bool:
        """Whether as many threads as expected have a task at one time, and no more."""
        idents, barrier = set(), threading.Barrier(expected, timeout=60)

        def task(_: int) -> None:
            idents.add(threading.get_ident())
            barrier.wait()

        threads.run_tasks(task, range(expected), num_threads)
        return len(idents) == expected

    assert run_by(1, 1)
    assert run_by(3, 3)
    monkeypatch.setenv(VARIABLE, "3")
    assert run_by(None, 3)
    assert run_by(1, 1)
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{VARIABLE} must be a positive integer; got"):
            run_by(None, 1)


@pytest.mark.parametrize("wrong", ["0", "-1", "many", "2.0"])
def test_a_small_call_refuses_a_wrong_number_of_threads(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    x = np.ones((1, 2, 3), np.float32) * len(wrong)
    monkeypatch.setenv(VARIABLE, wrong)
    for function in (scaled_dot_product_attention, attention_state, scaled_dot_product_attention_vjp):
        with pytest.raises(ValueError, match=f"{VARIABLE} must be a positive integer; got .*{wrong}"):
            function(x, x, x)


def test_what_else_goes_on_changes_no_bit(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products so large that a BLAS with several threads sums them in another order."""
    x = rng.standard_normal((1, 600, 300)).astype(np.float32)
    rules: list[dict[str, Any]] = [{}, {"is_causal": True}, {"attn_mask": masks.padding([300])}]
    alone = [scaled_dot_product_attention(x, x, x, **options) for options in rules]
    with ThreadPoolExecutor(3) as pool:
        outputs = [*pool.map(lambda n: scaled_dot_product_attention(x, x, x, **rules[n % 3]), range(30))]
    assert all(np.array_equal(output, alone[number % 3]) for number, output in enumerate(outputs))
    monkeypatch.setenv(VARIABLE, "1")
    assert np.array_equal(scaled_dot_product_attention(x, x, x), alone[0])
    assert set(blas()) == {2}


def test_there_are_no_more_threads_than_were_needed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_POOL", threads._Pool())
    before = len(sys._current_frames())
    for count in (2, 3, 9, 17):
        threads.run_tasks(lambda _: None, range(4), count)
    assert len(sys._current_frames()) - before <= 4  # three that help, and the one that keeps watch


@pytest.mark.slow
def test_the_number_of_threads_changes_no_bit(
    call: tuple[np.ndarray, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for count in ("1", "2", "5"):
        monkeypatch.setenv(VARIABLE, count)
        results.append(scaled_dot_product_attention(*call, is_causal=True))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])
    expected = reference.attention(*call, is_causal=True)[0]
    np.testing.assert_allclose(results[0], expected, rtol=0, atol=4e-6)


ALL_CORES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a scale": {"scale": np.asarray(0.5, np.float32)},
    "a bias": {"bias": np.zeros((1, 4, 600, 1), np.float32)},
    "all": {"bias": np.zeros((600, 600), np.float32)},
}


@pytest.mark.parametrize("rules", ALL_CORES.values(), ids=ALL_CORES)
def test_the_number_of_threads_changes_no_bit_of_a_gradient(
    call: tuple[np.ndarray, ...], monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any]
) -> None:
    """Nor does what else goes on, though several parts of a call add to what they share."""
    output, pullback = scaled_dot_product_attention_vjp(*call, is_causal=True, **rules)
    direction = {"query": call[0], "value": call[2]}
    monkeypatch.setenv(VARIABLE, "1")
    alone = [pullback(output), *pullback.jvp(output, direction)]
    monkeypatch.setenv(VARIABLE, "5")
    for _ in range(3):
        computed = [pullback(output), *pullback.jvp(output, direction)]
        for gradients, expected in zip(computed, alone, strict=True):
            assert all(np.array_equal(gradients[name], expected[name]) for name in expected)
    assert set(blas()) == {2}


def test_what_shares_a_large_array_is_divided_by_queries(
    call: tuple[np.ndarray, ...], monkeypatch: pytest.MonkeyPatch, counts: list[int]
) -> None:
    """Heads and batch entries have tasks of their own. If these are too few, the ranges of 512 queries have."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    tasks_of = {}
    for name, rules in ALL_CORES.items():
        output, pullback = scaled_dot_product_attention_vjp(*call, **rules)
        pullback(output)
        tasks_of[name] = counts[-1]
    assert tasks_of == {"nothing": 8, "a scale": 8, "a bias": 8, "all": 2}


def test_one_head_has_tasks_for_several_threads(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, counts: list[int]
) -> None:
    override(monkeypatch, "LEAST_WORK_FOR_THREADS", 2**20)
    x = rng.standard_normal((1, 1024, 8)).astype(np.float32)
    _, pullback = scaled_dot_product_attention_vjp(x, x, x)
    counts.clear()
    for cores in (1, 2, 8):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        pullback(x)
        pullback.jvp(x, {"query": x})
    # A second derivative has the output of its own computed between them.
    assert counts[::3] == counts[2::3] == [1, 2, 4]


@pytest.mark.parametrize("rules", [{"is_causal": True}, ALL_CORES["all"]], ids=["causal", "a bias"])
def test_threads_share_the_gradients_of_one_head(
    call: tuple[np.ndarray, ...], monkeypatch: pytest.MonkeyPatch, counts: list[int], rules: dict[str, Any]
) -> None:
    """Each has sums of its own for some queries, which are added in one order."""
    arrays = [x[0, 0] for x in call]
    direction = dict(zip(("query", "key", "value"), arrays, strict=True))
    output, pullback = scaled_dot_product_attention_vjp(*arrays, **rules)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    whole = pullback(output), pullback.jvp(output, direction)[1]
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    counts.clear()
    results = []
    for count in ("1", "2", "5"):
        monkeypatch.setenv(VARIABLE, count)
        results.append((pullback(output), pullback.jvp(output, direction)[1]))
    assert counts[::3] == counts[2::3] == [counts[0]] * 3
    assert counts[0] > 1
    for parts in results:
        for part, first, alone in zip(parts, results[0], whole, strict=True):
            for name, gradient in part.items():
                assert np.array_equal(gradient, first[name])
                size = np.abs(alone[name]).max()
                np.testing.assert_allclose(gradient, alone[name], rtol=0, atol=1e-5 * size, err_msg=name)


def test_a_warning_of_numpy_stays_quiet_in_each_thread(call: tuple[np.ndarray, ...]) -> None:
    """exp of -inf - 0 and the like are meant; the tests make an error of each warning."""
    query, key, value = (x.copy() for x in call)
    key[:, :, 7] = np.inf
    output = scaled_dot_product_attention(query, key, value)
    assert not np.all(np.isfinite(output))


STORY = """
import atexit, os, time
import numpy as np
from sdpa_xp import scaled_dot_product_attention
from internals import threads

x = np.random.default_rng(0).standard_normal((4, 600, 16)).astype(np.float32)
expected = scaled_dot_product_attention(x, x, x)
same = lambda: np.array_equal(scaled_dot_product_attention(x, x, x), expected)

with threads._POOL.lock, threads._BLAS.lock:  # as if another thread of the parent were computing
    child = os.fork()
if child == 0:
    found, names = same(), set()
    threads.run_tasks(lambda _: names.add(threads.threading.get_ident()) or time.sleep(0.01), range(9), 2)
    os._exit(0 if found and len(names) == 2 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
atexit.register(lambda: print(same()))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.slow
def test_a_forked_process_and_an_ending_one_compute_too() -> None:
    """The first has no threads but its own; the second starts none."""
    assert run_story(program(STORY)) == ["0", "True"]


def run_story(story: str) -> list[str]:
    """The words that a script prints in a process of its own, which has two threads."""
    variables = os.environ | {VARIABLE: "2"}
    done = subprocess.run(
        [sys.executable, "-c", story], capture_output=True, text=True, check=False, timeout=120, env=variables
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


SIGNALS = """
import random, signal, time
import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits
from sdpa_xp import scaled_dot_product_attention

class Interrupt(Exception):
    pass

def interrupt(*_):
    raise Interrupt

def blas():
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}

draw = random.Random(0)
x = np.random.default_rng(0).standard_normal((2, 300, 64)).astype(np.float32)
with threadpool_limits(2, "blas"):
    expected = scaled_dot_product_attention(x, x, x)
    signal.signal(signal.SIGALRM, interrupt)
    interrupted = left = 0
    for _ in range(600):
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(2e-5, 4e-3))
            for _ in range(20):
                scaled_dot_product_attention(x, x, x)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            interrupted += 1
        deadline = time.monotonic() + 5
        while blas() != {2} and time.monotonic() < deadline:
            time.sleep(1e-4)
        left += blas() != {2}
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(interrupted > 300, left, np.array_equal(scaled_dot_product_attention(x, x, x), expected))
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer that sends signals")
@pytest.mark.slow
def test_blas_has_its_threads_again_after_a_signal_at_any_moment() -> None:
    assert run_story(SIGNALS) == ["True", "0", "True"]


def test_blas_has_its_threads_again_after_an_exception_at_any_line() -> None:
    """As a signal handler raises it in the calling thread: at each line that a call runs in turn.

    A `with` statement is left out: CPython runs no handler while it enters or leaves one.
    """
    files = {threads.__file__}
    lines = 0

    def run(interrupt_at: int) -> bool:
        """Whether the exception came at that line, counted from the start of the call."""
        count = 0

        def trace(frame: Any, event: str, _argument: Any) -> Any:
            nonlocal count
            if frame.f_code.co_filename not in files:
                return None
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if event == "line" and not source.lstrip().startswith("with "):
                count += 1
                if count == interrupt_at:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()  # that of a debugger, or of what records lines
        sys.settrace(trace)
        try:
            threads.run_tasks(lambda _: None, range(3), 2)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    while run(lines + 1):
        lines += 1
        deadline = time.monotonic() + 5
        while set(blas()) != {2} and time.monotonic() < deadline:
            time.sleep(1e-4)
        assert set(blas()) == {2}, f"interrupted at line {lines} of the call"
    assert lines > 30
    test_each_task_is_done_once_and_blas_has_one_thread_meanwhile()


HANDLER = """
import signal, sys
import numpy as np
from sdpa_xp import scaled_dot_product_attention

x = np.random.default_rng(0).standard_normal((2, 300, 64)).astype(np.float32)
expected, inside = scaled_dot_product_attention(x, x, x), []

def attend(*_):
    if not inside:
        inside.append(1)
        assert np.array_equal(scaled_dot_product_attention(x, x, x), expected)
        inside.clear()

signal.signal(signal.SIGALRM, attend)
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
same = [np.array_equal(scaled_dot_product_attention(x, x, x), expected) for _ in range(1000)]
signal.setitimer(signal.ITIMER_REAL, 0)
print(all(same))
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer that sends signals")
@pytest.mark.slow
def test_a_signal_handler_may_attend() -> None:
    assert run_story(HANDLER) == ["True"]
