"""Hidden states read from folders of safetensors files."""

from __future__ import annotations

import fcntl
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from selfspec.core.target import Target
from selfspec.data.packing import parts_of
from selfspec.data.store import Corpus, in_a_row
from selfspec.training.hidden import row_hash
from selfspec.training.states import ABOUT, ROWS, States, documents_of, key_of
from selfspec.utils.files import read_json
from selfspec.utils.progress import progress

_HELD_OUT = 0.05  # of the documents of a folder that has none to validate


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
        if layers is None:
            print(
                f"{folder} has no {ABOUT}: it is taken to hold layers {self.layers}; train.states_layers names others"
            )
        self.places, self.unread = dict[bytes, tuple[Path, int]](), list[Path]()
        self.folder, self.first = folder, torch.zeros(0, dtype=torch.int64)
        self._kept, self._hashes, self._checked = list[Tensor](), list[Tensor](), set[int]()  # rows of each layer
        self.of_rows = (folder / ROWS).is_file()  # a training has kept them (`train.cache=disk`)
        if self.of_rows:  # of layers, some for other drafters, whose rows may be fewer
            self.layers = [layer for layer in self.layers if layer - 1 in self.columns]
            self.columns = {layer - 1: column for column, layer in enumerate(self.layers)}
            self._read_kept(str(read_json(about)["dtype"]), length)
            return
        paths, behind = sorted(folder.rglob("*.safetensors")), dict[bytes, bytes]()  # the text before each piece
        for path in progress(paths, desc=f"states in {folder}", unit=" files"):
            ids = _ids_of(path)
            if ids is None:
                self.unread.append(path)
                continue
            for start in range(0, len(ids), length):  # the last piece of a text that was recorded cut, too
                key, before = key_of(ids[start : start + length]), key_of(ids[:start])
                if behind.setdefault(key, before) != before:  # two texts end alike: which one is meant is not known
                    behind[key] = b""
                self.places[key] = path, start
        self.places = {key: place for key, place in self.places.items() if behind[key]}
        if not self.places:
            odd = f"; {len(self.unread)} files are being written, or are none of states" if self.unread else ""
            odd += f"; the {len(behind)} pieces of {length} tokens stand behind different texts" if behind else ""
            raise ValueError(
                f"train.states={folder}: no file here holds token_ids and hidden_states that tell which text they are "
                f"of{odd}; have them written by the server of selfspec serve-target"
            )
        path, start = min(self.places.values(), key=lambda place: place[0].stat().st_size)
        ids = _ids_of(path)
        assert ids is not None
        self.first = ids[start : start + length]
        self.of(self.first)

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
            self._hashes.append(torch.from_file(str(path.with_suffix(".done")), size=count, dtype=torch.int64))
            done &= self._hashes[-1] != 0
        for row, start, tokens in documents_of(batch):
            if done[row] and len(tokens) <= length:
                self.places[key_of(tokens)] = self.folder / str(row), start
                self.first = tokens if not len(self.first) or len(tokens) < len(self.first) else self.first
        if not self.places:
            raise ValueError(f"train.states={self.folder}: no row of it is whole; let the run that keeps it go on")

    def _check_row(self, row: int) -> None:
        """Raises ValueError for a row that is not as it was kept."""
        if row in self._checked:
            return
        for layer, states, hashes in zip(self.layers, self._kept, self._hashes, strict=True):
            if row_hash(states[row]) != hashes[row]:
                raise ValueError(
                    f"{self.folder}/layer_{layer - 1}.states: the states of row {row} were changed since they were "
                    "kept; delete the folder, and let the run that keeps it write it again"
                )
        self._checked.add(row)

    def of(self, tokens: Tensor) -> Tensor:
        if (place := self.places.get(key_of(tokens))) is None:
            raise ValueError(f"{self.folder} holds no states of a text of {len(tokens)} tokens that training reads")
        path, start = place
        if self._kept:
            row = int(path.name)
            self._check_row(row)
            part = [layer[row, start : start + len(tokens)] for layer in self._kept]
            return self.check(torch.stack(part, 1), tokens, str(path))
        try:
            with safe_open(path, "pt") as file:
                states = file.get_slice("hidden_states")[start : start + len(tokens)]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} was there when training began, and is no whole file now: {error}") from error
        return self.check(states, tokens, str(path))

    def covered(self, corpus: Corpus, length: int, name: str) -> Corpus:
        """The documents whose states are here. Raises ValueError where these are none."""
        begins = corpus.begins if self._kept else ()  # rows of a training; servers record whole texts
        documents = [corpus.document(i) for i in range(len(corpus.is_chat))]
        kept, chats, cut = list[tuple[Tensor, Tensor]](), list[int](), 0
        for i, one in enumerate(documents):
            known = 0
            for piece, count in parts_of(one.tokens, length, begins):
                if key_of(piece) not in self.places:
                    break
                known += count
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
        return in_a_row(kept, corpus.is_chat[chats], begins)

    def held_out(self, corpus: Corpus) -> tuple[Corpus, Corpus]:
        """Training and validation texts out of those of a folder that `train.cache=disk` keeps, which holds the rows
        that train alone. Raises ValueError for a single document."""
        count = len(corpus.is_chat)
        if count < 2:
            raise ValueError(f"{self.folder} holds states of one document; one must train and another validate")
        texts = [(one.tokens, one.mask) for one in map(corpus.document, range(count))]
        shares = torch.tensor([_share(tokens, mask) for tokens, mask in texts])
        chosen = shares <= max(_HELD_OUT, float(shares.min()))
        if chosen.all():
            chosen = torch.arange(count) == 0
        print(f"states of validation texts are not kept there: {int(chosen.sum())} of {count} documents validate")
        sides = [[texts[i] for i in at.nonzero()[:, 0].tolist()] for at in (~chosen, chosen)]
        parts = zip(sides, (~chosen, chosen), strict=True)
        train, validation = (in_a_row(side, corpus.is_chat[at], corpus.begins) for side, at in parts)
        return train, validation


def _share(tokens: Tensor, mask: Tensor) -> float:
    """A number in [0, 1) that follows from a document's opening, up to where its first answer begins: texts that stand
    twice, and several answers to one prompt, have the same."""
    begins = (mask[1:] & ~mask[:-1]).nonzero()[:, 0]
    opening = tokens[: int(begins[0]) + 1] if len(begins) and begins[0] else tokens
    return int.from_bytes(key_of(opening)[:4]) / 2**32


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
