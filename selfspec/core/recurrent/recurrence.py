"""Linear recurrences over trees: what all nodes of a pass read, and the state behind an accepted path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

PIECE = 64  # nodes of a long chain that are solved at once


class Written(NamedTuple):
    """What nodes wrote. keys: [B, H, N, K], or [B, 1, N, K] for all heads; values: [B, H, N, V]; decays: log decays,
    [B, H, N], or [B, H, N, K] where each channel of the keys has its own; sums: of the decays from the checkpoint to
    each node, itself included; rates: [H, K], by which decays and sums [B, H, N] are multiplied for each channel."""

    keys: Tensor
    values: Tensor
    decays: Tensor
    sums: Tensor
    rates: Tensor | None = None

    def first(self, nodes: int) -> Written:
        """Of the first so many nodes."""
        keys, values, decays, sums = (part[:, :, :nodes] for part in self[:4])
        return Written(keys, values, decays, sums, self.rates)

    def behind(self, other: Written | None) -> Written:
        """These nodes behind others."""
        if other is None:
            return self
        keys, values, decays, sums = (torch.cat(pair, 2) for pair in zip(other[:4], self[:4], strict=True))
        return Written(keys, values, decays, sums, self.rates)


class Recurrence:
    """One linear recurrence in one pass, or one convolution (see `convolution.taps`). state: [B, H, K, V] at the
    checkpoint, None: zero; written: by the nodes of earlier passes over the same tree, and behind the pass by all;
    below: bool [B, n, m] for the n nodes of the pass behind all m - n earlier ones, True where node i is node j or
    descends from it; None: a chain."""

    def __init__(self, state: Tensor | None, written: Any, below: Tensor | None) -> None:
        self.state, self.written, self.below = state, written, below

    def to(self, *args: Any, **kwargs: Any) -> Recurrence:
        """Itself: transformers' modules cast the states that kernels return."""
        return self


def read(
    recurrence: Recurrence, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, beta: Tensor | None = None
) -> Tensor:
    """What nodes read, [B, H, n, V], of queries and keys [B, H, n, K], values [B, H, n, V] and log decays [B, H, n] or
    [B, H, n, K]. beta: [B, H, n] for the delta rule, which writes beta (v - what the key read before); None: values
    are written as they are."""
    with torch.autocast(keys.device.type, enabled=False):  # sums of decays do not bear bfloat16
        earlier, nodes = recurrence.written, keys.shape[2]
        below = None if recurrence.below is None else recurrence.below.to(keys.device)
        outs: list[Tensor] = []  # not list[Tensor](), which can not be compiled
        if below is not None and decays.ndim == 4 and nodes > PIECE:  # a decay for each channel: in pieces, for memory
            kept = below.shape[2] - below.shape[1]
            for start, part in _pieces(queries, keys, values, decays, beta):
                seen = below[:, start : start + PIECE, : kept + start + part[1].shape[2]]
                out, new = _piece(recurrence.state, recurrence.written, *part, seen)
                recurrence.written = new.behind(recurrence.written)
                outs.append(out)
            return torch.cat(outs, 2)
        if below is not None or earlier is not None or nodes <= PIECE:
            below = chain_below(keys, earlier) if below is None else below
            out, new = _piece(recurrence.state, earlier, queries, keys, values, decays, beta, below)
            recurrence.written = new.behind(earlier)
            return out
        state, base = recurrence.state, None
        for _, part in _pieces(queries, keys, values, decays, beta):
            out, new = _piece(state, None, *part, chain_below(part[1], None))
            outs.append(out)
            width = new.keys.shape[2]
            path = torch.arange(width, device=keys.device).expand(len(keys), -1)
            state = advanced(state, new, path, path.new_full((len(keys),), width))
            new = new._replace(sums=new.sums if base is None else new.sums + base)
            base = new.sums[:, :, -1:]
            recurrence.written = new.behind(recurrence.written)
        return torch.cat(outs, 2)


_Nodes = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def _pieces(*nodes: Tensor | None) -> Iterator[tuple[int, _Nodes]]:
    """Queries, keys, values, decays and beta of PIECE nodes at a time, and the first of these nodes."""
    assert nodes[0] is not None
    for start in range(0, nodes[0].shape[2], PIECE):
        piece = (None if part is None else part[:, :, start : start + PIECE] for part in nodes)
        yield start, cast(_Nodes, tuple(piece))


def chain_below(keys: Tensor, earlier: Written | None) -> Tensor:
    """bool [B, n, m], the ancestors in a chain of as many nodes as there are keys [B, H, n, K], behind earlier ones."""
    nodes, kept = keys.shape[2], 0 if earlier is None else earlier.keys.shape[2]
    return torch.ones(nodes, kept + nodes, dtype=torch.bool, device=keys.device).tril(kept).expand(len(keys), -1, -1)


def _piece(
    state: Tensor | None,
    earlier: Written | None,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    beta: Tensor | None,
    below: Tensor,
) -> tuple[Tensor, Written]:
    """What nodes read, and what they wrote."""
    all_decays = decays if earlier is None else torch.cat([earlier.decays, decays], 2)
    of_heads = below[:, None].to(decays.dtype)
    channels = decays.ndim == 4
    sums = of_heads @ all_decays if channels else (of_heads @ all_decays[..., None])[..., 0]
    all_keys = keys if earlier is None else torch.cat([earlier.keys, keys], 2)
    all_sums = sums if earlier is None else torch.cat([earlier.sums, sums], 2)
    kept = all_keys.shape[2] - keys.shape[2]
    faded = sums.exp() if channels else sums.exp()[..., None]

    def weights(rows: Tensor, seen: Tensor) -> Tensor:
        """[B, H, n, m]: the products of rows [B, H, n, K] with the keys that they see, decayed since then."""
        if channels:
            since = (sums[:, :, :, None] - all_sums[:, :, None]).masked_fill(~seen[:, None, :, :, None], -torch.inf)
            return torch.einsum("bhnk,bhmk,bhnmk->bhnm", rows, all_keys, since.exp())
        since = (sums[:, :, :, None] - all_sums[:, :, None]).masked_fill(~seen[:, None], -torch.inf)
        return (rows @ all_keys.mT) * since.exp()

    if beta is not None:
        itself = torch.arange(keys.shape[2], device=keys.device)
        strictly = below & (itself[:, None] + kept != torch.arange(all_keys.shape[2], device=keys.device))
        overlaps = weights(keys, strictly)
        if state is not None:
            values = values - (keys * faded) @ state
        if earlier is not None:
            values = values - overlaps[..., :kept] @ earlier.values
        # Each value depends on those of the ancestors, which come first: a triangular system.
        system = beta[..., None] * overlaps[..., kept:]
        values = torch.linalg.solve_triangular(
            system + torch.eye(len(itself), dtype=system.dtype, device=system.device),
            beta[..., None] * values,
            upper=False,
            unitriangular=True,
        )
    all_values = values if earlier is None else torch.cat([earlier.values, values], 2)
    out = weights(queries, below) @ all_values
    if state is not None:
        out = out + (queries * faded) @ state
    return out, Written(keys, values, decays, sums)


def beginning(written: Written) -> Tensor:
    """The state [B, H, K, V] before the first node."""
    rows, heads, _, width = written.values.shape
    return written.values.new_zeros(rows, heads, written.keys.shape[3], width)


def advanced(state: Tensor | None, written: Written, paths: Tensor, counts: Tensor) -> Tensor:
    """The state [B, H, K, V] behind the first `counts`, int64 [B], nodes of each row's path, int64 [B, D]: no weight is
    read. A row that keeps no node keeps its state."""

    def along(part: Tensor) -> Tensor:
        at = paths[:, None, :] if part.ndim == 3 else paths[:, None, :, None]
        return part.gather(2, at.expand(-1, part.shape[1], -1, *part.shape[3:]))

    with torch.autocast(paths.device.type, enabled=False):
        keys, values, sums = along(written.keys), along(written.values), along(written.sums)
        if written.rates is not None:
            sums = sums[..., None] * written.rates[:, None]
        sums = sums if sums.ndim == 4 else sums[..., None]
        taken = torch.arange(paths.shape[1], device=paths.device) < counts[:, None]
        last = (counts - 1).clamp(min=0)[:, None, None, None].expand(-1, sums.shape[1], -1, sums.shape[3])
        end = sums.gather(2, last)  # [B, H, 1, K or 1]
        since = (end - sums).masked_fill(~taken[:, None, :, None], -torch.inf).exp()
        new = (keys * since).mT @ values
        if state is None:
            return new
        kept = torch.where(counts[:, None, None, None] > 0, end, torch.zeros_like(end)).exp()
        return state * kept.mT + new
