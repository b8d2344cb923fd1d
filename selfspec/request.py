"""What one call of generate is asked for, in the words of selfspec or of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, Concatenate, ParamSpec, TypeVar

from transformers import GenerationConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.core.options import Options, as_seed
from selfspec.core.sampling import Sampling
from selfspec.core.support import tokens_of
from selfspec.core.target import Target
from selfspec.hf_generate import from_config, stopping
from selfspec.utils.errors import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
# Of other libraries: ours
WORDS = {"max_tokens": "max_new_tokens", "stop_strings": "stop", "stop_sequences": "stop", "num_nodes": "nodes"}
_PROCESSED = "give it to transformers: spec.target.model.generate(input_ids, custom_generate=spec, {}=...)"
_OTHER_WAYS = {
    "max_length": "give max_new_tokens, which does not count the prompt",
    **dict.fromkeys(("repetition_penalty", "logits_processor", "stopping_criteria"), _PROCESSED),
    **dict.fromkeys(("min_new_tokens", "min_length", "no_repeat_ngram_size", "bad_words_ids"), _PROCESSED),
    "num_beams": "beam search is not served; leave it out",
    **dict.fromkeys(("num_return_sequences", "n"), "give the prompt several times, with a seed for each"),
    **dict.fromkeys(("eos_token_id", "pad_token_id"), "give generation_config=GenerationConfig({}=...)"),
    "streamer": "spec.stream(prompt) yields the text as it grows",
    **dict.fromkeys(("tools", "documents"), 'give the prompt as {{"messages": [...], "{}": [...]}}'),
    "enable_thinking": 'give the prompt as {{"messages": [...], "chat_template_kwargs": {{"{}": ...}}}}',
}


@dataclass(frozen=True)
class Request:
    """What `generate`, `autoregressive` and `stream` are asked for beside the prompts.

    temperature 0 is greedy; top_k, top_p and min_p warp as in transformers. seed: one int, or one per row; None draws
    one from torch's global generator, so that `torch.manual_seed` governs it (the result's `seed` names
    it); the same seed is the same text. nodes: of the draft tree at most, root included (None: 16), or "auto" (see
    `selfspec.budget.policy`). lossy: a rule that does change the output, by name (see `selfspec.core.lossy.Lossy`).
    stop: a text or several that end a row once its new text holds one of them, which stays in it. trace: keep what
    every pass did (`Generated.trace`, see `selfspec.trace`). generation_config: of transformers; what is given beside
    it wins. Without one, of the model's own the end tokens alone are read.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | Sequence[int] | None = None
    nodes: int | str | None = None
    lossy: str | None = None
    stop: str | Sequence[str] | None = None
    trace: bool = False
    generation_config: GenerationConfig | None = None

    @classmethod
    def of(cls, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
        """The request that a call's arguments are, in the words of transformers too. Raises TypeError and ValueError
        for those that say something else, with the way."""
        known = [field.name for field in fields(cls)]
        if args and isinstance(args[0], GenerationConfig):
            args, kwargs = args[1:], {**kwargs, "generation_config": args[0]}
        if odd := [name for name, value in zip(known, args, strict=False) if isinstance(value, GenerationConfig)]:
            raise TypeError(f"{odd[0]} is a GenerationConfig; give generation_config=...")
        if twice := [name for name in known[: len(args)] if name in kwargs]:
            raise TypeError(f"{twice[0]}={kwargs[twice[0]]!r} is given twice, once by its place; give it once")
        kwargs = _renamed(kwargs, dict(zip(known, args, strict=False)))
        if (config := kwargs.get("generation_config")) is not None:
            settings = from_config(config, target.model.generation_config)
            kwargs = {**{key: value for key, value in settings.items() if key not in known[: len(args)]}, **kwargs}
        for unknown in sorted(kwargs.keys() - set(known)):
            near = did_you_mean(unknown, [*known, *WORDS])
            raise TypeError(f"unknown argument {unknown!r}{near or '; there are ' + ', '.join(known)}")
        return cls(*args, **kwargs)

    def options(self, target: Target, tokenizer: Tokenizer | None, prompts: Sequence[Sequence[int]]) -> Options:
        """How the decode loop takes it. Raises ValueError for values out of range."""
        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        seed = 0 if self.seed is None and sampling.temperature == 0 else self.seed  # greedy text needs no noise
        none = self.stop is None or (isinstance(self.stop, (list, tuple)) and not self.stop)
        stops = () if none else (stopping("stop", tokenizer, self.stop, [*map(len, prompts)]),)  # type: ignore[arg-type]
        given = None if self.generation_config is None else self.generation_config.eos_token_id
        eos = target.end_tokens if given is None else tokens_of(given, "generation_config.eos_token_id")
        return Options(self.max_new_tokens, sampling, as_seed(seed), eos, stops=stops)


def taking(request: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[Concatenate[S, T, P], R]]:
    """A method (self, prompts, *args, **kwargs) has the arguments of `request`, for editors, `help` and type
    checkers."""

    def signed(method: Any) -> Any:
        own, others = inspect.signature(method), inspect.signature(request).parameters.values()
        method.__signature__ = own.replace(parameters=[*list(own.parameters.values())[:2], *others])
        return method

    return signed


def _renamed(keywords: dict[str, Any], positional: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names here, where other libraries have another word for the same. Raises TypeError for those
    that say something else, with the way."""
    words = {WORDS.get(name, name): value for name, value in keywords.items()}
    if len(words) < len(keywords):
        twice = next(name for name in keywords if name in WORDS and WORDS[name] in keywords)
        raise TypeError(f"{twice} and {WORDS[twice]} are the same; give one")
    for name, way in _OTHER_WAYS.items():
        if name in words:
            raise TypeError(f"generate takes no {name}; {way.format(name)}")
    if (sample := words.pop("do_sample", None)) is not None:
        if not isinstance(sample, bool):
            raise ValueError(f"do_sample={sample!r} must be True or False")
        warm = positional.get("temperature", words.get("temperature"))
        if warm is None and isinstance(config := words.get("generation_config"), GenerationConfig):
            words["generation_config"] = config = copy(config)  # which says how
            config.do_sample = sample
            if sample and config.temperature == 0:
                raise ValueError("do_sample=True and generation_config.temperature=0 contradict each other; give one")
            words.pop("temperature", None)
            return words
        if warm is None:
            words["temperature"] = warm = float(sample)
        if sample != (Sampling(warm).temperature > 0):
            raise ValueError(f"do_sample={sample} and temperature={warm} contradict each other; give one")
    return words
