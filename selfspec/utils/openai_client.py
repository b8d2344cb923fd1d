"""Servers of the OpenAI kind (vLLM, SGLang, llama.cpp, TGI): requests shared among them, tried again where that can
help."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from selfspec.utils.errors import one_line, visible
from selfspec.utils.files import Figures

KEY = "OPENAI_API_KEY"  # of the environment; it is sent, and written nowhere
_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}  # statuses after which the same request may succeed
_FIRST, _LONGEST = 0.5, 30.0  # seconds of pauses between tries
_TRIES = 5  # of a request at which a server fails, while it answers others
_ANSWER = 3600.0  # seconds that one answer may take


class Refused(ValueError):
    """A request that the server does not take; others may be."""


def server_urls(key: str, urls: object) -> tuple[str, ...]:
    """Addresses of servers, one or a list, without `/v1` at the end. Raises ValueError, naming `key`, for what is no
    address, or holds a key, which would be written beside the results."""
    listed = [urls] if isinstance(urls, str) else list(urls) if isinstance(urls, (list, tuple)) else []
    found = []
    for url in listed:
        parts = urlsplit(str(url))
        if parts.username or parts.password or parts.query or parts.fragment:
            where = f"{parts.scheme}://{parts.hostname}"
            raise ValueError(f"{key}: the address of {where} holds more than host, port and path; give a key as {KEY}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{key}={url!r} is no address, such as http://localhost:8000")
        found.append(str(url).rstrip("/").removesuffix("/v1"))
    if not found:
        raise ValueError(f"{key}={urls!r} names no server; give an address, such as http://localhost:8000, or a list")
    return tuple(dict.fromkeys(found))


class Servers:
    """Servers of one model. model: the name it is served by (None: the only one there); patience: seconds in which no
    server has answered, after which a request is given up. Used by many threads at once."""

    def __init__(self, urls: tuple[str, ...], model: str | None = None, patience: float = 120.0) -> None:
        import httpx

        logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every request
        self.urls, self.patience = urls, patience
        key = os.environ.get(KEY, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ValueError(f"the environment's {KEY} holds characters that no key has; set it anew")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(_ANSWER, connect=10.0), limits=limits)
        self._turn, self._lock = itertools.count(), threading.Lock()
        self._busy, self._down = dict.fromkeys(urls, 0), dict.fromkeys(urls, 0.0)
        self._answered, self.closed = 0.0, False
        self.model = self._served(model)

    def _served(self, model: str | None) -> str:
        """The model's name there. Raises ConnectionError where a server does not answer, ValueError where it serves
        other models."""
        for url in self.urls:
            listed = self._asked(url, "GET", "/v1/models", None)
            names = [
                str(entry["id"]) for entry in listed.get("data") or [] if isinstance(entry, dict) and "id" in entry
            ]
            if model is None and len(names) != 1:
                raise ValueError(
                    f"{url} serves {visible(', '.join(names)) or 'no model'}; name one by data.model, or serve just one"
                )
            model = names[0] if model is None else model
            if model not in names:
                raise ValueError(f"{url} serves {visible(', '.join(names)) or 'no model'}, not {model!r}")
        assert model is not None
        return model

    def _asked(self, url: str, method: str, path: str, body: Figures | None) -> Figures:
        """One try. Raises ConnectionError where another may succeed, Refused where it can not."""
        import httpx

        try:
            answer = self._client.request(method, url + path, json=body)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise ConnectionError(f"{url} does not answer: {one_line(error) or type(error).__name__}") from error
        if answer.status_code != 200:
            said = visible(" ".join(answer.text.split()))[:300]
            if answer.status_code in _AGAIN:
                raise ConnectionError(f"{url}{path}: status {answer.status_code}: {said}")
            raise Refused(f"{url}{path}: status {answer.status_code}: {said}")
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Refused(f"{url}{path}: the answer is no JSON object: {visible(answer.text)[:200]!r}")
        return found

    def post(self, path: str, body: Figures) -> Figures:
        """What a server answers, tried again with growing pauses, each time at the least busy one of those that have
        not just failed. Raises Refused; ConnectionError where none has answered for `patience` seconds; ValueError
        where another model answers."""
        pause, failed, last, tries = _FIRST, 0.0, 0.0, 0
        while True:
            with self._lock:
                up = [url for url in self.urls if self._down[url] < time.monotonic()] or list(self.urls)
                at, turn = min(self._busy[url] for url in up), next(self._turn)
                free = [url for url in up if self._busy[url] == at]
                url = free[turn % len(free)]
                self._busy[url] += 1
            try:
                answer = self._asked(url, "POST", path, {"model": self.model, **body})
                self._answered = time.monotonic()
            except ConnectionError as error:
                own, before, last = "status 500" in str(error), last, time.monotonic()
                failed, tries = failed or last, tries + 1
                late = last - max(failed, self._answered) > self.patience
                if own and not self.closed and (late or (tries >= _TRIES and self._answered > before > 0)):
                    raise Refused(str(error)) from error  # the server is there, and fails at this request
                self._down[url] = last + pause
                if self.closed or late:
                    raise
                time.sleep(0.0 if min(self._down.values()) < time.monotonic() else pause)
                pause = min(2 * pause, _LONGEST)
                continue
            finally:
                with self._lock:
                    self._busy[url] -= 1
            if (named := answer.get("model", self.model)) != self.model:
                raise ValueError(f"{url} answers as {visible(str(named))!r}, not as {self.model!r}, which was asked")
            return answer

    def metrics(self, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
        """Prometheus counters of the first server that begin with one of these names: their values by their labels."""
        import httpx

        url = self.urls[0]
        try:
            text = self._client.get(url + "/metrics").raise_for_status().text
        except httpx.HTTPError as error:
            raise ConnectionError(f"{url}/metrics gives no counters: {one_line(error)}") from error
        found = dict[str, dict[str, float]]()
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            name, _, labels = head.partition("{")
            if name.startswith(names) and not line.startswith("#"):
                found.setdefault(name, {})[labels.rstrip("}")] = float(value)
        return found


def first_choice(answer: Figures) -> dict[str, Any]:
    """What was written. Raises Refused for an answer without it."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Refused(f"the server's answer holds no choices: {str(answer)[:200]}")
    return choices[0]
