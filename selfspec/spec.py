"""selfspec.load and what it returns: a target with trained heads, ready for inference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
)

from selfspec.budget import LARGEST, Auto, Forecast, Seen, pass_costs
from selfspec.checkpoint import check_tokenizer, drafter_class, load_drafter, read_meta
from selfspec.custom_generate import SpeculativeOutput, custom_generate
from selfspec.drafters.base import Drafter
from selfspec.families import probe
from selfspec.generate import Added, autoregressive, speculative, speculative_steps
from selfspec.lossy import Lossy
from selfspec.options import Options, as_seed, check, integer
from selfspec.sampling import Sampling
from selfspec.stats import Stats
from selfspec.target import Target

ASSETS = Path(__file__).parent / "assets"
NODES = 16  # nodes per tree unless asked for otherwise


@dataclass
class Generated:
    """token_ids: the new tokens of each row; texts: the same, decoded (empty strings without a tokenizer);
    from_draft: for each token whether the draft tree held it; stats: see `selfspec.stats.Stats`; lossy: the rule that
    changed the output, where one was asked for by name, and how many tokens it altered; forecast: with nodes="auto",
    how many nodes were chosen and what was expected of them."""

    token_ids: list[list[int]]
    texts: list[str]
    from_draft: list[list[bool]]
    stats: Stats
    lossy: Lossy | None = None
    forecast: Forecast | None = None


class Spec:
    """A frozen target and its drafter. `target.model` is the stock transformers model."""

    def __init__(self, target: Target, drafter: Drafter, tokenizer: Any = None) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter.eval(), tokenizer
        self._costs: dict[tuple[bool, int], list[float]] = {}
        self._seen: dict[tuple[bool, int], Seen] = {}

    def _budget(
        self, nodes: int | str | None, rows: int, sampled: bool, limit: int
    ) -> tuple[Any, int, Forecast | None]:
        """Who drafts, with how many nodes at most; with "auto", what it expects of the call."""
        if not isinstance(nodes, str):
            return self.drafter, NODES if nodes is None else nodes, None
        if nodes != "auto":
            raise ValueError(f"nodes={nodes!r} must be a number or 'auto'")
        key = (sampled, rows)
        if key not in self._costs:
            self._costs[key] = pass_costs(self.target, rows, sampled)
        forecast, seen = Forecast(), self._seen.setdefault(key, Seen())
        auto = Auto(self.drafter, self._costs[key], seen, forecast, rows, limit)
        return auto, LARGEST, forecast

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | Sequence[int] = 0,
        nodes: int | str | None = None,
        lossy: str | None = None,
    ) -> Generated:
        """Continue a batch of prompts (texts, or lists of token ids) by speculative decoding.

        The tokens are those of `autoregressive` with the same arguments. temperature 0 is greedy; seed is one int, or
        one per row; nodes bounds the draft tree, root included, or is "auto" (see `selfspec.budget`). A row ends at an
        EOS token (which is returned), after max_new_tokens, or at the target's last position. `lossy` names a rule that
        does change the output, see `selfspec.lossy.Lossy`. Raises ValueError for arguments out of range and for empty
        or too long prompts.
        """
        options = self._options(max_new_tokens, Sampling(temperature, top_k, top_p, min_p), seed)
        rule = None if lossy is None else Lossy(lossy)
        encoded = self.encode(prompts)
        check(self.target, encoded, options)  # before costs are measured
        drafter, most, forecast = self._budget(nodes, len(encoded), temperature > 0, max_new_tokens)
        result = speculative(self.target, encoded, replace(options, relaxed=rule), drafter, most)
        texts = self._decode(result.token_ids)
        return Generated(result.token_ids, texts, result.from_draft, result.stats, rule, forecast)

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
        """`model.generate(..., custom_generate=spec)` for `model` = `spec.target.model`: see `custom_generate`.

        `seed`, `nodes` and `lossy` may be given to generate as further arguments. Without a seed, sampling draws one
        from torch's global generator. Raises ValueError for what can not be served.
        """
        config = generation_config or self.target.model.generation_config
        rule = None if lossy is None else Lossy(lossy)
        drafter, most, _ = self._budget(nodes, len(input_ids), bool(config.do_sample), 2**31)
        return custom_generate(
            self.target,
            drafter,
            self.tokenizer,
            most,
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            config,
            seed,
            stop_strings,
            streamer,
            rule,
            **model_kwargs,
        )

    def autoregressive(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | Sequence[int] = 0,
        nodes: int | str | None = None,
        lossy: str | None = None,
    ) -> Generated:
        """The same by plain decoding, one token per pass: the oracle. `nodes` and `lossy` are accepted and have no
        effect: this is always the exact output."""
        options = self._options(max_new_tokens, Sampling(temperature, top_k, top_p, min_p), seed)
        result = autoregressive(self.target, self.encode(prompts), options)
        return Generated(result.token_ids, self._decode(result.token_ids), result.from_draft, result.stats)

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | Sequence[int] = 0,
        nodes: int | str | None = None,
    ) -> Iterator[str]:
        """Continue one prompt and yield its text pass by pass; the pieces joined are the text of `generate`."""
        if self.tokenizer is None:
            raise ValueError(f"target {self.target.name!r} has no tokenizer to make text; use generate")
        options = self._options(max_new_tokens, Sampling(temperature, top_k, top_p, min_p), seed)
        encoded = self.encode([prompt])  # type: ignore[arg-type, list-item]
        check(self.target, encoded, options)
        drafter, most, _ = self._budget(nodes, 1, temperature > 0, max_new_tokens)
        steps = speculative_steps(self.target, encoded, options, drafter, most, Stats())
        return self._text_pieces(steps)

    def _text_pieces(self, steps: Iterator[Added]) -> Iterator[str]:
        ids: list[int] = []
        shown = ""
        for step in steps:
            ids += step[0][1]
            text = self._decode([ids])[0]
            if not text.endswith("\ufffd"):  # the rest of a character may be in the next token
                yield text[len(shown) :]
                shown = text
        if len(rest := self._decode([ids])[0]) > len(shown):
            yield rest[len(shown) :]

    def encode(self, prompts: Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
        """Token ids of prompts. Raises ValueError for one string instead of a list, and for an empty prompt."""
        if isinstance(prompts, str):
            raise ValueError('prompts is one string; give a list: ["..."]')
        encoded = []
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, int):
                raise ValueError("prompts is one list of token ids; give a list of them: [[...]]")
            if prompt is None or isinstance(prompt, (bytes, dict, float)):
                raise ValueError(f"prompt {i} is {type(prompt).__name__}; give text or a list of token ids")
            if isinstance(prompt, str):
                if self.tokenizer is None:
                    raise ValueError(f"prompt {i} is text, but target {self.target.name!r} has no tokenizer; give ids")
                if not prompt:
                    raise ValueError(f"prompt {i} is empty; give at least one character")
                if any(0xD800 <= ord(character) < 0xE000 for character in prompt):
                    raise ValueError(f"prompt {i} holds a lone surrogate, which is no Unicode text; decode it as UTF-8")
                encoded.append(list(self.tokenizer(prompt)["input_ids"]))
            else:
                encoded.append([integer(f"prompt {i}: token id", token) for token in prompt])
        return encoded

    def _decode(self, rows: list[list[int]]) -> list[str]:
        if self.tokenizer is None:
            return ["" for _ in rows]
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]

    def _options(self, max_new_tokens: int, sampling: Sampling, seed: int | Sequence[int]) -> Options:
        return Options(max_new_tokens, sampling, as_seed(seed), end_tokens(self.target))


def end_tokens(target: Target) -> frozenset[int]:
    """The EOS ids of the target's generation config."""
    eos = target.model.generation_config.eos_token_id if target.model.generation_config is not None else None
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def resolve(name: str) -> str:
    """An embedded asset's folder by its name (`tiny-target`, `tiny-medusa`); any other name as it is."""
    return str(ASSETS / name) if (ASSETS / name).is_dir() and "/" not in name else name


def load_target(
    source: str | Path | PreTrainedModel,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    revision: str | None = None,
    **loading: Any,
) -> tuple[Target, Any]:
    """A target and its tokenizer (None where it has none) by embedded name, folder or hub id, or a model already
    loaded (PEFT adapters on it are then part of the target; it is frozen, set to eval and, where asked, cast and moved
    in place). `loading` goes to transformers' from_pretrained: device_map, quantization_config, attn_implementation and
    the like.

    A probe runs a small tree against plain passes. Raises ValueError for models that trees can not be verified on;
    FileNotFoundError for a folder without a model.
    """
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and kind not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"dtype={dtype!r} must be auto, bfloat16, float16, float32 or float64")
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device={device!r} can not be used here: {error}") from error
    model: Any
    if isinstance(source, (str, Path)):
        path = resolve(str(source))
        if not (Path(path) / "config.json").is_file() and (Path(path).is_dir() or _is_path(path)):
            raise FileNotFoundError(f"target {str(source)!r}: {path} has no config.json")
        config = AutoConfig.from_pretrained(path, revision=revision)
        if config.is_encoder_decoder:
            raise ValueError(f"target {str(source)!r} is an encoder-decoder; selfspec serves decoder-only models")
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", revision=revision, config=config, **loading)
    else:
        if loading:
            raise ValueError(f"{', '.join(loading)} can not be applied to a target that is loaded already")
        adapter = getattr(source, "active_peft_config", None)
        if adapter is not None and adapter.is_prompt_learning:
            raise ValueError(
                f"target has a {adapter.peft_type.value} adapter, which lives outside the model's layers; only "
                "adapters inside them (such as LoRA) can be part of a target"
            )
        model = getattr(source, "get_base_model", lambda: source)()  # a PEFT model's own, its adapters inside it
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"target is a {type(model).__name__}; give a name, a folder or a transformers model")
        path = str(model.config.name_or_path)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("target has weights on disk or on the meta device; trees need all of them in memory")
    target = Target(model)
    if kind is not None and kind != target.dtype:
        target.fingerprint = target.checksum(torch.bfloat16)  # float16 would round what it can not hold
        model.to(kind)
    if device is not None:
        model.to(device)
    probe(target)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision) if path else None
    except (OSError, ValueError):
        tokenizer = None
    return target, tokenizer


def load_tokenizer(name: str) -> Any:
    """A tokenizer by an embedded target's name, a folder or a hub id. Raises ValueError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(resolve(name))
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer at {name!r}: {error}") from error


def _is_path(name: str) -> bool:
    """Whether a name can only be meant as a path: no hub id looks so."""
    return name.count("/") != 1 or name.startswith((".", "/", "~", "runs/"))


def drafter_folder(name: str) -> Path:
    """Where a drafter lies: an embedded name, a run folder (its `drafter`), a drafter's own folder, or a hub id.

    Raises FileNotFoundError where there is none.
    """
    for folder in (Path(resolve(name)) / "drafter", Path(resolve(name))):
        if (folder / "drafter.json").is_file():
            return folder
    if Path(name).exists() or _is_path(name):
        embedded = ", ".join(sorted(p.name for p in ASSETS.iterdir() if (p / "drafter.json").is_file()))
        raise FileNotFoundError(
            f"no drafter at {name!r}: expected drafter/drafter.json or drafter.json there, a hub id owner/name, or one "
            f"of the embedded {embedded}, or prompt_lookup or lookahead, which need no training (join several by +)"
        )
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name))


def joined(name: str) -> str | list[str]:
    """`a+b` as a list of names; any other name as it is."""
    return name.split("+") if "+" in name and not Path(name).exists() else name


def find_drafter(name: str, target: Target, tokenizer: Any = None) -> Drafter:
    """A drafter for this target by the name of a kind that needs no training, or of a checkpoint (`drafter_folder`).

    Raises ValueError for a checkpoint of another target and for a kind that has to be trained; FileNotFoundError for a
    name that stands for nothing.
    """
    if (kind := untrained(name)) is not None:
        return kind(target).eval()
    return load_drafter(drafter_folder(name), target, tokenizer)


def untrained(name: str) -> type[Drafter] | None:
    """The kind of drafter of this name, where it works without a checkpoint. Raises ValueError where a kind of this
    name needs one and no checkpoint has the name."""
    if (Path(name) / "drafter.json").is_file() or (Path(name) / "drafter").is_dir():
        return None
    try:
        kind = drafter_class(name)
    except ValueError:
        return None
    if not kind.free:
        how = "give the list of its drafters" if name == "hybrid" else f"train it: train/heads.py drafter={name}"
        raise ValueError(f"drafter {name!r} is a kind that is nothing by itself; {how}")
    return kind


def load(
    drafter: str | Path | Sequence[str | Path],
    target: str | Path | PreTrainedModel | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    **loading: Any,
) -> Spec:
    """Load a drafter and its target for inference.

    drafter: an embedded name such as "tiny-medusa", a run folder, a hub id, a kind that needs no training
    ("prompt_lookup", "lookahead"; give `target` then), or several of these that share one tree, as a list or joined by
    "+"; target: where to find the target instead of the place the heads name, or the model itself (its weights must be
    the same); dtype: of the target and the heads, by default as saved; `loading` goes to transformers' from_pretrained
    (device_map, attn_implementation, ...). Raises FileNotFoundError and ValueError as `load_drafter` and `load_target`
    do.
    """
    if "torch_dtype" in loading:  # transformers' older name for it
        if dtype != "auto":
            raise ValueError(f"dtype={dtype!r} and torch_dtype={loading['torch_dtype']!r} were both given; give one")
        dtype = loading.pop("torch_dtype")
    drafter = joined(drafter) if isinstance(drafter, str) else drafter
    listed = [drafter] if isinstance(drafter, (str, Path)) else drafter
    if not isinstance(listed, Sequence) or not all(isinstance(name, (str, Path)) for name in listed):
        raise ValueError(f"drafter={drafter!r} must be an embedded name, a run folder, a hub id, or a list of them")
    if not listed:
        raise ValueError("drafter=[] is empty; give at least one drafter")
    names = [str(name) for name in listed]
    trained = [drafter_folder(name) for name in names if untrained(name) is None]
    meta: dict[str, Any] = read_meta(trained[0])["target"] if trained else {}
    if target is None and not meta.get("name"):
        raise ValueError(f"drafter={drafter!r} names no target; give one, such as target=tiny-target")
    frozen, tokenizer = load_target(
        target if target is not None else meta["name"],
        dtype,
        device,
        None if target is not None else meta.get("revision"),
        **loading,
    )
    for folder in trained:
        check_tokenizer(folder, read_meta(folder), tokenizer)
    if isinstance(drafter, (str, Path)):
        return Spec(frozen, find_drafter(names[0], frozen, tokenizer), tokenizer)
    return Spec(frozen, drafter_class("hybrid")(frozen, names).eval(), tokenizer)  # type: ignore[call-arg]
