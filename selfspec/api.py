"""selfspec.load and what it returns: a target with a drafter, ready for inference."""

from __future__ import annotations

import atexit
import inspect
import tempfile
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex
from weakref import WeakSet

import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.budget.learned import Learned
from selfspec.budget.policy import Forecast
from selfspec.checkpoints.drafter_folder import save_drafter
from selfspec.checkpoints.find import drafter_folder
from selfspec.checkpoints.hub import measured, push
from selfspec.checkpoints.loading import load_pair
from selfspec.core.contract import Drafts
from selfspec.core.generate import Added, Result, autoregressive, speculative, speculative_steps
from selfspec.core.lossy import Lossy
from selfspec.core.options import Options, check, limited
from selfspec.core.stats import Stats
from selfspec.core.target import Target
from selfspec.detokenize import Detokenizer, text_of
from selfspec.drafters.base import Drafter, Trained
from selfspec.encode import Ids, Messages, Prompts, encode
from selfspec.hf_generate import SpeculativeOutput, arguments_of_generate, options_of, refuse, returned, stopping, unpad
from selfspec.output import Generated
from selfspec.request import WORDS, Request, taking
from selfspec.trace import Tracer
from selfspec.utils.errors import did_you_mean
from selfspec.utils.files import Figures

_streams: WeakSet[Generator[str]] = WeakSet()  # that may still be open
NODES = 16  # nodes per tree unless asked for otherwise
_LOADING = ("device_map",)  # of from_pretrained, though near to a name of `load`


class Spec:
    """A frozen target and its drafter, usable from several threads. `target.model` is the stock transformers model, and
    can be used beside it."""

    def __init__(
        self, target: Target, drafter: Drafter, tokenizer: Tokenizer | None = None, source: Path | None = None
    ) -> None:
        """source: the drafter's folder, where it was loaded from one."""
        self.target, self.drafter, self.tokenizer, self.source = target, drafter.eval(), tokenizer, source
        self._learned = Learned(target)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a Spec can not be copied or pickled; threads share it, another process calls selfspec.load")

    @taking(Request)
    def generate(self, prompts: Prompts, *args: Any, **kwargs: Any) -> Generated:
        """Continue a prompt or a list of them: texts, lists of token ids, or conversations (lists of messages with
        `role` and `content`), which are answered. Further arguments are those of `selfspec.request.Request`:
        generate("def f(", max_new_tokens=64, temperature=1.0, seed=7).

        The tokens are those of `autoregressive` with the same arguments and seed. A row ends at an EOS token (which is
        returned), after max_new_tokens, or, with a warning, at the target's last position. Raises ValueError for
        arguments out of range and for empty or too long prompts.
        """
        asked, encoded, options = self._asked(prompts, args, kwargs)
        rule = None if asked.lossy is None else Lossy(asked.lossy)
        drafter, most, forecast = self._budget(asked, len(encoded))
        tracer = self._tracer(asked, encoded, options, self.drafter.sources) if asked.trace else None
        result = speculative(self.target, encoded, replace(options, relaxed=rule, watch=tracer), drafter, most)
        return self._generated(result, options, rule, forecast, tracer)

    @taking(Request)
    def autoregressive(self, prompts: Prompts, *args: Any, **kwargs: Any) -> Generated:
        """The same by plain decoding, one token per pass: the oracle. `nodes` and `lossy` are accepted and have no
        effect: this is always the exact output."""
        asked, encoded, options = self._asked(prompts, args, kwargs)
        tracer = self._tracer(asked, encoded, options, ()) if asked.trace else None
        result = autoregressive(self.target, encoded, replace(options, watch=tracer))
        return self._generated(result, options, tracer=tracer)

    def _generated(
        self,
        result: Result,
        options: Options,
        rule: Lossy | None = None,
        forecast: Forecast | None = None,
        tracer: Tracer | None = None,
    ) -> Generated:
        self._learned.add_call(result.stats)
        if forecast is not None:
            self._learned.drop_stale_costs(result.stats, len(result.token_ids), options.sampling.temperature > 0)
        made = ["" if self.tokenizer is None else text_of(self.tokenizer, row) for row in result.token_ids]
        parts = result.token_ids, made, result.from_draft, result.stats, options.seed
        trace = None if tracer is None else tracer.trace(result.stats)
        reasons = ["stop" if stopped else "length" for stopped in result.stopped]
        return Generated(*parts, rule, forecast, trace, self.tokenizer, reasons)

    def _tracer(self, asked: Request, prompts: list[list[int]], options: Options, sources: tuple[str, ...]) -> Tracer:
        nodes = (asked.nodes or self.target.width or NODES) if sources else 1
        header: Figures = {"drafter": "+".join(sources) or "plain", "sources": list(sources), "nodes": nodes}
        header["lossy"] = asked.lossy if sources else None
        return Tracer(self.target, self.tokenizer, prompts, options, header)

    def __repr__(self) -> str:
        dtype, device = self.target.dtype_name, self.target.device
        count = sum(p.numel() for p in self.drafter.trained().values()) / 1e6
        name = "+".join(self.drafter.sources)
        drafter = f"{name} of {count:.1f}M" if count else name
        return f"Spec(target={self.target.name!r}, drafter={drafter}, dtype={dtype}, device={device})"

    @taking(Request)
    def stream(self, prompt: str | Ids | Messages, *args: Any, **kwargs: Any) -> Iterator[str]:
        """Continue one prompt and yield its text pass by pass; the pieces joined are the text of `generate`."""
        if self.tokenizer is None:
            raise ValueError(f"target {self.target.name!r} has no tokenizer to make text; use generate")
        asked, encoded, options = self._asked(prompt, args, kwargs)
        if len(encoded) != 1:
            raise ValueError(f"stream takes one prompt, not {len(encoded)}; use generate")
        if asked.lossy is not None:
            raise ValueError(f"lossy={asked.lossy!r} can not be streamed: nobody would see that it is; use generate")
        if asked.trace:
            raise ValueError("stream yields text alone; use generate(..., trace=True)")
        drafter, most, _ = self._budget(asked, 1)
        result = Result.of(1)
        steps = speculative_steps(self.target, encoded, options, drafter, most, result)
        pieces = self._text_pieces(steps, result.stats)
        _streams.add(pieces)
        return pieces

    def push_to_hub(
        self,
        repo: str,
        results: str | Path | Sequence[str | Path] = (),
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        dry_run: str | Path | None = None,
    ) -> str:
        """Upload the drafter to the hub repository `repo`, with a card. What is uploaded is the folder that it was
        loaded from. results: run folders of eval/decode.py, whose figures go into the card; the rest as in
        `selfspec.checkpoints.hub.push`. Returns where it is.

        Raises ValueError for a drafter that has nothing to upload: several joined, or one that trains nothing.
        """
        if not isinstance(self.drafter, Trained):
            raise ValueError(f"{'+'.join(self.drafter.sources)} has no checkpoint of its own; load one trained drafter")
        places = [results] if isinstance(results, (str, Path)) else results
        with tempfile.TemporaryDirectory() as scratch:
            folder = self.source or Path(scratch) / "drafter"
            if self.source is None:
                save_drafter(self.drafter, folder, self.target, self.target.name, self.tokenizer, "")
            points = measured([Path(place) for place in places], folder, drafter_folder)
            return push(folder, repo, points, private, revision, token, None if dry_run is None else Path(dry_run))

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        generation_config: GenerationConfig | None = None,
        seed: int | Sequence[int] | None = None,
        nodes: int | str | None = None,
        lossy: str | None = None,
        stop_strings: str | list[str] | None = None,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> SpeculativeOutput | torch.Tensor:
        """`model.generate(..., custom_generate=spec)` for `model` = `spec.target.model`: what generate's own decoding
        methods do, with their arguments, prompts padded on either side (see `selfspec.hf_generate`).

        `seed`, `nodes` and `lossy` may be given to generate as further arguments. Noise comes from `seed`, or else from
        torch's global generator; every row, so every return sequence, has its own. Raises ValueError for modes,
        arguments and processors that can not be served, naming them.
        """
        target, config = self.target, generation_config or self.target.model.generation_config
        rule = None if lossy is None else Lossy(lossy)
        outer = arguments_of_generate(model)
        streamer = streamer or outer.get("streamer")
        refuse(target, model, len(input_ids), config, logits_processor, outer, model_kwargs)
        rows, width = input_ids.shape
        if streamer is not None and rows > 1:
            raise ValueError(f"streamer: a streamer takes one sequence, here are {rows}; generate them one by one")
        prompts, pads = unpad(input_ids, model_kwargs.get("attention_mask"))
        if stop_strings:  # named above, since generate hands over what it finds named and checks the rest itself
            if self.tokenizer is None:
                why = "set it: transformers does not hand over the tokenizer that generate was given"
                raise ValueError(f"stop_strings={stop_strings!r} needs spec.tokenizer, which is None; {why}")
            stopping_criteria = [*stopping_criteria, stopping("stop_strings", self.tokenizer, stop_strings)]
        options = options_of(config, seed, width, logits_processor, stopping_criteria, pads, rule)
        if (warning := limited(target, prompts, options.max_new_tokens)) is not None:
            warnings.warn(f"{warning}; transformers' own decoding may go on", stacklevel=3)
        check(target, prompts, options)
        # Who drafts is asked once nothing is left to refuse: it may have to measure, which is no decoding
        drafter, most, _ = self._budget(Request(2**31, float(bool(config.do_sample)), nodes=nodes), rows)
        result = Result.of(rows)
        for added in speculative_steps(target, prompts, options, drafter, most, result):
            for _, tokens, _ in added if streamer is not None else ():
                streamer.put(torch.tensor(tokens))
        if streamer is not None:
            streamer.end()
        self._learned.add_call(result.stats)
        return returned(input_ids, result, config, rule)

    def _asked(
        self, prompts: Prompts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Request, list[list[int]], Options]:
        """Request, prompts as token ids, and options, all checked."""
        asked = Request.of(self.target, args, kwargs)
        options = asked.options(self.target, self.tokenizer, encoded := self.encode(prompts))
        if (warning := limited(self.target, encoded, options.max_new_tokens)) is not None:
            warnings.warn(warning, stacklevel=3)
        return asked, encoded, options

    def _budget(self, asked: Request, rows: int) -> tuple[Drafts, int, Forecast | None]:
        """Who drafts, with how many nodes at most; with "auto", what it expects of the call."""
        nodes = asked.nodes
        if not isinstance(nodes, str):
            return self.drafter, self.target.width or NODES if nodes is None else nodes, None
        if nodes != "auto":
            raise ValueError(f"nodes={nodes!r} must be a number or 'auto'")
        if (width := self.target.width) is not None:
            raise ValueError(f"nodes='auto' sizes passes, which width={width} fixes; leave nodes out")
        return self._learned.budget(self.drafter, rows, asked.temperature > 0, asked.max_new_tokens)

    def _text_pieces(self, steps: Iterator[Added], stats: Stats) -> Generator[str]:
        assert self.tokenizer is not None
        text = Detokenizer(self.tokenizer)
        self.target.check()  # again: it may be read long after it was made
        try:
            with closing(steps):  # type: ignore[type-var]
                for step in steps:
                    if piece := text.add(step[0][1]):
                        yield piece
        finally:  # also of one that nobody reads to its end
            self._learned.add_call(stats)
        if piece := text.rest():
            yield piece

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Token ids of prompts; see `selfspec.encode.encode`."""
        return encode(prompts, self.tokenizer, self.target.name)


@atexit.register
def _close_streams() -> None:
    """Streams that are left open end while what they need is still there."""
    for stream in list(_streams):
        with suppress(ValueError):  # another thread is in it
            stream.close()


def load(
    drafter: str | Path,
    target: str | Path | PreTrainedModel | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    engine: str = "auto",
    revision: str | None = None,
    trust_code: bool = False,
    width: int | None = None,
    **loading: Any,
) -> Spec:
    """Load a drafter and its target for inference.

    drafter: an embedded name such as "tiny-medusa", a run folder, a hub id, a kind that needs no training
    ("prompt_lookup", "lookahead"; give `target` then), or several of these joined by "+", which share one tree; target:
    where to find the target instead of the place the drafter names, or the model itself (its weights must be the same);
    dtype: of the target and the drafter, by default as saved; int8 quantizes the target's linear maps on the CPU;
    device: of a target that is loaded here (None, auto: CUDA where it works, else the CPU); engine: eager, or compiled,
    which compiles every shape of a pass on first use and keeps the code for later processes (auto: compiled where a
    compiler is found; on CPUs passes first run eagerly, and a thread compiles once they have taken 20 s); revision: of
    a drafter on the hub, else of the target there; trust_code: whether a checkpoint may name a drafter class of another
    package, which is then imported; width: nodes of every pass, plain ones included, which makes 16-bit dtypes exact on
    library kernels too (docs/exactness.md); `loading` goes to transformers' from_pretrained (device_map,
    attn_implementation, ...).

    Raises FileNotFoundError and ValueError, naming what is wrong.
    """
    if "torch_dtype" in loading:  # transformers' older name for it
        if dtype != "auto":
            raise ValueError(f"dtype={dtype!r} and torch_dtype={loading['torch_dtype']!r} were both given; give one")
        dtype = loading.pop("torch_dtype")
    known = list(inspect.signature(load).parameters)[:-1]
    if "gguf_file" in loading:
        raise TypeError(f"load has no argument 'gguf_file'; give the path: target={loading['gguf_file']!r}")
    for name in loading:
        if name not in _LOADING and (near := did_you_mean(name, known)):
            raise TypeError(f"load has no argument {name!r}{near}")
        if name in {*(f.name for f in fields(Request)), *WORDS}:
            raise TypeError(f"{name} is an argument of generate: spec.generate(..., {name}={loading[name]!r})")
    if not isinstance(drafter, (str, Path)) or not str(drafter):
        raise ValueError(f"drafter={drafter!r} must be an embedded name, a run folder, a hub id, or such joined by +")
    return Spec(*load_pair(str(drafter), target, dtype, device, engine, revision, trust_code, width, **loading))
