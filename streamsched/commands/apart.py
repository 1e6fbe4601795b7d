"""Calls in processes of their own that end with this one, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from streamsched.errors import UserError

_T = TypeVar("_T")
_R = TypeVar("_R")
_LOOK_S = 0.5


def map_apart(function: Callable[[_T], _R], items: Sequence[_T], processes: int) -> list[_R]:
    """`function` of each item, in their order, in fresh processes. What it raises is raised here.

    Raises UserError where a process was killed.
    """
    pool = ProcessPoolExecutor(
        min(len(items), processes), multiprocessing.get_context("spawn"), _end_with, (os.getpid(),)
    )
    try:
        found = list(pool.map(function, items))
    except BrokenProcessPool:
        _stop(pool)
        raise UserError("a process was killed before it was done: out of memory? try fewer --processes") from None
    except BaseException:
        _stop(pool)
        raise
    pool.shutdown()
    return found


def _stop(pool: ProcessPoolExecutor) -> None:
    """At once: what runs is not waited for."""
    for child in multiprocessing.active_children():
        child.kill()
    pool.shutdown(wait=False, cancel_futures=True)


def _end_with(parent: int) -> None:
    """In a child: an interrupt ends it, and so does the end of its parent, which may have had no time to say so."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
