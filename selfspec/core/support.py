"""What is known of transformers' models: which can not be served and why, where layers are, how far they reach."""

from __future__ import annotations

import copy
import inspect
from importlib.metadata import version
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.core.recurrent.mixers import keeps_state, mixers
from selfspec.utils.checks import integer

M = TypeVar("M", bound=nn.Module)
_VERSION, _STATES = version("transformers"), (5, 21)  # since which layers ask their cache for states


def _release(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".")[:2])


def refuse_any(model: PreTrainedModel) -> None:
    """Raises ValueError, with the reason, for a model that can not be served in any way."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; selfspec serves decoder-only models")
    if model.device.type == "mps":
        raise ValueError(f"{name} lies on MPS, which has no float64; noise is made in float64, so move it to the CPU")
    head = model.get_output_embeddings() if model.can_generate() else None
    if getattr(head, "out_features", None) is None:
        raise ValueError(f"{name} has no language-model head; load it with AutoModelForCausalLM")
    if any("QBits" in type(p).__name__ for p in model.parameters()):
        raise ValueError(
            f"{name} has weights of quanto's int4 or int2, which torch's inference mode does not take; quanto's int8 "
            "and float8 are served, and dtype='int8' of selfspec's own"
        )
    if not inspect.signature(model.forward).parameters.keys() & set(CACHE_NAMES):
        if "forward" in vars(model):
            raise ValueError(
                f"the forward of {name} was replaced by a function that names no past_key_values among its arguments; "
                "use a hook, or model.compile() in the place of torch.compile(model.forward)"
            )
        newer = f"; transformers 5.24 has one for more models, {_VERSION} is installed" * (_release(_VERSION) < (5, 24))
        raise ValueError(f"{name} keeps no cache of keys and values, from which drafts are verified{newer}")


def refuse(model: PreTrainedModel) -> None:
    """Raises ValueError, with the reason, for a model that no tree can be verified on."""
    refuse_any(model)
    config = model.config.get_text_config()
    name = type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ())
    stack = layer_stack(model)
    stateful = any(True for _ in mixers(stack))
    if _release(_VERSION) < _STATES and stateful:
        needed = ".".join(map(str, _STATES))
        raise ValueError(f"{name} has layers that keep a state: they need transformers {needed}, here is {_VERSION}")
    others = kinds - {"full_attention", "sliding_attention"}
    if others:
        unknown = sorted({type(part).__name__ for part in stack.modules() if keeps_state(part)})
        if unknown or not (others <= _STATELESS or stateful):
            raise ValueError(
                f"{name} has layers of kinds that no tree can run over ({', '.join(unknown or sorted(others))})"
            )
    replaced = any(type(part).forward.__module__ != type(part).__module__ for part in mixers(stack))
    replaced |= any(
        "forward" in vars(part) and not hasattr(part, "_hf_hook") and any(mixers(part)) for part in stack.modules()
    )
    if replaced:
        raise ValueError(f"{name} has a layer with a state whose forward was replaced, which no tree would follow")
    takes = inspect.signature(decoder_of(model).forward).parameters
    inside = getattr(config, "alibi", False) or "local" in (getattr(config, "attention_layers", None) or ())
    if inside or ("position_ids" not in takes and not stateful):
        raise ValueError(f"{name} sets positions or windows inside its attention, out of a mask's reach")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"{name} runs attention by {config._attn_implementation!r}, which takes no tree mask; load it with "
            'attn_implementation="sdpa"'
        )


_STATELESS = {"attention", "mlp", "moe"}  # kinds of layers that need no form of their own


def quantized_by(model: PreTrainedModel) -> str | None:
    """Which library has quantized a model's weights, None where none has."""
    config = getattr(model.config, "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    if method is not None:
        return str(getattr(method, "value", method))
    kinds = {type(p).__module__ for p in model.parameters() if is_traceable_wrapper_subclass(p)}
    return next((name for name in ("quanto", "torchao", "bitsandbytes") for kind in kinds if name in kind), None)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The model without its lm_head."""
    decoder: nn.Module = model.get_decoder()
    if decoder is model:  # a family that does not say
        decoder = next((part for part in model.children() if isinstance(part, PreTrainedModel)), model)
    return decoder


def view(module: M) -> M:
    """A copy of a module's structure over the same tensors and hooks. What is then put into it leaves the original as
    it was. Raises ValueError where it holds what can not be copied."""
    shared: dict[int, object] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    for part in module.modules():
        shared |= {id(value): value for value in vars(part).values() if isinstance(value, torch.Tensor)}
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        shared |= {id(hook): hook for hook in hooks}
    try:
        copied = copy.deepcopy(module, shared)
    except TypeError as error:  # such as a lock or an open file
        raise ValueError(
            f"{type(module).__name__} holds what can not be copied ({error}); take it off first"
        ) from error
    if module in _follows:
        _follows[copied] = _follows[module]
    return copied


def unhooked(module: M) -> M:
    """A view without hooks, for passes that look at the model: its hooks are for its own passes. Those of
    torch.distributed stay, which gather weights."""
    copied = view(module)
    for part in copied.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            for handle, hook in list(hooks.items()):
                if not str(getattr(hook, "__module__", "")).startswith("torch.distributed"):
                    del hooks[handle]
    return copied


def layer_stack(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder layers. Raises ValueError where its decoder has no single stack of them."""
    count = model.config.get_text_config().num_hidden_layers
    stacks = [m for m in decoder_of(model).children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(stacks) != 1:
        raise ValueError(
            f"{type(model).__name__}: expected one stack of {count} layers in its decoder, found {len(stacks)}"
        )
    return stacks[0]


CACHE_NAMES = ("cache", "past_key_values")  # since transformers 5.24, and before


def cache_name(module: nn.Module) -> str:
    """The name of the argument by which a model or its decoder takes the cache."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[-1])


def longest_context(model: PreTrainedModel) -> tuple[int | None, str]:
    """Positions the model can be served at (None: no limit), and what sets the limit.

    With longrope (Phi-3, Phi-4-mini) this is the original length. Beyond it, one long row switches the rotary factors
    of the whole pass and changes the other rows' logits.
    """
    config = model.config.get_text_config()
    name = next((n for n in ("max_position_embeddings", "max_seq_len") if getattr(config, n, None)), "")  # MPT's
    longest: int | None = getattr(config, name, None)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        original = parameters.get("original_max_position_embeddings") or 0
        if parameters.get("rope_type") == "longrope" and 0 < original < (longest or 2**62):
            return original, "rope_type longrope: beyond its original length one row changes the others of its pass"
    if 0 < (window := getattr(config, "keep_window_size", None) or 0) < (longest or 2**62):  # of Doge
        return window, "keep_window_size: beyond it each pass chooses the keys that it attends to"
    return longest, name


# Models whose window was tried, and whether they follow it
_follows: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """The sliding window, or None, of each type of a model's layers that needs a mask."""
    config = model.config.get_text_config()
    window: int | None = getattr(config, "sliding_window", None)
    types = set(getattr(config, "layer_types", None) or ()) or {"sliding_attention" if window else "full_attention"}
    if window and model not in _follows:
        _follows[model] = _windowed(model)
    if not window or not _follows[model]:
        window, types = None, types - {"sliding_attention"} or {"full_attention"}
    elif types == {"full_attention"}:  # of a class that does not read the types
        types = {"sliding_attention"}
    windows = {"full_attention": None, "sliding_attention": window}
    kinds = {("sliding" if "sliding" in kind else "full") + "_attention" for kind in types}
    kinds = kinds & types or kinds  # layers with a state alone need no mask
    return {name: windows[name] for name in sorted(kinds)}


@torch.no_grad()
def _windowed(model: PreTrainedModel) -> bool:
    """Whether a model follows the sliding window of its config, which some classes never read: by passes over a short
    text, with a window of two positions and with one of many. Where that can not be tried, what the config says."""
    config = model.config.get_text_config()
    said = bool(getattr(config, "use_sliding_window", True))
    if any(p.is_meta for p in model.parameters()) or "forward" in {*vars(model), *vars(decoder_of(model))}:
        return said
    outputs, tokens = list[torch.Tensor](), torch.arange(6, device=model.get_output_embeddings().weight.device)
    try:
        narrow = unhooked(model)
        for window in (2, 2**16):
            for part in narrow.modules():
                if isinstance(vars(part).get("sliding_window"), int):
                    part.sliding_window = window  # type: ignore[assignment]
                if isinstance(own := getattr(part, "config", None), PreTrainedConfig):
                    own.get_text_config().sliding_window = window
            outputs.append(decoder_of(narrow)(input_ids=tokens[None] % config.vocab_size, use_cache=False)[0])
    except Exception:  # of a model of unfamiliar form
        return said
    return not torch.equal(*outputs)


def tokens_of(eos: Any, name: str) -> frozenset[int]:
    """Of an eos_token_id of transformers: one, a list, or a tensor. Raises ValueError with its name."""
    eos = eos.tolist() if hasattr(eos, "tolist") else eos
    return frozenset(integer(name, one) for one in (eos if isinstance(eos, (list, tuple)) else [eos]))


def returned_values(model: PreTrainedModel) -> int:
    """How many values the model's layers return, 0 for a tensor alone: by a pass over one token."""
    seen: list[int] = []
    model = unhooked(model)
    layer_stack(model)[0].register_forward_hook(
        lambda m, a, out: seen.append(len(out) if isinstance(out, tuple) else 0)
    )
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.long, device=model.get_output_embeddings().weight.device)
        decoder_of(model)(input_ids=token, use_cache=False)
    return seen[0]
