"""What is measured side by side: prompts, made of questions, and the arms that answer them, which are plain decoding,
drafters at each size, and what transformers itself offers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import CompileConfig, GenerationConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.api import Spec
from selfspec.core.sampling import Sampling
from selfspec.core.stats import Stats
from selfspec.data.questions import Question
from selfspec.detokenize import text_of
from selfspec.output import Generated
from selfspec.utils.files import Figures
from selfspec.utils.progress import progress


@dataclass(frozen=True)
class Prompt:
    """One turn of a question: everything before its answer. seed: of the answer; check: whether an answer is right
    (None where it can not be checked); turn_text: what the turn says, without the chat template."""

    ids: list[int]
    seed: int = 0
    group: str = "all"
    question: str = ""
    turn: int = 0
    check: Callable[[str], bool] | None = None
    turn_text: str | None = None

    @property
    def text(self) -> int:
        """crc32 of its ids and seed, by which a text that changed is noticed."""
        return zlib.crc32(f"{self.seed} {self.ids}".encode())

    def right(self, tokenizer: Tokenizer | None, answer: list[int]) -> bool | None:
        """Whether an answer is right, None where that can not be checked."""
        if self.check is None or tokenizer is None:
            return None
        said = text_of(tokenizer, answer)
        if self.turn_text is None:  # it continues a text; alone, some tokenizers drop the space that it begins with
            before, whole = (text_of(tokenizer, ids) for ids in (self.ids, self.ids + answer))
            said = whole[len(before) :] if whole.startswith(before) else said
        _, ended, rest = said.rpartition("</think>")  # what it only thought of is no answer
        return self.check(rest if ended else "" if said.lstrip().startswith("<think>") else said)


def prompts_of(
    spec: Spec, questions: Sequence[Question], arguments: Figures, seed: int
) -> tuple[list[Prompt], list[str]]:
    """Every turn of every question as a prompt, behind the target's own answers to the turns before it; and the turns
    that were left out since they or one before fill the target's context. The seed of a prompt depends on `seed`, its
    question and its turn alone. The answers to earlier turns are those of plain decoding with these arguments. Raises
    ValueError where all were left out."""
    assert spec.tokenizer is not None
    prompts: list[Prompt] = []
    skipped: list[str] = []
    bar = progress(questions, desc="questions", disable=all(len(q.turns) < 2 for q in questions))
    for question in bar:
        answers: list[str] = []
        for turn in range(turns := question.asks):
            ids = question.opening(turn, answers, spec.tokenizer)
            if spec.target.max_positions is not None and len(ids) >= spec.target.max_positions:
                skipped += [f"{question.id}, turn {t + 1} ({len(ids)} tokens)" for t in range(turn, turns)]
                break
            prompt_seed = zlib.crc32(f"{seed} {question.group} {question.id} {turn}".encode())
            check = question.checks[turn] if question.checks else None
            turn_text = question.turns[turn] if question.turns else None
            prompts.append(Prompt(ids, prompt_seed, question.group, question.id, turn, check, turn_text))
            if turn + 1 < turns and not question.ids:
                answers.append(spec.autoregressive([ids], **arguments, seed=[prompt_seed]).texts[0])
    if not prompts:
        raise ValueError(f"no usable example: all questions fill the target's {spec.target.max_positions} positions")
    return prompts, skipped


Call = Callable[[Sequence[Prompt], Sampling], Generated]  # an arm on a batch


class Arm(NamedTuple):
    """A name in tables, and the nodes of its trees ("-": it has none)."""

    name: str
    nodes: str = "-"


def decoded(spec: Spec, max_new_tokens: int, nodes: int | str | None = None, lossy: str | None = None) -> Call:
    """Speculative decoding with trees of so many nodes; plain decoding with None."""

    def call(batch: Sequence[Prompt], sampling: Sampling) -> Generated:
        asked = {"seed": [prompt.seed for prompt in batch], **vars(sampling)}
        ids = [prompt.ids for prompt in batch]
        if nodes is None:
            return spec.autoregressive(ids, max_new_tokens, **asked)
        return spec.generate(ids, max_new_tokens, nodes=nodes, lossy=lossy, **asked)

    return call


def of_transformers(
    spec: Spec, max_new_tokens: int, draft_model: nn.Module | None = None, exit_layer: int = 1
) -> dict[str, Call]:
    """Those of METHODS, by name."""
    everywhere = CompileConfig()
    everywhere._compile_all_devices = True  # type: ignore[assignment]  # the CPU too
    methods: dict[str, Figures] = {
        "hf_generate": {},
        "hf_static": {"cache_implementation": "static", "compile_config": everywhere},
        "hf_prompt_lookup": {"prompt_lookup_num_tokens": 10},
        "hf_early_exit": {"assistant_early_exit": exit_layer},
        "hf_assisted": {"assistant_model": draft_model},
    }

    def call(method: Figures, batch: Sequence[Prompt], sampling: Sampling) -> Generated:
        return hf_generate(spec, [p.ids for p in batch], max_new_tokens, sampling, batch[0].seed, **method)

    return {name: partial(call, method) for name, method in methods.items()}


def hf_generate(
    spec: Spec, batch: list[list[int]], max_new_tokens: int, sampling: Sampling, seed: int, **method: Any
) -> Generated:
    """transformers' own generate on the same model; left-padded where lengths differ. method: further arguments of
    generate, which choose one of its own ways to decode faster. Where it drafts, passes are the calls of the target's
    last layer, counted by a hook; elsewhere there is one per token, and no hook, which would have a layer of hf_static
    compiled anew."""
    model, width = spec.target.model, max(map(len, batch))
    pad = [width - len(row) for row in batch]
    ids = torch.tensor([[0] * n + row for n, row in zip(pad, batch, strict=True)], device=spec.target.device)
    mask = torch.tensor([[0] * n + [1] * (width - n) for n in pad], device=spec.target.device)
    eos = method.pop("eos", spec.target.end_tokens)
    sampled: Figures = {"do_sample": False}
    if sampling.temperature > 0:
        sampled = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k or 0}
        sampled |= {"top_p": sampling.top_p or 1.0, "min_p": sampling.min_p}
        torch.manual_seed(seed)
    room = spec.target.max_positions - width if spec.target.max_positions else max_new_tokens
    counted, drafts = [0], any("assistant" in key or "lookup" in key for key in method)

    def count(*_: object) -> None:
        counted[0] += 1

    handle = spec.target.layers[-1].register_forward_hook(count) if drafts else None
    # Without a repetition penalty, top-p and top-k of the target's own, which the other arms do not apply either
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=min(max_new_tokens, room),
            eos_token_id=sorted(eos) or None,
            pad_token_id=min(eos, default=0),
            **sampled,
            **method,
        )
    finally:
        model.generation_config = kept
        if handle is not None:
            handle.remove()
    rows = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        rows.append(row[:end])
    passes = counted[0] if drafts else sum(map(len, rows))
    return Generated(rows, [], [[False] * len(row) for row in rows], Stats(passes, passes, tokens=sum(map(len, rows))))
