"""Hidden states that a vLLM server hands out while training goes on."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from selfspec.core.target import Target
from selfspec.data.packing import Packed
from selfspec.training.hidden import HiddenStates
from selfspec.training.states import ABOUT, States, documents_of, key_of
from selfspec.utils.files import read_json
from selfspec.utils.openai_client import Refused, Servers, first_choice

SERVER = "server"  # the value of train.states that asks one
_AT_ONCE = 16  # requests that a server has at a time
_AHEAD = 64  # steps that are asked for in advance, at most
_AGAIN = 3  # requests for states whose file a server did not write


class FromServer(States):
    """States that a vLLM writes for every prompt (its method extract_hidden_states), each file deleted when it is read.

    waited, began: seconds that the trainer has waited for them, and when it first asked.
    """

    def __init__(
        self, target: Target, reads: Sequence[int], servers: Servers, layers: Sequence[int] | None, gigabytes: float
    ) -> None:
        """gigabytes: of states that are asked for in advance, at most."""
        super().__init__(target, reads, layers)
        self.servers, self.most, self.held = servers, int(gigabytes * 1e9), 0
        self.waited, self.began = 0.0, 0.0
        self.at_once = _AT_ONCE * len(servers.urls)
        self._pool = ThreadPoolExecutor(self.at_once, thread_name_prefix="states")
        self._coming: dict[bytes, Future[Tensor]] = {}
        self._here: dict[bytes, Tensor] = {}  # of the step that is running
        self._layers_known = False

    def _bytes(self, tokens: Tensor) -> int:
        return len(tokens) * len(self.layers) * self.target.hidden_size * self.target.dtype.itemsize

    def ask(self, tokens: Tensor) -> bool:
        """Ask for a document in advance. Returns whether there was room."""
        if (key := key_of(tokens)) in self._coming or key in self._here:
            return True
        if self.held and self.held + self._bytes(tokens) > self.most:
            return False
        self.held += self._bytes(tokens)
        self._coming[key] = self._pool.submit(self._fetched, tokens)
        return True

    def wait(self, documents: Sequence[Tensor]) -> None:
        """Have the states of a step here, and no others of steps before. Raises ConnectionError where the server is
        gone, with all that was asked for left as it is."""
        self.began = self.began or time.perf_counter()
        wanted, start = {key_of(tokens): tokens for tokens in documents}, time.perf_counter()
        self._here = {key: states for key, states in self._here.items() if key in wanted}
        for key, tokens in wanted.items():
            if key in self._here:
                continue
            coming = self._coming.pop(key, None)
            if coming is not None:
                self.held -= self._bytes(tokens)
            self._here[key] = (coming or self._pool.submit(self._fetched, tokens)).result()
        self.waited += time.perf_counter() - start

    def forget(self, documents: Iterable[Tensor]) -> None:
        """Of documents that were asked for, and are kept elsewhere by now."""
        for tokens in documents:
            if (coming := self._coming.pop(key_of(tokens), None)) is not None:
                coming.cancel()
                self.held -= self._bytes(tokens)

    def of(self, tokens: Tensor) -> Tensor:
        """Raises ConnectionError where the server is gone."""
        if (states := self._here.get(key_of(tokens))) is not None:
            return states
        return self._fetched(tokens)  # of validation, at once

    @property
    def summary(self) -> str:
        """Which of the two waits for the other."""
        share = self.waited / max(1e-9, time.perf_counter() - self.began) if self.began else 0.0
        slower = "the server is slower than the trainer" if share > 0.1 else "the trainer is slower than the server"
        return f"the trainer waited {share:.0%} of the time for hidden states: {slower}"

    def _fetched(self, tokens: Tensor) -> Tensor:
        path, states = self.recorded(tokens)
        for done in (path, path.with_name(path.name + ".lock")):
            done.unlink(missing_ok=True)
        return self.check(states, tokens, str(path))

    def recorded(self, tokens: Tensor) -> tuple[Path, Tensor]:
        """The file that the server has written for a document, and its states."""
        body = {"prompt": tokens.tolist(), "max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
        for attempt in range(_AGAIN):
            try:
                answer = self.servers.post("/v1/completions", body)
            except Refused as error:
                raise Refused(f"a text of {len(tokens)} tokens: {error}; is train.length too long for it?") from error
            transfer = answer.get("kv_transfer_params")
            if not isinstance(transfer, dict) or "hidden_states_path" not in transfer:
                raise ValueError(
                    f"{self.servers.urls[0]} hands out no hidden states; start it by selfspec serve-target"
                )
            path, read = Path(str(transfer["hidden_states_path"])), first_choice(answer).get("prompt_token_ids")
            if read is not None and read != tokens.tolist():
                raise ValueError(
                    f"{self.servers.urls[0]} has read other tokens than it was given: another model's server"
                )
            try:
                lock = path.with_name(path.name + ".lock")
                with lock.open() if lock.exists() or not path.exists() else nullcontext() as held:
                    if held is not None:
                        fcntl.flock(held, fcntl.LOCK_SH)  # until the server has written
                    with safe_open(path, "pt") as file:
                        ids, states = file.get_tensor("token_ids").long(), file.get_tensor("hidden_states")
                if not torch.equal(ids, tokens):
                    raise ValueError(f"{path}: the states are of other tokens than were asked for")
                self._check_layers(path.parent / ABOUT)
                return path, states
            except SafetensorError as error:  # it died while it wrote
                if attempt == _AGAIN - 1:
                    raise ConnectionError(f"{path} is no whole file of states ({error})") from error
                time.sleep(1.0)
            except FileNotFoundError:  # it died before it wrote, and came back
                if attempt == _AGAIN - 1:
                    raise ValueError(
                        f"{path} is not here, where the server says it wrote hidden states; its folder has to be on a "
                        "disk that this machine shares with it"
                    ) from None
                time.sleep(1.0)
        raise AssertionError

    def _check_layers(self, about: Path) -> None:
        """Raises ValueError where the server was started for other layers than this drafter reads."""
        if self._layers_known or not about.is_file():
            return
        theirs = read_json(about).get("layers")
        if theirs != self.layers:
            raise ValueError(
                f"the server hands out layers {theirs} (0 is the embeddings; {about}), but layers {self.layers} are "
                "asked for; start it for this drafter (selfspec serve-target --drafter, --layers)"
            )
        self._layers_known = True

    def close(self) -> None:
        """Nothing more is asked for."""
        self.servers.closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)


class Ahead:
    """Batches whose states are asked for some steps before they are read, but for those that are kept."""

    def __init__(self, batches: Packed, states: FromServer, steps: int, kept: HiddenStates | None) -> None:
        """steps: of the whole run."""
        self.batches, self.states, self.steps, self.kept, self.asked = batches, states, steps, kept, -1

    def __call__(self, step: int) -> dict[str, Tensor]:
        return self.batches.batch(step)

    def prepare(self, step: int) -> None:
        """Have the states of a step here. Raises ConnectionError where the server is gone."""
        for ahead in range(max(step, self.asked), min(step + _AHEAD, self.steps)):
            if not all(map(self.states.ask, self._documents(ahead))):
                break  # this step is asked for again when there is room
            self.asked = ahead + 1
        self.states.wait(self._documents(step))
        self.states.forget(piece for _, _, piece in documents_of(self.batches.batch(step)))

    def _documents(self, step: int) -> list[Tensor]:
        """Whose states a step asks the server for."""
        if self.kept is not None and self.kept.holds(self.batches.numbers(step)):
            return []
        return [piece for _, _, piece in documents_of(self.batches.batch(step))]
