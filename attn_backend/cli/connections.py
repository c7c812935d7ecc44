"""Cancelling HTTP requests that other threads wait for."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from weakref import WeakSet


class Connections:
    """The sockets of requests.

    `cancel()` makes the requests in flight fail at once, and those that are sent later.
    """

    def __init__(self) -> None:
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._lock = threading.RLock()  # reentrant: a signal handler, which may interrupt add(), cancels
        self._is_cancelled = False

    def add(self, connected: socket.socket) -> None:
        with self._lock:
            self._sockets.add(connected)
            if self._is_cancelled:
                _hang_up(connected)

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            for connected in list(self._sockets):
                _hang_up(connected)


def _hang_up(connected: socket.socket) -> None:
    with suppress(OSError):  # closed already
        connected.shutdown(socket.SHUT_RDWR)  # unlike close(), this wakes a thread that reads
