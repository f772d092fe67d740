"""Notices at once when processes of this host are gone, however they end: the first one is the reason of the others."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

_WAIT_S = 1.0


class Gone:
    """times: process id -> Unix time at which it was gone. Linux only; elsewhere it stays empty. Never raises."""

    def __init__(self) -> None:
        self.times: dict[int, float] = {}
        self._watched: dict[int, int] = {}
        self._epoll: select.epoll | None = None
        self._closed = False

    def watch(self, pid: int) -> None:
        """Notice the end of this process."""
        with contextlib.suppress(OSError, AttributeError, RuntimeError):
            handle = os.pidfd_open(pid)
            if self._epoll is None:
                self._epoll = select.epoll()
                threading.Thread(target=self._wait, name="ndd-gone", daemon=True).start()
            self._watched[handle] = pid
            self._epoll.register(handle, select.EPOLLIN)

    def close(self) -> None:
        """End the thread."""
        self._closed = True

    def _wait(self) -> None:
        epoll = self._epoll
        assert epoll is not None
        while not self._closed:
            with contextlib.suppress(OSError):
                for handle, _ in epoll.poll(_WAIT_S):
                    self.times[self._watched.pop(handle)] = time.time()
                    epoll.unregister(handle)
                    os.close(handle)
        epoll.close()
        for handle in self._watched:
            os.close(handle)
