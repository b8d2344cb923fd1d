"""What the frozen target says of rows that are read again: outputs of its layers, kept in memory or on disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from selfspec.core.cache import free_memory
from selfspec.core.target import Pass, Target

PLACES = ("none", "memory", "disk")


@dataclass(frozen=True)
class _Layer:
    """states: [R, S, H]; done: bool [R], which rows are there."""

    states: Tensor
    done: Tensor


class HiddenStates:
    """Outputs of the target's last layer, and of layers that a drafter reads, by the number of a row.

    A row is run when it is read for the first time. Later its logits are made of the last layer's output, by the same
    final norm and lm_head. Each layer is kept on its own, so that drafters share on disk what both of them read.
    """

    def __init__(
        self, target: Target, reads: tuple[int, ...], rows: int, length: int, dtype: torch.dtype, folder: Path | None
    ) -> None:
        """folder: where the files lie, None for memory. Raises ValueError where there is no room for them."""
        self.target, self.reads = target, tuple(sorted({*reads, target.n_layers - 1}))
        shape = rows, length, target.hidden_size
        size = rows * length * target.hidden_size * dtype.itemsize
        names = {layer: None if folder is None else folder / f"layer_{layer}" for layer in self.reads}
        new = [layer for layer, path in names.items() if path is None or not path.with_suffix(".done").exists()]
        free = free_memory(torch.device("cpu")) if folder is None else _free_disk(folder)
        self.told = f"hidden states of {rows} rows, layers {list(self.reads)}: {size * len(self.reads) / 2**30:.2f} GiB"
        self.told += " in memory" if folder is None else f" in {folder}, {size * len(new) / 2**30:.2f} GiB of them new"
        if size * len(new) > 0.9 * free:
            raise ValueError(
                f"{self.told}, but {free / 2**30:.2f} GiB are free; take train.cache=none, fewer rows or a shorter "
                "train.length"
            )
        self.layers = {layer: _opened(path, shape, dtype) for layer, path in names.items()}

    def states(self, batch: dict[str, Tensor]) -> Pass:
        """The pass of a batch whose `rows`, int64 [B], are the numbers of its rows."""
        rows, tokens, last = batch["rows"].cpu(), batch["tokens"], self.target.n_layers - 1
        if not all(layer.done[rows].all() for layer in self.layers.values()):
            out = self.target.text(tokens, reads=self.reads, documents=batch["documents"])
            for number, layer in self.layers.items():
                layer.states[rows] = out.features[number].to("cpu", layer.states.dtype)
                layer.done[rows] = True  # behind the states: a process killed between the two runs the row again
            return out
        features = {number: layer.states[rows].to(tokens.device) for number, layer in self.layers.items()}
        layers = self.target.n_layers, self.target.n_layers
        out = self.target.text(tokens, layers=layers, hidden=features[last])
        return Pass(out.logits, out.hidden, features)


def _opened(path: Path | None, shape: tuple[int, ...], dtype: torch.dtype) -> _Layer:
    if path is None:
        return _Layer(torch.empty(shape, dtype=dtype), torch.zeros(shape[0], dtype=torch.bool))
    path.parent.mkdir(parents=True, exist_ok=True)

    def mapped(suffix: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = int(torch.tensor(shape).prod())
        return torch.from_file(str(path.with_suffix(suffix)), shared=True, size=size, dtype=dtype).view(shape)

    return _Layer(mapped(".states", shape, dtype), mapped(".done", shape[:1], torch.bool))


def _free_disk(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
