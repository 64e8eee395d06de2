"""Tasks in threads, with BLAS held to one thread in each of them.

Matrix products and elementwise functions let other threads of the interpreter run. A BLAS that takes all cores
for each product of two tiles would wait for its own threads most of the time, and write its results through
memory. A thread that has a core to itself keeps its tile in that core's cache.

An exception may reach the calling thread at any moment (Ctrl-C): a signal handler may raise one in the main
thread after any bytecode, also inside a `finally`. Two facts hold nevertheless: a `with` statement on a lock is
entered and left without a chance for a handler in between, and handlers never run in other threads. So each
call holds its own lock while it computes. Other threads look at it, and stop at their next task when it is
released. A watching thread waits for it. If the call could not give the BLAS back itself, the watching thread
does.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

from .._tiles.plan import asked_threads
from ..errors import PACKAGE

T = TypeVar("T")


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

    def _watch(self, call: threading.Lock) -> None:
        """Have the watching thread wait for the end of `call`."""
        if not self.watching:
            with contextlib.suppress(RuntimeError):  # an interpreter that is shutting down starts no thread
                _thread.start_new_thread(self._keep_watch, ())
                self.watching = True
        self.watched.put(call)

    def _keep_watch(self) -> None:
        """For each watched call, restore the BLAS threads if the call could not do so itself."""
        while True:
            call = self.watched.get()
            with call:  # waits for the end of the call
                pass
            self.give_back(call)

    def hold(self, call: threading.Lock) -> None:
        """Hold the BLAS to one thread until `call` is released; the caller must be inside `with call`."""
        self._watch(call)
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
        """End the hold of `call`, if it has not ended; the last one restores the threads."""
        with self.lock:
            if call in self.calls:
                self.calls.remove(call)
            if not self.calls:
                self.is_held = False
                self.set_threads_before()
                self.threads_before = []

    def set_threads_before(self) -> None:
        for library, count in self.threads_before:
            _set_threads(library, count)


_BLAS = _Blas()


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
    controller = _controller()
    return () if controller is None else tuple(controller().select(user_api="blas").lib_controllers)


@functools.cache
def _controller() -> Any:
    """Return the class of threadpoolctl, or None: a copy of this package may do without it."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        text = "without threadpoolctl the BLAS keeps its threads, and a call starts none beside them"
        warnings.warn(f"{PACKAGE}: {text}. Run: pip install threadpoolctl", RuntimeWarning, stacklevel=2)
        return None
    return ThreadpoolController


class _Helper:
    """Work that another thread is asked to do, once."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.begun, self.ended = threading.Lock(), threading.Lock()
        self.ended.acquire()

    def run(self) -> None:
        """Do the work, unless it was called off."""
        if self.begun.acquire(blocking=False):
            try:
                self.work()
            finally:
                self.ended.release()

    def wait(self) -> None:
        """Call the work off; if it has begun, wait for its end."""
        if not self.begun.acquire(blocking=False):
            self.ended.acquire()


class _Pool:
    """Threads that wait for work, like those of a BLAS: many calls are shorter than the start of a thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may attend while a call holds it
        self.owner: threading.Lock | None = None
        """The lock of the call that has the threads; a call that was interrupted may have left its lock."""
        self.helpers = SimpleQueue[_Helper]()
        self.count = 0

    def claim(self, call: threading.Lock) -> bool:
        """Give the threads to `call` if no other call has them."""
        with self.lock:
            if self.owner is not None and self.owner.locked():
                return False
            self.owner = call
            return True

    def release(self, call: threading.Lock) -> None:
        """Take the threads back from `call` if it has them."""
        with self.lock:
            if self.owner is call:
                self.owner = None

    def start(self, helpers: Sequence[_Helper]) -> None:
        """Have each of `helpers` run in a thread."""
        with contextlib.suppress(RuntimeError):  # an interpreter that is shutting down starts no thread
            while self.count < len(helpers):
                _thread.start_new_thread(self.serve, ())
                self.count += 1
        for helper in helpers:
            self.helpers.put(helper)

    def serve(self) -> None:
        """Run one helper after the other, as long as the process lives."""
        while True:
            self.helpers.get().run()


_POOL = _Pool()


def run_tasks(function: Callable[[T], object], tasks: Iterable[T], threads: int | None) -> None:
    """Call `function` with each task, in `threads` threads. None is `thread_count()`.

    The BLAS is held to one thread meanwhile. Only one call at a time has threads: a call that comes meanwhile,
    from another thread or from inside a task, runs in the thread that made it.
    """
    tasks = list(tasks)
    if threads == 1:
        for task in tasks:
            function(task)
        return
    call = threading.Lock()
    try:
        with call:
            _BLAS.hold(call)
            _share(function, tasks, (threads or thread_count()) if _POOL.claim(call) else 1, call)
            _POOL.release(call)
    finally:
        _BLAS.give_back(call)


@contextlib.contextmanager
def one_blas_thread(uses_blas: bool) -> Iterator[None]:
    """Hold the BLAS to one thread, for a task of a scheduler that runs other tasks at the same time."""
    if not uses_blas:
        yield
        return
    call = threading.Lock()
    try:
        with call:
            _BLAS.hold(call)
            yield
    finally:
        _BLAS.give_back(call)


def thread_count() -> int:
    """Return how many threads a call would use: what the environment asks for, or what the BLAS has.

    While a call holds the BLAS, that is what it had before.
    """
    if (threads := asked_threads()) is not None:
        return threads
    counts = _BLAS.threads_before or _threads_now()
    if counts:
        return max(count for _, count in counts)
    if _controller() is None:
        return 1
    # No BLAS that threadpoolctl knows, such as Accelerate: the cores that this process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _share(function: Callable[[T], object], tasks: Sequence[T], threads: int, call: threading.Lock) -> None:
    """Let `threads` threads, the caller's among them, take one task after the other; an error ends all."""
    remaining, errors = iter(tasks), list[BaseException]()

    def work() -> None:
        try:
            for task in remaining:  # an iterator over a list gives each element to one thread
                if errors or not call.locked():
                    return
                function(task)
        except BaseException as error:
            errors.append(error)
            raise

    def help_out(context: Context) -> None:
        with contextlib.suppress(BaseException):  # the calling thread raises it
            context.run(work)

    others = min(threads, len(tasks)) - 1
    helpers = [_Helper(functools.partial(help_out, copy_context())) for _ in range(others)]
    _POOL.start(helpers)
    try:
        work()
    finally:
        for helper in helpers:
            helper.wait()
    if errors:
        raise errors[0]


def _after_fork() -> None:
    """Restore the BLAS in a forked process, and make a new pool.

    Neither the parent's calls nor its threads exist there, and no one releases its locks.
    """
    global _BLAS, _POOL
    _BLAS.set_threads_before()
    _BLAS, _POOL = _Blas(), _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
