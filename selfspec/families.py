"""Which models trees can be verified on: a refusal with its reason, and a probe that compares tree and plain passes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.tree import DraftTree, chain

if TYPE_CHECKING:
    from selfspec.target import Target

# Largest deviation of a tree pass from a plain one, over the spread of the logits: rounding stays far below, a node
# that sees what it should not lies far above.
_TOLERANCE = {torch.bfloat16: 0.15, torch.float16: 0.03, torch.float32: 1e-3, torch.float64: 1e-6}


def refuse(model: PreTrainedModel) -> None:
    """Raises ValueError, with the reason, for a model whose kind can not be served."""
    config = model.config.get_text_config()
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; selfspec serves decoder-only models")
    head = model.get_output_embeddings() if model.can_generate() else None
    if getattr(head, "out_features", None) is None:
        raise ValueError(f"{name} has no language-model head; load it with AutoModelForCausalLM")
    kinds = set(getattr(config, "layer_types", None) or ())
    if (other := kinds - {"full_attention", "sliding_attention"}) or getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} has layers other than full or sliding attention ({', '.join(sorted(other)) or 'recurrent'}): "
            "a tree would need one recurrent state per branch"
        )
    decoder = model.get_decoder()
    inside = getattr(config, "alibi", False) or "local" in (getattr(config, "attention_layers", None) or ())
    if inside or "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise ValueError(f"{name} sets positions or windows inside its attention, out of a mask's reach")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"{name} runs attention by {config._attn_implementation!r}, which takes no tree mask; load it with "
            'attn_implementation="sdpa"'
        )
    stacks = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == config.num_hidden_layers]
    if len(stacks) != 1:
        raise ValueError(
            f"{name}: expected one stack of {config.num_hidden_layers} layers in its decoder, found {len(stacks)}"
        )


def layers_return_tuples(target: Target) -> bool:
    """Whether the model's layers return tuples, as those of older families do: by a pass over one token."""
    seen: list[bool] = []
    hook = target.layers[0].register_forward_hook(lambda m, a, out: seen.append(isinstance(out, tuple)))
    try:
        with torch.no_grad():
            target.decoder(input_ids=torch.zeros(1, 1, dtype=torch.long, device=target.device), use_cache=False)
    finally:
        hook.remove()
    return seen[0]


@torch.inference_mode()
def probe(target: Target) -> None:
    """Run a small tree behind a short prompt and compare every node with the plain model on its path.

    Raises ValueError where they differ by more than rounding: the model does not obey the tree's mask or positions.
    """
    vocab, device = target.vocab_size, target.device
    prompt = torch.arange(1, 8, device=device)[None] * 7 % vocab
    tree = DraftTree(
        torch.arange(8, 16, device=device)[None] * 11 % vocab,
        torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 6]], device=device),
    )
    cache = target.cache(1, 16)
    target.forward(chain(prompt), cache, logits=False)
    cache.keep([list(range(prompt.shape[1]))])
    drafted = target.forward(tree, cache).logits
    assert drafted is not None
    deviations = []
    for node in range(tree.tokens.shape[1]):
        path = torch.cat([prompt[0], tree.tokens[0][tree.mask[0, node]]])[None]
        plain: Tensor = target.model(input_ids=path, use_cache=False).logits[0, -1].double()
        spread = (plain - plain.mean()).norm()
        deviations.append(float((drafted[0, node].double() - plain).norm() / spread.clamp(min=1e-30)))
    middle = sorted(deviations)[len(deviations) // 2]  # the median: a router of experts may flip at one node
    if not middle < _TOLERANCE.get(target.dtype, 0.15):
        raise ValueError(
            f"{type(target.model).__name__} can not be served: a pass over a tree gave other logits than plain passes "
            f"over its branches (relative deviation {middle:.2g}), so it does not follow the tree's mask and positions"
        )
