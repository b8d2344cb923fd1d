"""The way in from transformers: `model.generate(..., custom_generate=spec)`.

What comes back is what generate returns, with `stats` and `from_draft` beside it, but without the cache: the
cache of trees is selfspec's own and ends with the call.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, LogitsProcessor, MaxLengthCriteria, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode, StoppingCriteria

from selfspec.core.generate import Result
from selfspec.core.options import Options, as_seed
from selfspec.core.sampling import Sampling
from selfspec.core.stats import Stats
from selfspec.core.support import CACHE_NAMES
from selfspec.core.target import Target
from selfspec.core.verify import Relaxed
from selfspec.detokenize import StopStrings

# These keep a state that they expect to advance by one token a call, or run the model themselves.
_STATEFUL = (
    "AlternatingCodebooksLogitsProcessor",
    "BarkEosPrioritizerLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperNoSpeechDetection",
    "WhisperTimeStampLogitsProcessor",
)
# What generate hands over beside the prompt and does not change what is generated.
_HARMLESS = ("attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep")


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """transformers' output and ours. stats: see `selfspec.core.stats.Stats`; from_draft: bool [B, new tokens], whether
    the draft tree held the token; lossy: the rule that changed the output, where one was asked for. In scores and
    logits, rows that have ended hold zeros."""

    stats: Stats | None = None
    from_draft: Tensor | None = None
    lossy: Relaxed | None = None


def options_of(
    config: GenerationConfig,
    seed: int | Sequence[int] | None,
    width: int,
    processors: Sequence[LogitsProcessor],
    criteria: Sequence[StoppingCriteria],
    pads: list[list[int]],
    relaxed: Relaxed | None,
) -> Options:
    """What the decode loop is asked for. width: of the padded prompts, which max_length counts."""
    # A criterion given by the user stands in the list instead of the one from the config.
    limits = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
    ends = {int(t) for c in criteria if isinstance(c, EosTokenCriteria) for t in c.eos_token_id}
    if not limits:
        raise ValueError(
            "spec(...) was called without a max_length among its stopping_criteria; it is meant to be called by "
            "model.generate(..., custom_generate=spec); call spec.generate(prompts) by hand"
        )
    if seed is None and not config.do_sample:
        seed = 0  # greedy decoding leaves torch's generator as it was
    return Options(
        min(limits) - width,
        sampling_of(config, None),  # not the warpers, which are given, but what they must satisfy
        as_seed(seed),
        frozenset(ends),
        processors=list(processors),
        stops=[c for c in criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))],
        pads=pads,
        relaxed=relaxed,
        record=bool(config.return_dict_in_generate and (config.output_scores or config.output_logits)),
    )


def returned(
    input_ids: Tensor, result: Result, config: GenerationConfig, lossy: Relaxed | None
) -> SpeculativeOutput | Tensor:
    """What generate returns: prompts and new tokens, padded behind as transformers pads them."""
    eos, new, records = config.eos_token_id, result.token_ids, result.records
    eos = eos.tolist() if isinstance(eos, Tensor) else eos
    first = eos[0] if isinstance(eos, list) and eos else eos  # what it pads with where there is no pad token
    pad = config.pad_token_id if config.pad_token_id is not None else (first or 0)
    longest = max(map(len, new))
    tail = torch.tensor([row + [pad] * (longest - len(row)) for row in new], device=input_ids.device)
    sequences = torch.cat([input_ids, tail.to(input_ids.dtype)], 1)
    if not config.return_dict_in_generate:
        return sequences
    drafted = [row + [False] * (longest - len(row)) for row in result.from_draft]
    return SpeculativeOutput(
        sequences=sequences,  # type: ignore[arg-type]
        logits=_per_step(records, 0, longest) if config.output_logits else None,  # type: ignore[arg-type]
        scores=_per_step(records, 1, longest) if config.output_scores else None,  # type: ignore[arg-type]
        stats=result.stats,
        from_draft=torch.tensor(drafted, device=input_ids.device),
        lossy=lossy,
    )


def arguments_of_generate(model: PreTrainedModel) -> dict[str, Any]:
    """The arguments of the `generate` we were called from: it keeps streamer and assistant_model to itself on the way
    to a custom method, after it has already put the prompt into the streamer."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model:
            return frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def refuse(
    target: Target,
    model: PreTrainedModel,
    rows: int,
    config: GenerationConfig,
    processors: Sequence[LogitsProcessor],
    outer: dict[str, Any],
    model_kwargs: dict[str, Any],
) -> None:
    if model is not target.model:
        raise ValueError("custom_generate=spec was given to another model than spec.target.model; call that one")
    prepare = vars(model).get("prepare_inputs_for_generation")
    if prepare is not None and getattr(prepare, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise ValueError(
            "soft prompts (PEFT's prompt or prefix tuning) replace the model's inputs, which custom_generate=spec does "
            "not see; merge them into the model, or use adapters inside its layers, such as LoRA"
        )
    hooks = [hook for part in model.modules() for hook in part._forward_pre_hooks.values()]
    names = {getattr(getattr(hook, "func", None), "__name__", "") for hook in hooks}  # PEFT's, during its generate
    if "_alora_offsets_pre_forward_hook" in names:
        raise ValueError("aLoRA adapters turn on inside a text, which the passes of a tree do not follow")
    if "_adapter_names_pre_forward_hook" in names and rows > 1:
        raise ValueError(
            f"adapter_names for {rows} rows, which end at different times while PEFT counts them; give one row, or "
            "the rows of each adapter together (set_adapter)"
        )
    mode = config.get_generation_mode(outer.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"generation mode {mode.value} can not be served; speculative decoding is greedy or samples")
    if outer.get("synced_gpus"):
        raise ValueError("synced_gpus can not be used with custom_generate=spec: rows take passes of their own number")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ValueError("output_attentions and output_hidden_states can not be returned by custom_generate=spec")
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(f"cache_implementation={config.cache_implementation!r}: trees need selfspec's own cache")
    for processor in processors:
        if type(processor).__name__ in _STATEFUL:
            raise ValueError(
                f"{type(processor).__name__} (guidance_scale, SynthID watermarks, audio) advances a state token by "
                "token, so it can not score the nodes of a tree"
            )
    for name in CACHE_NAMES:
        model_kwargs.pop(name, None)  # the empty one that generate always makes
        if outer.get("kwargs", {}).get(name) is not None:
            raise ValueError(f"{name}: trees need selfspec's own cache; give the whole text as input_ids instead")
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is not None and not _plain_positions(positions, mask):
        raise ValueError(
            "position_ids are packed or shifted; custom_generate=spec counts each row's own tokens from 0: leave "
            "position_ids out, and give packed texts as rows of their own"
        )
    for name, value in model_kwargs.items():
        none = value is None or (isinstance(value, dict) and not value)  # what generate gives to models that see
        if not none and name not in _HARMLESS:
            raise ValueError(f"{name} can not be used with custom_generate=spec, which takes text alone")


def _plain_positions(positions: Tensor, mask: Tensor | None) -> bool:
    """Whether every token that is no padding has the number of tokens before it as its position."""
    visible = torch.ones_like(positions) if mask is None else mask.to(positions)
    if positions.shape != visible.shape and positions.shape[0] == 1:
        positions = positions.expand_as(visible)
    return positions.shape == visible.shape and bool(((positions == visible.cumsum(-1) - 1) | (visible == 0)).all())


def unpad(input_ids: Tensor, mask: Tensor | None) -> tuple[list[list[int]], list[list[int]]]:
    """Each row's own tokens, and the padding that stood beside them."""
    if mask is None:
        return input_ids.tolist(), [[] for _ in input_ids]
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask has the shape {list(mask.shape)}, input_ids {list(input_ids.shape)}")
    prompts, pads = [], []
    for row, (ids, visible) in enumerate(zip(input_ids.tolist(), mask.bool().tolist(), strict=True)):
        if True not in visible:
            raise ValueError(f"prompt {row} is empty: its attention_mask is all zero")
        first, last = visible.index(True), len(visible) - visible[::-1].index(True)
        if not all(visible[first:last]):
            raise ValueError(f"attention_mask of prompt {row} has a gap; padding may stand on the left or the right")
        prompts.append(ids[first:last])
        pads.append(ids[:first] + ids[last:])
    return prompts, pads


def stopping(
    name: str, tokenizer: Tokenizer | None, strings: str | Sequence[str], prompts: Sequence[int] = ()
) -> StopStrings:
    """What ends a row once it holds one of the strings. name: of the argument; prompts: see `StopStrings`. Raises
    ValueError without a tokenizer, and for what is no text."""
    if tokenizer is None:
        raise ValueError(f"{name}={strings!r} needs a tokenizer, which the target has not")
    strings = [strings] if isinstance(strings, str) else strings
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise ValueError(f"{name}={strings!r} must be a string or a list of strings")
    for string in strings:
        if not string:
            raise ValueError(f"{name} holds an empty string; give at least one character")
        if any(0xD800 <= ord(character) < 0xE000 for character in string):
            raise ValueError(f"{name}: the tokenizer can not produce {string!r}, which is no Unicode text")
    return StopStrings(tokenizer, strings, prompts)


def _per_step(records: list[list[tuple[Tensor, Tensor]]], which: int, steps: int) -> tuple[Tensor, ...]:
    """Per generated token one float32 tensor [B, V]."""
    some = next(row[0][which] for row in records if row)
    return tuple(
        torch.stack([row[i][which] if i < len(row) else torch.zeros_like(some) for row in records]).float()
        for i in range(steps)
    )


# Of a GenerationConfig: how tokens are drawn, with what transformers takes where neither a call nor the model says
_DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}
_UNSERVED = {"token_healing": "heal the prompt before, without its last token"}  # by no entry, and the way on
_SERVED = {"max_new_tokens": "max_new_tokens", "stop_strings": "stop"}  # by the names of `Request`
# Of a model's own config: what changes tokens and is not served
_CHANGING = (
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("sequence_bias", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
    *("min_length", "min_new_tokens", "num_beams", "guidance_scale", "watermarking_config", "stop_strings"),
)
_SILENT = ("transformers_version", "do_sample", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache")
# Settings that have no effect at this value
_ONE = ("num_beams", "num_return_sequences", "repetition_penalty", "length_penalty", "typical_p")
_ZERO = ("no_repeat_ngram_size", "min_length", "min_new_tokens", "epsilon_cutoff", "eta_cutoff")


def sampling_of(config: GenerationConfig, own: GenerationConfig | None) -> Sampling:
    """How transformers draws tokens with a config. own: the model's, which says what the config leaves open."""

    def setting(name: str, default: Any) -> Any:
        values = (getattr(one, name, None) for one in (config, own))
        return next((value for value in values if value is not None), default)

    if not setting("do_sample", False):
        return Sampling()
    return Sampling(**{name: setting(name, default) for name, default in _DRAWN.items()})


def from_config(config: GenerationConfig, own: GenerationConfig | None) -> dict[str, Any]:
    """The arguments that a GenerationConfig of transformers stands for, beside its EOS ids. own: the model's, see
    `sampling_of`. Raises ValueError naming a setting that is not served here."""
    if not isinstance(config, GenerationConfig):
        raise ValueError(f"generation_config is a {type(config).__name__}; give transformers' GenerationConfig")
    given = {key: value for key, value in config.to_diff_dict().items() if value is not None}
    taken = *_CHANGING, "max_new_tokens"
    theirs = {} if own is None else {key: value for key, value in own.to_diff_dict().items() if key in taken}
    both = {key: value for key, value in {**theirs, **given}.items() if value is not None}
    found = {ours: both.pop(key) for key, ours in _SERVED.items() if key in both}
    if config.do_sample and config.temperature == 0:
        raise ValueError("generation_config: do_sample=True and temperature=0 contradict each other; give one")
    sampling = sampling_of(config, own)
    found |= {name: value for name in _DRAWN if (value := getattr(sampling, name)) is not None}
    for key, value in sorted(both.items()):
        nothing = value is False or (key in _ONE and value == 1) or (key in _ZERO and value == 0)
        if not nothing and key not in (*_SILENT, *_DRAWN) and key[0] != "_":
            whose = "" if key in given else " of the model's own"
            more = "spec.target.model.generate(..., custom_generate=spec) serves more of transformers' settings"
            what = f"{key}={value!r}{whose}, which generate does not take"
            if whose and key in (*_ONE, *_ZERO):
                more = f"give {key}={int(key in _ONE)} in yours to leave it out, or {more}"
            raise ValueError(f"generation_config has {what}; {_UNSERVED.get(key, more)}")
    return found
