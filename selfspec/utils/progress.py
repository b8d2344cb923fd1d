"""Progress bars: in a terminal or a notebook as usual, elsewhere a line per interval."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm as _auto
from tqdm.std import tqdm as _terminal

_SECONDS = 30.0  # between lines where nobody watches


class _Lines(_terminal):
    """A bar for logs: it draws nothing over itself."""

    disable: bool

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings |= {"mininterval": _SECONDS, "maxinterval": _SECONDS, "delay": _SECONDS}  # short work says nothing
        form = "{desc}: {n_fmt}/{total_fmt} {elapsed}<{remaining} {rate_fmt}{postfix}"
        super().__init__(*args, bar_format=form, **settings)

    @staticmethod
    def status_printer(file: Any) -> Any:
        return lambda text: print(text.strip(), file=file, flush=True) if text.strip() else None

    def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **settings: Any) -> None:
        super().set_postfix(ordered_dict, refresh=False, **settings)

    def clear(self, *args: Any, **settings: Any) -> None:
        pass

    def close(self) -> None:
        if not self.disable:
            if self.leave:
                self.refresh()
            self.disable = True
            self._decr_instances(self)

    @classmethod
    def write(cls, s: str, file: Any = None, end: str = "\n", nolock: bool = False) -> None:
        print(s, file=file or sys.stdout, end=end, flush=True)


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")  # a terminal's shell has none


def progress(*args: Any, **settings: Any) -> Any:
    """tqdm's bar, over an iterable or with `total`. Where stderr is no terminal it writes one line each half minute."""
    if _in_notebook() or sys.stderr.isatty():
        return _auto(*args, **{"mininterval": 1.0, **settings})
    return _Lines(*args, **settings)
