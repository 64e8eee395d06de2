"""The BLAS, held to one thread while a call computes, and given back whatever interrupts the call.

A signal handler may raise an exception in the main thread after any bytecode, also inside a `finally`. Two
facts hold nevertheless: a `with` statement on a lock is entered and left without a chance for a handler in
between, and handlers never run in other threads. So each call holds its own lock while it computes, and a
watching thread waits for that lock. If the call could not give the BLAS back itself, the watching thread does.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import threading
from queue import SimpleQueue
from typing import Any


class _Blas:
    """The BLAS of this process, and the calls that hold it now."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may attend while a call holds it
        self.calls: list[threading.Lock] = []
        self.threads_before: list[tuple[Any, int]] = []
        """Each library with its number of threads before the first of `calls`; empty if there is no call."""
        self.is_held = False
        self.watched = SimpleQueue[threading.Lock]()
        self.watching = False

    def watch(self, call: threading.Lock) -> None:
        """Have the watching thread wait for the end of `call`."""
        if not self.watching:
            with contextlib.suppress(RuntimeError):  # an interpreter that is shutting down starts no thread
                _thread.start_new_thread(self.keep_watch, ())
                self.watching = True
        self.watched.put(call)

    def keep_watch(self) -> None:
        """For each watched call, restore the BLAS threads if the call could not do so itself."""
        while True:
            call = self.watched.get()
            with call:  # waits for the end of the call
                pass
            self.give_back(call)

    def hold(self, call: threading.Lock) -> None:
        with self.lock:
            self.calls.append(call)
            before = _threads_now()
            # It is read after the counts: a signal handler's call may have set it meanwhile.
            if not self.threads_before:
                self.threads_before = before
            if not self.is_held:  # do not infer it from `calls`: the loop below may have been interrupted
                for library, _ in self.threads_before:
                    _set_threads(library, 1)
                self.is_held = True

    def give_back(self, call: threading.Lock) -> None:
        """End the hold of `call`; nothing happens if it has ended before."""
        with self.lock:
            if call in self.calls:
                self.calls.remove(call)
            if not self.calls:
                self.is_held = False
                self.restore()
                self.threads_before = []

    def restore(self) -> None:
        for library, count in self.threads_before:
            _set_threads(library, count)


_BLAS = _Blas()


def hold(call: threading.Lock) -> None:
    """Hold the BLAS to one thread until `call` is released; the caller must be inside `with call`."""
    _BLAS.watch(call)
    _BLAS.hold(call)


def give_back(call: threading.Lock) -> None:
    """Give the BLAS the threads that it had, unless another call still holds it."""
    _BLAS.give_back(call)


def thread_count() -> int:
    """Return the number of threads that the BLAS has, or had before it was held."""
    counts = _BLAS.threads_before or _threads_now()
    return max((count for _, count in counts), default=usable_cores())


def _threads_now() -> list[tuple[Any, int]]:
    """Return each library with its number of threads.

    This is no comprehension inside of `hold`: since Python 3.12 a comprehension is inlined, and if a trace
    function raises an exception in one, the `with` statement around it does not release the lock.
    """
    return [(library, library.num_threads) for library in _libraries()]


def _set_threads(library: Any, count: int) -> None:
    """Set the threads of the process, as OpenBLAS does; threadpoolctl 3.8 lets only the first thread do so."""
    getattr(library, "_real_set_num_threads", library.set_num_threads)(count)


@functools.cache
def _libraries() -> tuple[Any, ...]:
    """Find the BLAS libraries of this process; the one that computes the call has been loaded by now."""
    from threadpoolctl import ThreadpoolController

    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)


def _after_fork() -> None:
    """Restore the BLAS in a forked process: the parent's calls and its watching thread do not exist there."""
    global _BLAS
    _BLAS.restore()
    _BLAS = _Blas()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
