"""Hidden states of a target that runs elsewhere, by document, whether a server hands them out (`states_server`) or
folders hold them (`states_folder`). A document's states are found by its tokens."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from selfspec.core.passes import Pass
from selfspec.core.target import Target
from selfspec.drafters.base import Few
from selfspec.drafters.parts.losses import drafted_logits, share_of
from selfspec.utils.files import write_text

ABOUT = "states.json"  # in a folder of states: which layers its files hold
ROWS = "rows.safetensors"  # in a folder that train.cache=disk has kept: the tokens of its rows
_PIECE = 1024  # tokens whose logits are held at once


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
    target: Target, tokens: Tensor, features: dict[int, Tensor], vocabulary: Tensor, share: bool
) -> tuple[Few, Tensor]:
    """What is known of a draft vocabulary, and hidden states behind the final norm, [B, S, H]: all tokens' logits
    are held for a piece of the texts at a time. share: whether the vocabulary's probability is wanted, which takes
    longer than the logits."""
    end, size = target.n_layers, max(1, _PIECE // len(tokens))
    pieces, hidden = list[Few](), list[Tensor]()
    for piece, states in zip(tokens.split(size, 1), features[end - 1].split(size, 1), strict=True):
        out = target.text(piece, layers=(end, end), hidden=states)
        assert out.logits is not None
        few, inside = drafted_logits(out.logits, vocabulary)
        pieces.append((few, inside, *([share_of(out.logits, few)] if share else [])))
        hidden.append(out.hidden)
    return tuple(torch.cat(parts, 1) for parts in zip(*pieces, strict=True)), torch.cat(hidden, 1)


def key_of(tokens: Tensor) -> bytes:
    return hashlib.blake2b(tokens.long().numpy().tobytes(), digest_size=16).digest()


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


def write_about(folder: Path, layers: Sequence[int], model: str, dtype: str | None = None) -> None:
    """Say in a folder which layers its files will hold; dtype: of files that do not say it themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"layers": list(layers), "model": model} | ({} if dtype is None else {"dtype": dtype})
    write_text(folder / ABOUT, json.dumps(about) + "\n")
