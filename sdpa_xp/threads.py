"""Tasks in threads, with BLAS held to one thread in each of them.

NumPy's matrix products and ufuncs leave the interpreter to other threads. A BLAS that takes all cores for each
product of two tiles would wait for its own threads most of the time, and write what it made through memory;
a thread that has a core to itself keeps its tile in that core's cache.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

from sdpa_xp import checks

T = TypeVar("T")

VARIABLE = "SDPA_XP_NUM_THREADS"
_FREE = threading.Lock()


def run(function: Callable[[T], None], tasks: Iterable[T], threads: int | None) -> None:
    """Call `function` with each task; None is as many threads as BLAS has, which is held to one then.

    One call at a time has threads. Others that come meanwhile, from a thread of the caller or from inside a
    task, run in the thread that they came in.
    """
    tasks = list(tasks)
    if threads == 1:
        _share(function, tasks, 1)
        return
    with _BLAS.in_one_thread() as found:
        if not _FREE.acquire(blocking=False):
            _share(function, tasks, 1)
            return
        try:
            _share(function, tasks, threads or given() or found)
        finally:
            _FREE.release()


def count() -> int:
    """How many threads share the tasks, where there is none of them yet."""
    return given() or max((library.num_threads for library in _blas()), default=_cores())


def given() -> int | None:
    """What the environment asks for; None where it is silent."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return None
    if not asked.isdecimal() or int(asked) == 0:
        rule = f"the environment's {VARIABLE} must be a positive integer"
        raise ValueError(checks.message("sdpa_xp", rule, {VARIABLE: asked}))
    return int(asked)


def _share(function: Callable[[T], None], tasks: Sequence[T], threads: int) -> None:
    """The calling thread and `threads` - 1 others take one task after the other; the first error ends all."""
    shared, errors = iter(tasks), list[BaseException]()

    def work() -> None:
        try:
            for task in shared:  # an iterator over a list gives each element to one thread
                if errors:
                    return
                function(task)
        except BaseException as error:
            errors.append(error)

    others = []
    with contextlib.suppress(RuntimeError):  # an interpreter that ends starts no thread
        for _ in range(min(threads, len(tasks)) - 1):
            others.append(_workers().submit(copy_context().run, work))
    work()
    for other in others:
        if not other.cancel():
            other.result()
    if errors:
        raise errors[0]


@functools.cache
def _workers() -> ThreadPoolExecutor:
    """Threads that wait for work, as those of a BLAS do: to start one takes longer than many a call.

    There are as many as were needed at once.
    """
    from concurrent.futures import ThreadPoolExecutor  # brings logging along

    return ThreadPoolExecutor(1024, thread_name_prefix="sdpa_xp")


class _Blas:
    """NumPy's BLAS, held to one thread while some call computes; the last one to end gives them back."""

    def __init__(self) -> None:
        self.lock, self.calls, self.had = threading.Lock(), 0, list[tuple[Any, int]]()

    @contextlib.contextmanager
    def in_one_thread(self) -> Iterator[int]:
        """Gives the number of threads that it had, and gives them back, whatever happens."""
        with self.lock:
            if not self.calls:
                self.had = [(library, library.num_threads) for library in _blas()]
                for library, _ in self.had:
                    _set_threads(library, 1)
            self.calls += 1
            found = max((count for _, count in self.had), default=_cores())
        try:
            yield found
        finally:
            with self.lock:
                self.calls -= 1
                if not self.calls:
                    self.give_back()

    def give_back(self) -> None:
        for library, count in self.had:
            _set_threads(library, count)


def _set_threads(library: Any, count: int) -> None:
    """For the whole process, as OpenBLAS does it; threadpoolctl 3.8 lets no thread but the first one."""
    getattr(library, "_real_set_num_threads", library.set_num_threads)(count)


_BLAS = _Blas()


def _begin_anew() -> None:
    """In a process that was forked, which has none of the threads, and locks that no one will release."""
    global _FREE, _BLAS
    if _BLAS.calls:
        _BLAS.give_back()
    _FREE, _BLAS = threading.Lock(), _Blas()
    _workers.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


@functools.cache
def _blas() -> tuple[Any, ...]:
    """The BLAS libraries of this process; asked for when NumPy is in use, so NumPy's is among them."""
    from threadpoolctl import ThreadpoolController

    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
