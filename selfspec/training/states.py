"""Hidden states of a target that runs elsewhere: asked of a vLLM server while training goes on, or read from folders
that one has written. A document's states are found by its tokens."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from selfspec.core.passes import Pass
from selfspec.core.target import Target
from selfspec.data.store import Corpus, in_a_row
from selfspec.data.windows import Packed
from selfspec.drafters.parts.losses import drafted_logits
from selfspec.utils.files import read_json, write_text
from selfspec.utils.openai_client import Servers, first_choice
from selfspec.utils.progress import progress

ABOUT = "states.json"  # in a folder of states: which layers its files hold
ROWS = "rows.safetensors"  # in a folder that train.cache=disk has kept: the tokens of its rows
SERVER = "server"  # the value of train.states that asks one
_AT_ONCE = 16  # requests that a server has at a time
_AHEAD = 64  # steps that are asked for in advance, at most
_HELD_OUT = 0.05  # of the documents of a folder that has none to validate
_PIECE = 1024  # tokens whose logits are held at once
_AGAIN = 3  # requests for states whose file a server did not write


def wanted_layers(reads: Sequence[int], n_layers: int) -> list[int]:
    """The layers that a server has to hand out, in its own counting (0 the embeddings, l the output of layer l - 1):
    those that a drafter reads, and the last."""
    return sorted({layer + 1 for layer in (*reads, n_layers - 1)})


class States(ABC):
    """Hidden states by documents. layers: what the columns of a record are, in a server's counting (see
    `wanted_layers`)."""

    def __init__(self, target: Target, reads: Sequence[int], layers: Sequence[int] | None) -> None:
        """Raises ValueError where a layer is missing that is needed."""
        self.target, needed = target, wanted_layers(reads, target.n_layers)
        self.layers = list(needed if layers is None else layers)
        if missing := sorted(set(needed) - set(self.layers)):
            raise ValueError(
                f"the states are of layers {self.layers}, but this drafter reads {needed} (0 is the embeddings, "
                f"{target.n_layers} the last layer): {missing} are missing; record them anew (selfspec serve-target)"
            )
        self.columns = {layer - 1: self.layers.index(layer) for layer in needed}

    @abstractmethod
    def of(self, tokens: Tensor) -> Tensor:
        """States [n, layers, H] of one document, int64 [n]. Raises ValueError where there are none."""

    def features(self, batch: dict[str, Tensor]) -> dict[int, Tensor]:
        """Outputs [B, S, H] of layers on a batch (see `DraftLoss`), zero where rows are filled up."""
        tokens = batch["tokens"]
        like = torch.zeros((), device=tokens.device, dtype=self.target.dtype)
        out = {i: like.new_zeros(*tokens.shape, self.target.hidden_size) for i in self.columns}
        for row, start, piece in documents_of(batch):
            states = self.of(piece)
            for layer, column in self.columns.items():
                out[layer][row, start : start + len(piece)] = states[:, column].to(like)
        return out

    def check(self, states: Tensor, tokens: Tensor, where: str) -> Tensor:
        """States as they came. Raises ValueError, with `where`, for those of another target, layers, or no numbers."""
        wanted = len(tokens), len(self.layers), self.target.hidden_size
        if states.shape != wanted:
            raise ValueError(
                f"{where}: states are {list(states.shape)} (tokens, layers, width), expected {list(wanted)} for layers "
                f"{self.layers} of {self.target.name!r}; start the server by selfspec serve-target, or say which "
                "layers were recorded: train.states_layers"
            )
        if not states.is_floating_point() or not states.isfinite().all():
            raise ValueError(f"{where}: states hold values that are no finite numbers ({states.dtype})")
        return states


def documents_of(batch: dict[str, Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """(row, start, tokens int64 [n]) of the documents in a batch."""
    for row, tokens in enumerate(batch["tokens"].cpu()):
        ids = batch["documents"][row].cpu() if "documents" in batch else torch.zeros_like(tokens)
        edges = [0, *((ids[1:] != ids[:-1]).nonzero()[:, 0] + 1).tolist(), len(ids)]
        for start, stop in itertools.pairwise(edges):
            if ids[start] >= 0:
                yield row, start, tokens[start:stop].long()


def behind_layers(target: Target, tokens: Tensor, features: dict[int, Tensor]) -> Pass:
    """The pass over whole texts of which the layers' outputs are known."""
    end = target.n_layers
    out = target.text(tokens, layers=(end, end), hidden=features[end - 1])
    return Pass(out.logits, out.hidden, features)


def drafted_behind(
    target: Target, tokens: Tensor, features: dict[int, Tensor], vocabulary: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """`drafted_logits` of a draft vocabulary, and hidden states behind the final norm, [B, S, H]: all tokens' logits
    are held for a piece of the texts at a time."""
    end, size = target.n_layers, max(1, _PIECE // len(tokens))
    few, inside, hidden = list[Tensor](), list[Tensor](), list[Tensor]()
    for piece, states in zip(tokens.split(size, 1), features[end - 1].split(size, 1), strict=True):
        out = target.text(piece, layers=(end, end), hidden=states)
        assert out.logits is not None
        for parts, part in zip((few, inside), drafted_logits(out.logits, vocabulary), strict=True):
            parts.append(part)
        hidden.append(out.hidden)
    return (torch.cat(few, 1), torch.cat(inside, 1)), torch.cat(hidden, 1)


def key_of(tokens: Tensor) -> bytes:
    return hashlib.blake2b(tokens.long().numpy().tobytes(), digest_size=16).digest()


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
            answer = self.servers.post("/v1/completions", body)
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
                with path.with_name(path.name + ".lock").open() as held:
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
    """Batches whose states are asked for some steps before they are read."""

    def __init__(self, batches: Packed, states: FromServer, steps: int) -> None:
        """steps: of the whole run."""
        self.batches, self.states, self.steps, self.asked = batches, states, steps, -1

    def __call__(self, step: int) -> dict[str, Tensor]:
        return self.batches.batch(step)

    def prepare(self, step: int) -> None:
        """Have the states of a step here. Raises ConnectionError where the server is gone."""
        for ahead in range(max(step, self.asked), min(step + _AHEAD, self.steps)):
            pieces = [piece for _, _, piece in documents_of(self.batches.batch(ahead))]
            if not all(map(self.states.ask, pieces)):
                break  # this step is asked for again when there is room
            self.asked = ahead + 1
        self.states.wait([piece for _, _, piece in documents_of(self.batches.batch(step))])


def plausible(states: States, tokens: Tensor) -> float:
    """The target's loss on a recorded text by its last layer's states, in nats a token. Raises ValueError where it is
    none that a model has of its own states."""
    target, tokens = states.target, tokens[None].to(states.target.device)
    out = behind_layers(target, tokens, states.features({"tokens": tokens}))
    assert out.logits is not None
    loss = float(torch.nn.functional.cross_entropy(out.logits[0, :-1].float(), tokens[0, 1:]))
    if tokens.shape[1] > 1 and not loss < math.log(target.vocab_size):
        raise ValueError(
            f"by its hidden states the target's loss on a text is {loss:.2f} nats a token, no better than chance: they "
            "are of another model, or not those of the last layer before the final norm"
        )
    return loss


class FromFolder(States):
    """States in safetensors files of `token_ids` [S] and `hidden_states` [S, layers, H], as vLLM's connector and
    speculators write them, in a folder and those below it, or in a folder that train.cache=disk has kept. Documents
    that rows cut are found too."""

    def __init__(
        self, target: Target, reads: Sequence[int], folder: Path, layers: Sequence[int] | None, length: int
    ) -> None:
        """length: tokens of a row. Raises ValueError for a folder without such files."""
        about = folder / ABOUT
        if layers is None and about.is_file():
            layers = [int(layer) for layer in read_json(about).get("layers", [])]
        super().__init__(target, reads, layers)
        self.places, self.unread, self.tokens = dict[bytes, tuple[Path, int]](), list[Path](), 0
        self.folder, self.first = folder, torch.zeros(0, dtype=torch.int64)
        self._kept: list[Tensor] = []
        if (folder / ROWS).is_file():
            self._read_kept(str(read_json(about)["dtype"]), length)
            return
        paths = sorted(folder.rglob("*.safetensors"))
        for path in progress(paths, desc=f"states in {folder}", unit=" files"):
            ids = _ids_of(path)
            if ids is None:
                self.unread.append(path)
                continue
            self.first = ids if not len(self.first) or len(ids) < len(self.first) else self.first
            self.tokens += len(ids)
            for start in range(0, len(ids), length):  # the last piece of a text that was recorded cut, too
                self.places[key_of(ids[start : start + length])] = path, start
        if not self.places:
            odd = f"; {len(self.unread)} files are being written, or are none of states" if self.unread else ""
            raise ValueError(
                f"train.states={folder}: no file here holds token_ids and hidden_states{odd}; have them written by the "
                "server of selfspec serve-target"
            )
        self.of(self.first[:length])

    def _read_kept(self, dtype: str, length: int) -> None:
        """The rows that train.cache=disk has kept. Raises ValueError where none is whole."""
        with safe_open(self.folder / ROWS, "pt") as file:
            batch = {name: file.get_tensor(name).long() for name in ("tokens", "documents")}
        count, size = batch["tokens"].shape
        done = torch.ones(count, dtype=torch.bool)
        for layer in self.layers:
            path = self.folder / f"layer_{layer - 1}.states"
            shape = count, size, self.target.hidden_size
            whole = torch.from_file(str(path), size=math.prod(shape), dtype=getattr(torch, dtype))
            self._kept.append(whole.view(shape))
            done &= torch.from_file(str(path.with_suffix(".done")), size=count, dtype=torch.int64) != 0
        for row, start, tokens in documents_of(batch):
            if done[row] and len(tokens) <= length:
                self.places[key_of(tokens)] = self.folder / str(row), start
                self.first = tokens if not len(self.first) or len(tokens) < len(self.first) else self.first
        if not self.places:
            raise ValueError(f"train.states={self.folder}: no row of it is whole; let the run that keeps it go on")

    @property
    def of_rows(self) -> bool:
        """Whether a training has kept them (`train.cache=disk`)."""
        return bool(self._kept)

    def knows(self, tokens: Tensor) -> bool:
        return key_of(tokens) in self.places

    def of(self, tokens: Tensor) -> Tensor:
        if (place := self.places.get(key_of(tokens))) is None:
            raise ValueError(f"{self.folder} holds no states of a text of {len(tokens)} tokens that training reads")
        path, start = place
        if self._kept:
            part = [layer[int(path.name), start : start + len(tokens)] for layer in self._kept]
            return self.check(torch.stack(part, 1), tokens, str(path))
        try:
            with safe_open(path, "pt") as file:
                states = file.get_slice("hidden_states")[start : start + len(tokens)]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} was there when training began, and is no whole file now: {error}") from error
        return self.check(states, tokens, str(path))

    def covered(self, corpus: Corpus, length: int, name: str) -> Corpus:
        """The documents whose states are here. Raises ValueError where these are none."""
        documents = [corpus.document(i) for i in range(len(corpus.is_chat))]
        kept, chats, cut = list[tuple[Tensor, Tensor]](), list[int](), 0
        for i, one in enumerate(documents):
            known = 0
            for piece in one.tokens.split(length):
                if not self.knows(piece):
                    break
                known += len(piece)
            if known:
                kept.append((one.tokens[:known], one.mask[:known]))
                chats.append(i)
                cut += known < len(one.tokens)
        if not kept:
            raise ValueError(
                f"{self.folder} holds states of none of the {len(documents)} {name} documents; they are of other "
                f"texts, of another tokenizer, or were cut at another length than train.length={length}"
            )
        if len(kept) < len(documents) or cut:
            shorter = f", {cut} of them cut where their states end" if cut else ""
            print(
                f"states of {len(kept)} of {len(documents)} {name} documents are there{shorter}; the rest is left out"
            )
        return in_a_row(kept, corpus.is_chat[chats])

    def held_out(self, corpus: Corpus) -> tuple[Corpus, Corpus]:
        """Training and validation texts out of those of a folder that `train.cache=disk` keeps, which holds the rows
        that train alone. Raises ValueError for a single document."""
        count = len(corpus.is_chat)
        if count < 2:
            raise ValueError(f"{self.folder} holds states of one document; one must train and another validate")
        chosen = torch.zeros(count, dtype=torch.bool)
        chosen[:: max(2, round(1 / _HELD_OUT))] = True
        print(f"states of validation texts are not kept there: {int(chosen.sum())} of {count} documents validate")
        texts = [(one.tokens, one.mask) for one in map(corpus.document, range(count))]
        sides = [[texts[i] for i in at.nonzero()[:, 0].tolist()] for at in (~chosen, chosen)]
        return in_a_row(sides[0], corpus.is_chat[~chosen]), in_a_row(sides[1], corpus.is_chat[chosen])


def _ids_of(path: Path) -> Tensor | None:
    """The tokens of a file of states, int64 [S]; None for one that is being written, or is no such file."""
    lock = path.with_name(path.name + ".lock")
    with suppress(OSError, SafetensorError, KeyError, ValueError):
        if lock.is_file():
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with safe_open(path, "pt") as file:
            ids = file.get_tensor("token_ids")
            if ids.ndim == 1 and len(ids) and file.get_slice("hidden_states").get_shape()[0] == len(ids):
                return ids.long()
    return None


def write_about(folder: Path, layers: Sequence[int], model: str, dtype: str | None = None) -> None:
    """Say in a folder which layers its files will hold; dtype: of files that do not say it themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"layers": list(layers), "model": model} | ({} if dtype is None else {"dtype": dtype})
    write_text(folder / ABOUT, json.dumps(about) + "\n")
