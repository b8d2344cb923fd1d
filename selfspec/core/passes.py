"""One pass over trees of a stock model, whole or in part."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfspec.core.masks import tree_masks
from selfspec.core.pass_cache import KV, PassCache, pass_cache
from selfspec.core.recurrent.mixers import LayerState
from selfspec.core.support import cache_name
from selfspec.core.tree import DraftTree, ancestors
from selfspec.core.verify import WalkNoise, walk
from selfspec.core.width import Paths

_LONG = 32  # longer chains get a triangular mask without products


@dataclass(frozen=True)
class Pass:
    """What one pass gave. logits: [B, N, V] or None; hidden: [B, N, H], the decoder's last hidden state after its final
    norm, or the output of the last layer run; features: layer index -> that layer's output [B, N, H]; walked: int64
    [B, 2, N + 2], see `selfspec.core.verify.Kept`, where the pass was asked to walk its tree."""

    logits: Tensor | None
    hidden: Tensor
    features: dict[int, Tensor]
    walked: Tensor | None = None


class Skipped(nn.Module):
    """Stands in a view for a layer below a part's first and returns its input. Decoders read plain attributes of their
    layers, such as attention_type; they are the layer's."""

    def __init__(self, layer: nn.Module, returns: int) -> None:
        super().__init__()
        self.__dict__.update({k: v for k, v in vars(layer).items() if isinstance(v, (str, int)) and k != "training"})
        self.returns = returns

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, *[None] * (self.returns - 1)) if self.returns else hidden_states


class Entry(Skipped):
    """The last of them, which returns the hidden states that enter with the cache."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        entering = _cache_of(args, kwargs).entering
        return super().forward(hidden_states if entering is None else entering)


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PassCache:
    """The cache among a module's arguments, which families and releases name and place differently."""
    return next(argument for argument in (*args, *kwargs.values()) if isinstance(argument, PassCache))


def read_output(index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """A forward hook: the output goes into the cache that came with the call."""
    _cache_of(args, kwargs).outputs[index] = output if isinstance(output, Tensor) else output[0]


def last_output(model: nn.Module, outputs: dict[int, Tensor], last: int) -> Tensor:
    """Of a pass, the last layer's. Raises ValueError where the model's forward is not its own: its decoder was not
    called with the cache."""
    if last not in outputs:
        raise ValueError(f"the forward of {type(model).__name__} was replaced; load the model as it came")
    return outputs[last]


class Part(NamedTuple):
    """Some layers of a target, as passes run them. module: the view, or its decoder where no logits are wanted;
    windows: by layer type; last: the largest position; dtype: of masks; width: of passes that attend by paths (see
    `selfspec.core.width`), 0 where none does; cache_name: of the module's argument; takes_positions: False where no
    layer has any, as in purely recurrent models; few_logits: whether only the last are made."""

    module: nn.Module
    windows: dict[str, int | None]
    last: int
    dtype: torch.dtype
    width: int
    cache_name: str
    takes_positions: bool
    few_logits: bool = False

    @classmethod
    def of(cls, module: nn.Module, windows: dict[str, int | None], last: int, dtype: torch.dtype, width: int) -> Part:
        """With the names of its forward's arguments."""
        takes = "position_ids" in inspect.signature(module.forward).parameters
        return cls(module, windows, last, dtype, width, cache_name(module), takes)

    def of_prompts(self) -> Part:
        """The same where logits are not wanted, as far as its forward can leave them out."""
        return self._replace(few_logits="logits_to_keep" in inspect.signature(self.module.forward).parameters)

    def masks(self, of_windows: list[Tensor]) -> Any:
        """As the module takes masks, one for each of the windows."""
        return by_type(dict(zip(self.windows, of_windows, strict=True)))

    def arguments(self, positions: Tensor | None, cache: PassCache) -> dict[str, Any]:
        """Arguments of the module."""
        more: dict[str, Any] = {"position_ids": positions} if self.takes_positions else {}
        return {self.cache_name: cache, **more, **({"logits_to_keep": 1} if self.few_logits else {})}


def by_type(masks: dict[str, Tensor]) -> Any:
    """Masks as models take them: one, or one for each type of their layers; those with a state take none."""
    return {"linear_attention": None, "conv": None, **masks} if len(masks) > 1 else next(iter(masks.values()))


def sized(tree: DraftTree, idle: int, n: int) -> tuple[Tensor, Tensor | None]:
    """Tokens and parents (None: a long chain) [B + idle, n] of a tree of up to n nodes, with spare ones."""
    tokens, parents, nodes = tree.tokens, tree.parents, tree.tokens.shape[1]
    if n > nodes or idle:
        tokens = nn.functional.pad(tokens, (0, n - nodes, 0, idle))
    if n > _LONG and tree.is_chain:
        return tokens.contiguous(), None
    if n > nodes or idle:
        parents = nn.functional.pad(parents, (0, n - nodes, 0, idle), value=-1)
    return tokens.contiguous(), parents.contiguous()


def tree_pass_alone(
    part: Part, kv: KV, *given: Any
) -> tuple[Tensor | None, dict[int, Tensor], Tensor | None, dict[int, LayerState]]:
    """`tree_pass`, which leaves `kv` as it is and returns what nodes left in layers that keep a state."""
    kv = kv._replace(states={layer: list(stages) for layer, stages in kv.states.items()})
    made = tree_pass(part, kv, *given)
    return *made, {layer: stages[-1]._replace(states={}) for layer, stages in kv.states.items()}


def tree_pass(
    part: Part,
    kv: KV,
    hidden: Tensor | None,
    tokens: Tensor,
    parents: Tensor | None,
    ran: int = 0,
    noise: WalkNoise | None = None,
) -> tuple[Tensor | None, dict[int, Tensor], Tensor | None]:
    """One pass of a part over trees: logits, the outputs of the layers read, and the walk (see `verify.walk`). What the
    nodes leave in layers that keep a state goes into `kv`.

    hidden: states [B, n, H] that enter, where the part does not begin at layer 0; tokens: int64 [B, n] of the nodes
    behind the first `ran`, which were run in an earlier pass over the same tree; parents: int64 [B, N] of the whole
    tree, None for a chain; noise: None where nothing is walked.
    """
    rows, nodes = tokens.shape
    if parents is None:
        below = torch.ones(nodes, nodes, dtype=torch.bool, device=tokens.device).tril().expand(rows, -1, -1)
    else:
        below = ancestors(parents)[:, : ran + nodes, : ran + nodes]
    padded, seen = tokens, below
    if kv.states and nodes == 1:  # stock modules take a path for one token that bypasses our functions: a spare node
        padded, seen = nn.functional.pad(tokens, (0, 1)), nn.functional.pad(below, (0, 1, 0, 1))
        seen[:, -1, -1] = True
        hidden = None if hidden is None else nn.functional.pad(hidden, (0, 0, 0, 1))
    start = kv.lengths[:, None]
    depth, masks = tree_masks(seen, kv.lengths, ran, kv.size, list(part.windows.values()), part.dtype)
    entries = start + torch.arange(ran, ran + padded.shape[1], device=tokens.device)
    cache = pass_cache(kv, entries, hidden, None if parents is None else seen[:, ran:])
    mask = part.masks(masks)
    by_paths = part.width == nodes and not ran
    paths = {"tree_paths": Paths.of(below, depth, kv.lengths, kv.size)} if by_paths else {}
    out = part.module(
        input_ids=padded,
        attention_mask=mask if kv.size else None,  # no layer attends
        use_cache=True,
        **part.arguments((start + depth).clamp(max=part.last), cache),
        **paths,
    )
    if kv.states:
        cache.leave(kv.states, ran + nodes)
    outputs = {layer: states.to(tokens.device) for layer, states in cache.outputs.items()}  # of targets on several GPUs
    outputs = {layer: states[:, :nodes] for layer, states in outputs.items()} if kv.states else outputs
    logits: Tensor | None = getattr(out, "logits", None)
    logits = logits if logits is None or padded is tokens else logits[:, :nodes]
    if noise is None or logits is None or parents is None:
        return logits, outputs, None
    return logits, outputs, walk(logits, tokens, parents, below, noise)
