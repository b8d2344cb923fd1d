"""Hidden states of the frozen target on training rows, kept on disk for later epochs and other runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from selfspec.checkpoints.weights_hash import model_hash
from selfspec.core.passes import Pass
from selfspec.core.quantized import Int8Linear, fits
from selfspec.core.support import view
from selfspec.core.target import Target
from selfspec.data.packing import Packed
from selfspec.data.store import Corpus
from selfspec.drafters.base import Few
from selfspec.training.states import ROWS, States, behind_layers, drafted_behind, write_about
from selfspec.utils.files import atomic, cache_folder, disk_room


@dataclass(frozen=True)
class _Layer:
    """states: [R, S, H]; done: int64 [R], a hash of each row that is there, 0 of the others; seen: bool [R], which
    rows this process has written or held against their hash."""

    states: Tensor
    done: Tensor
    seen: Tensor

    def holds(self, row: int) -> bool:
        """Whether a row is there as it was written."""
        if not self.done[row] or self.seen[row]:
            return bool(self.done[row])
        self.seen[row] = True
        if self.done[row] != row_hash(self.states[row]):
            print(f"hidden states of row {row} were changed on the disk; the target runs on it again", file=sys.stderr)
            self.done[row] = 0
        return bool(self.done[row])

    def write(self, row: int, states: Tensor) -> None:
        self.states[row] = states
        # After the states, so that a kill in between only costs running the row again
        self.done[row], self.seen[row] = row_hash(self.states[row]), True


def row_hash(states: Tensor) -> int:
    """Of a row's states: never 0."""
    whole = hashlib.blake2b(states.contiguous().view(torch.uint8).numpy().data, digest_size=8).digest()
    return int.from_bytes(whole, signed=True) or 1


class HiddenStates:
    """Outputs [S, H] of the target's last layer, and of layers that a drafter reads, by the number of a row.

    A row is run when it is read for the first time. Logits are computed from the kept output of the last layer, by the
    same final norm and lm_head. Each layer is kept on its own, so that drafters share on disk what both read.
    """

    def __init__(
        self,
        target: Target,
        reads: tuple[int, ...],
        rows: int,
        length: int,
        dtype: torch.dtype,
        folder: Path,
        elsewhere: States | None = None,
    ) -> None:
        """folder: where the files lie; elsewhere: where states come from, if not from the target here.
        Raises ValueError where there is no room for them."""
        self.elsewhere = elsewhere
        self.target, self.reads = target, tuple(sorted({*reads, target.n_layers - 1}))
        shape = rows, length, target.hidden_size
        size = rows * length * target.hidden_size * dtype.itemsize
        paths = {layer: folder / f"layer_{layer}.states" for layer in self.reads}
        new = [layer for layer, path in paths.items() if not _whole(path, size, rows)]
        needed, free = size * len(new), _free_disk(folder)
        self.summary = (
            f"hidden states of {rows} rows, layers {list(self.reads)}: {size * len(self.reads) / 2**30:.2f} GiB"
        )
        self.summary += f" in {folder}, {needed / 2**30:.2f} GiB of them new"
        if needed > 0.9 * free:  # the rest is for what else a run writes
            raise ValueError(
                f"{self.summary}, but {free / 2**30:.2f} GiB are free; take train.cache=none, fewer rows or a shorter "
                "train.length"
            )
        self.layers = {layer: _opened(path, shape, dtype) for layer, path in paths.items()}
        self.inside = torch.zeros(rows, length, dtype=torch.bool)  # whether the likeliest token can be drafted
        self.share = torch.zeros(rows, length)  # the probability of what can be drafted
        self.known = torch.zeros(rows, dtype=torch.bool)  # of which rows that is known
        self.few: tuple[Tensor, Target] | None = None  # a draft vocabulary, and the target with its logits alone

    def holds(self, rows: list[int]) -> bool:
        """Whether rows are there as they were written, in all layers."""
        return all(layer.holds(row) for layer in self.layers.values() for row in rows)

    def features(self, batch: dict[str, Tensor]) -> dict[int, Tensor]:
        """Outputs [B, S, H] of the layers, of a batch (see `DraftLoss`) whose `rows` are the numbers of its rows, on
        the device of its tokens."""
        rows, tokens = batch["rows"].cpu(), batch["tokens"]
        numbers = rows.tolist()
        if not self.holds(numbers):
            if self.elsewhere is not None:
                features = self.elsewhere.features(batch)
            else:
                documents = batch["documents"]
                features = self.target.text(tokens, False, reads=self.reads, documents=documents).features
            for number, layer in self.layers.items():
                for row, states in zip(numbers, features[number].to("cpu", layer.states.dtype), strict=True):
                    layer.write(row, states)
        return {number: layer.states[rows].to(tokens.device) for number, layer in self.layers.items()}

    def states(self, batch: dict[str, Tensor]) -> Pass:
        """The pass of a batch: logits [B, S, V], hidden states and features [B, S, H]."""
        return behind_layers(self.target, batch["tokens"], self.features(batch))

    def drafted(
        self, batch: dict[str, Tensor], vocabulary: Tensor, share: bool
    ) -> tuple[Few, Tensor, dict[int, Tensor]]:
        """What is known of a draft vocabulary, hidden states and features. All tokens' logits are computed once for
        each row: what follows from them is kept. share: see `drafted_behind`, the same in all calls."""
        tokens, rows, features = batch["tokens"], batch["rows"].cpu(), self.features(batch)
        if self.few is None or not torch.equal(self.few[0], vocabulary):
            self.few = vocabulary.clone(), with_few_logits(self.target, vocabulary)
            self.known.zero_()
        end = self.target.n_layers
        out = self.few[1].text(tokens, layers=(end, end), hidden=features[end - 1])
        assert out.logits is not None
        if (new := ~self.known[rows]).any():
            at = new.to(tokens.device)
            last = {end - 1: features[end - 1][at]}
            (few, *found), _ = drafted_behind(self.target, tokens[at], last, vocabulary, share)
            alike = type(self.few[1].lm_head) is type(self.target.lm_head)  # neither in 8 bits, or both
            if alike and not torch.allclose(few.float(), out.logits[at].float(), rtol=0.05, atol=0.05):
                raise ValueError(
                    f"{type(self.target.model).__name__} computes other logits for some tokens than for all; take "
                    "train.cache=none"
                )
            for rows_of, part in zip((self.inside, self.share), found, strict=False):
                rows_of[rows[new]] = part.cpu()
            self.known[rows] = True
        kept = (self.inside, self.share) if share else (self.inside,)
        return (out.logits, *(of[rows].to(tokens.device) for of in kept)), out.hidden, features


def with_few_logits(target: Target, vocabulary: Tensor) -> Target:
    """A view of the target whose logits are those of these tokens alone, int64 [V']."""
    model, head = view(target.model), nn.Linear(1, 1, bias=False, device="meta")
    head.in_features, head.out_features = target.lm_head.in_features, len(vocabulary)
    for name, parameter in target.lm_head.named_parameters():
        setattr(head, name, nn.Parameter(parameter.detach()[vocabulary], requires_grad=False))
    whole = isinstance(target.lm_head, Int8Linear) and fits(head.weight)
    model.set_output_embeddings(Int8Linear(head) if whole else head)
    return Target(model, returns=target.returns)


def states_folder(target: Target, corpus: Corpus, rows: Packed, how: str) -> Path:
    """Where the hidden states of these rows lie on disk; `how` they are computed is part of its name."""
    digest = hashlib.sha256(f"{model_hash(target)} {corpus.key} {rows.length} {rows.pad} {how}".encode())
    for part in (rows.members, rows.ends, rows.begins):
        digest.update(part.numpy().tobytes())
    return cache_folder() / "hidden" / digest.hexdigest()[:24]


def write_rows(folder: Path, rows: Packed, model: str, dtype: torch.dtype) -> None:
    """Say in a folder of kept states which layers it holds, those of other drafters' trainings too, and which documents
    its rows are of, so that it can be read as train.states."""
    layers = sorted(int(path.stem.removeprefix("layer_")) for path in folder.glob("layer_*.states"))
    write_about(folder, [layer + 1 for layer in layers], model, str(dtype).removeprefix("torch."))
    if not (path := folder / ROWS).is_file():
        every = rows.rows(range(rows.per_epoch))
        with atomic(path) as scratch:
            save_file({"tokens": every["tokens"].int(), "documents": every["documents"].short()}, scratch)


def _whole(path: Path, size: int, rows: int) -> bool:
    wanted = {path: size, path.with_suffix(".done"): 8 * rows}
    return all(file.is_file() and file.stat().st_size == expected for file, expected in wanted.items())


def _opened(path: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> _Layer:
    size, done = shape[0] * shape[1] * shape[2], path.with_suffix(".done")
    if not _whole(path, size * dtype.itemsize, shape[0]):
        path.parent.mkdir(parents=True, exist_ok=True)
        done.unlink(missing_ok=True)
        with disk_room(path), path.open("wb") as file:  # all blocks now: a full disk later would kill the process
            os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
        done.write_bytes(bytes(8 * shape[0]))
    states = torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)
    hashes = torch.from_file(str(done), shared=True, size=shape[0], dtype=torch.int64)
    return _Layer(states, hashes, torch.zeros(shape[0], dtype=torch.bool))


def _free_disk(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
