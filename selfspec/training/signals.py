"""SIGTERM and Ctrl-C during a training: noted, so that it can save."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupted(BaseException):
    """A signal came while nothing would be left half done."""


class Signals:
    """SIGTERM and SIGINT (Ctrl-C) that came while this context was open; `caught` holds them. A second Ctrl-C ends the
    process at once; a second SIGTERM does not, since launchers repeat what came to all processes. With `at_once` they
    raise Interrupted. Outside the main thread Python can not set handlers, and signals keep their effect."""

    def __init__(self) -> None:
        self.caught: list[int] = []
        self.at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.caught:
            if number == signal.SIGINT == self.caught[0]:
                raise SystemExit(128 + number)
            return
        self.caught.append(number)
        if self.at_once:
            raise Interrupted
