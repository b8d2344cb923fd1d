"""model.generate(custom_generate=spec): the same call, the same answer, as transformers' own generate."""

from threading import Thread
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import VOCAB, random_drafter, refused, tiny_model
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

import selfspec
from selfspec.api import Spec
from selfspec.core.generate import autoregressive
from selfspec.core.options import Options
from selfspec.core.support import cache_name
from selfspec.core.target import Target
from selfspec.hf_generate import SpeculativeOutput

IDS = torch.tensor([[5, 9, 2, 7, 7, 1, 30, 12, 9, 2]])
RAGGED = [[5, 9, 2, 7, 7, 1], [3, 8], [8, 1, 30, 4, 17, 22, 9, 40, 2, 11]]
PLAIN: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module", params=["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def spec(request) -> Spec:
    target = Target(tiny_model(request.param))
    drafter = random_drafter("medusa", target, heads=3, rank=4)
    return Spec(target, drafter)


def padded(side: str) -> tuple[Tensor, Tensor]:
    """RAGGED and its mask, padded on one side."""
    width = max(map(len, RAGGED))
    pads, ones = ([[0] * (width - len(row)) for row in RAGGED], [[1] * len(row) for row in RAGGED])
    pairs = ((pads, part) if side == "left" else (part, pads) for part in (RAGGED, ones))
    ids, mask = (torch.tensor([a + b for a, b in zip(*pair, strict=True)]) for pair in pairs)
    return ids, mask


def both(spec: Spec, ids: Tensor = IDS, **settings: Any) -> tuple[Any, Any]:
    settings = {**PLAIN, "attention_mask": torch.ones_like(ids), **settings}
    ours = spec.target.model.generate(ids, custom_generate=spec, **settings)
    return ours, spec.target.model.generate(ids, **settings)


class ForbidsRepeats(LogitsProcessor):
    """A user's own: no token twice among the last four, and a bonus that depends on the prefix's length."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.scatter(1, input_ids[:, -4:], -float("inf"))
        scores[:, input_ids.shape[1] % VOCAB] += 2.0
        return scores


class PerRow(LogitsProcessor):
    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias


def allowed(row: int, ids: Tensor) -> list[int]:
    start = (int(ids[-1]) * 7 + 20 * row) % VOCAB
    return [(start + 3 * i) % VOCAB for i in range(9)]


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": [4, 11, 17, 30]},
    "min_length": {"min_length": 25, "eos_token_id": [4, 11, 17, 30]},
    "bad_words": {"bad_words_ids": [[4], [11, 17], [30, 30]]},
    "sequence_bias": {"sequence_bias": {(9, 2): 4.0, (7,): -3.0}},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed},
    "exponential_decay": {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 4},
    "suppress_at_begin": {"begin_suppress_tokens": [4, 11, 17, 30, 9, 22]},
    "forced_eos": {"forced_eos_token_id": 5},
    "own": {"logits_processor": LogitsProcessorList([ForbidsRepeats()])},
    "several_eos": {"eos_token_id": [4, 11, 17, 30]},
    "eos_tensor": {"eos_token_id": torch.tensor([4, 11, 17, 30]), "pad_token_id": None},
}


@pytest.mark.parametrize("name", ["none", *PROCESSORS])
def test_left_padded_batches(spec, name):
    ids, mask = padded("left")
    ours, reference = both(spec, ids, attention_mask=mask, **PROCESSORS.get(name, {}))
    assert ours.tolist() == reference.tolist()


def test_processors_for_whole_batches_meet_their_own_row(spec):
    ids, mask = padded("left")
    torch.manual_seed(0)
    bias = LogitsProcessorList([PerRow(4 * torch.randn(len(RAGGED), VOCAB))])
    ours, reference = both(spec, ids, attention_mask=mask, logits_processor=bias)
    assert ours.tolist() == reference.tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_its_rows_alone(spec, side):
    ids, mask = padded(side)
    settings = {**PLAIN, "do_sample": True, "temperature": 0.8, "top_k": 40, "eos_token_id": [4, 11]}
    seeds = [3, 4, 5]
    together = spec.target.model.generate(ids, attention_mask=mask, custom_generate=spec, seed=seeds, **settings)
    for row, prompt in enumerate(RAGGED):
        one = torch.tensor([prompt])
        alone = spec.target.model.generate(
            one, attention_mask=torch.ones_like(one), custom_generate=spec, seed=[seeds[row]], **settings
        )[0, len(prompt) :].tolist()
        assert together[row, ids.shape[1] :].tolist()[: len(alone)] == alone


def test_torch_seeds_the_noise_and_return_sequences_differ(spec):
    settings = {**PLAIN, "do_sample": True, "num_return_sequences": 3, "attention_mask": torch.ones_like(IDS)}
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(spec.target.model.generate(IDS, custom_generate=spec, **settings).tolist())
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({tuple(row) for row in drawn[0]}) == 3


def test_returns_what_generate_returns(spec):
    settings = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ours, reference = both(spec, repetition_penalty=1.4, **settings)
    assert isinstance(ours, SpeculativeOutput)
    assert ours.sequences.tolist() == reference.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(getattr(ours, name)) == len(getattr(reference, name))
        for a, b in zip(getattr(ours, name), getattr(reference, name), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert ours.stats.tokens == 24
    assert ours.from_draft.shape == (1, 24)
    assert int((~ours.from_draft).sum()) <= ours.stats.passes
    ours, reference = both(spec, return_dict_in_generate=True)
    assert ours.scores is None
    assert ours.sequences.tolist() == reference.sequences.tolist()


class StopsAt(StoppingCriteria):
    def __init__(self, tokens: set[int]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([int(row[-1]) in self.tokens for row in input_ids])


def test_stopping_criteria_end_each_row(spec):
    ids, mask = padded("left")
    free, _ = both(spec, ids, attention_mask=mask)
    unused = next(t for t in range(VOCAB) if t not in free)  # without an EOS, generate lets ended rows run on
    stops = {int(free[0, ids.shape[1] + 5]), int(free[2, ids.shape[1] + 9])}
    ours, reference = both(
        spec,
        ids,
        attention_mask=mask,
        stopping_criteria=StoppingCriteriaList([StopsAt(stops)]),
        eos_token_id=unused,
        max_new_tokens=20,
    )
    assert ours.tolist() == reference.tolist()
    late = StoppingCriteriaList([MaxTimeCriteria(0.0)])
    ours = spec.target.model.generate(IDS, custom_generate=spec, stopping_criteria=late, **PLAIN)
    assert ours.shape[1] == IDS.shape[1] + 1


@pytest.fixture(scope="module")
def tiny() -> Spec:
    return selfspec.load("tiny-medusa", dtype="float32")


@pytest.fixture(scope="module")
def inputs(tiny) -> dict[str, Tensor]:
    return dict(tiny.tokenizer(["def main(argv=None):\n    "], return_tensors="pt", return_token_type_ids=False))


def test_streamers(tiny, inputs, capsys):
    model = tiny.target.model
    streamer = TextStreamer(tiny.tokenizer, skip_prompt=True)
    out = model.generate(**inputs, max_new_tokens=40, do_sample=False, custom_generate=tiny, streamer=streamer)
    text = tiny.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert capsys.readouterr().out.rstrip("\n") == text.rstrip("\n")
    pieces = TextIteratorStreamer(tiny.tokenizer, skip_prompt=True, timeout=60)
    settings = {**inputs, "max_new_tokens": 40, "do_sample": False, "custom_generate": tiny, "streamer": pieces}
    thread = Thread(target=model.generate, kwargs=settings)
    thread.start()
    assert "".join(pieces) == text
    thread.join()


def test_stop_strings(tiny, inputs):
    settings = {**inputs, "max_new_tokens": 60, "do_sample": False, "tokenizer": tiny.tokenizer}
    free = tiny.target.model.generate(**settings)[0]
    text = tiny.tokenizer.decode(free[inputs["input_ids"].shape[1] :])
    stop = text[20:24]  # lies across tokens, as stop strings do
    reference = tiny.target.model.generate(**settings, stop_strings=[stop])
    ours = tiny.target.model.generate(**settings, stop_strings=[stop], custom_generate=tiny)
    assert ours.tolist() == reference.tolist()
    assert ours.shape[1] < len(free)
    with pytest.raises(ValueError, match=r"needs spec\.tokenizer, which is None; set it"):
        tiny.target.model.generate(**settings, stop_strings=[stop], custom_generate=Spec(tiny.target, tiny.drafter))
    refused("can not produce", tiny.target.model.generate, **inputs, stop_strings=["\ud800"], custom_generate=tiny)
    refused("empty string", tiny.target.model.generate, **inputs, stop_strings=[""], custom_generate=tiny)


class WrongShape(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores[:, :5]


class Forbids(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -float("inf"))


class Odd(StoppingCriteria):
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return self.answer


GAP = torch.ones_like(IDS)
GAP[0, 4] = 0
ANSWERS = ([False], None, "no", torch.zeros(1), torch.zeros(1, 2, dtype=torch.bool))
BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "beam_search can not be served"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search can not be served|contrastive"),
    ({"prompt_lookup_num_tokens": 3}, "assisted_generation can not be served"),
    ({"dola_layers": "low"}, "dola_generation can not be served|dola"),
    ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
    ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ({"cache_implementation": "static"}, "cache_implementation|static"),
    ({"logits_processor": LogitsProcessorList([WrongShape()])}, "WrongShape returned"),
    ({"nodes": 0}, "nodes=0"),
    ({"do_sample": True, "top_p": 1.5}, "top_p"),
    ({"do_sample": True, "temperature": -1.0}, "temperature"),
    ({"do_sample": True, "seed": [1, 2]}, "seed has 2 entries"),
    *(({"do_sample": True, "seed": seed}, "seed=") for seed in (1.5, 2**70, [0.5], True)),
    ({"lossy": "nearly"}, "lossy='nearly'"),
    ({"attention_mask": GAP}, "has a gap"),
    ({"max_new_tokens": 5.0}, r"max_new_tokens=5\.0 must be an integer"),
    ({cache_name(tiny_model("llama")): DynamicCache()}, "need selfspec's own cache"),
    ({"token_type_ids": torch.ones_like(IDS)},
        "token_type_ids can not be used with custom_generate=spec|token_type_ids"),
    *(({"stopping_criteria": StoppingCriteriaList([Odd(each)])},
        "stopping criterion Odd returned") for each in ANSWERS),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_what_can_not_be_served_is_refused_by_name(spec, settings, message):
    settings = {**PLAIN, "attention_mask": torch.ones_like(IDS), "custom_generate": spec, **settings}
    refused(message, spec.target.model.generate, IDS, **settings)


def test_more_refusals(spec):
    model, (ids, mask) = spec.target.model, padded("left")
    settings = {**PLAIN, "custom_generate": spec}
    refused("streamer", model.generate, ids, attention_mask=mask, streamer=Mock(), **settings)
    refused("assisted_generation can not be served", model.generate, IDS, assistant_model=model, **settings)
    refused("another model", tiny_model("llama").generate, IDS, **settings)
    forbids = LogitsProcessorList([Forbids()])
    unable = "left no token to choose"
    refused(unable, model.generate, IDS, logits_processor=forbids, **settings, error=FloatingPointError)
    wrong = torch.tensor([[0, 1, 1]])
    shape = r"attention_mask has the shape \[1, 3\]"
    refused(shape, spec, model, IDS, generation_config=GenerationConfig(), attention_mask=wrong)


def test_nan_logits_are_named(spec):
    broken = tiny_model("llama")
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    refused("logits are NaN", autoregressive, Target(broken), IDS.tolist(), Options(4), error=FloatingPointError)


def test_prefix_functions_meet_only_texts_that_occur(spec):
    """A function that knows its own row's texts alone, as a trie does."""
    ids, mask = padded("left")
    free, _ = both(spec, ids, attention_mask=mask)
    texts = [row[: ids.shape[1] + 20].tolist() for row in free]

    def only(row: int, prefix: Tensor) -> list[int]:
        known = prefix.tolist()
        return [texts[row][len(known)], 3] if texts[row][: len(known)] == known and len(known) < len(texts[row]) else []

    settings = {"attention_mask": mask, "max_new_tokens": 18, "prefix_allowed_tokens_fn": only}
    ours = spec.target.model.generate(ids, custom_generate=spec, **{**PLAIN, **settings})
    assert ours.tolist() == [text[: ids.shape[1] + 18] for text in texts]
    with pytest.raises(ValueError, match="allows no token for row"):
        spec.target.model.generate(
            ids, custom_generate=spec, **{**PLAIN, **settings, "prefix_allowed_tokens_fn": lambda row, prefix: []}
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"alora_invocation_tokens": [9, 2]}, "aLoRA adapters turn on"), ({}, "adapter_names for 3 rows")],
)
def test_adapters_that_follow_rows_or_texts_are_refused(settings, message):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings))
    model.eval()
    spec = selfspec.load("prompt_lookup", target=model.get_base_model())
    names = {} if settings else {"adapter_names": ["default", "__base__", "default"]}
    ids = torch.tensor([[5, 9, 2, 7]]).expand(3, -1)
    given = {**PLAIN, **names, "input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4}
    refused(message, model.generate, custom_generate=spec, **given)


def test_samples_of_a_prompt_share_its_constraint(spec):
    """And where other rules leave nothing of what is allowed, the constraint holds, as in transformers."""
    ids, mask = padded("left")
    met, end = set(), int(spec.target.model.generation_config.eos_token_id or 3)

    def only(row: int, prefix: Tensor) -> list[int]:
        met.add(row)
        return [end] if row else [5, 6]

    settings = {**PLAIN, "attention_mask": mask, "prefix_allowed_tokens_fn": only, "eos_token_id": end}
    settings |= {"do_sample": True, "num_return_sequences": 3, "min_new_tokens": 4, "max_new_tokens": 6}
    settings["pad_token_id"] = 0
    made = spec.target.model.generate(ids, custom_generate=spec, **settings)[:, ids.shape[1] :]
    assert met == set(range(len(ids)))
    assert set(made[:3].flatten().tolist()) <= {5, 6}
    assert (made[3:, 0] == end).all()


def test_criteria_given_by_the_user_count(spec):
    free, _ = both(spec)
    end = int(free[0, IDS.shape[1] + 6])
    criteria = StoppingCriteriaList([EosTokenCriteria([end])])
    ours, reference = both(spec, stopping_criteria=criteria)
    assert ours.tolist() == reference.tolist()
    assert ours.shape[1] <= IDS.shape[1] + 7
    ours = spec.target.model.generate(
        IDS, custom_generate=spec, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(14)]), **PLAIN
    )
    assert ours.shape[1] == 14


def test_padding_is_that_of_transformers(spec):
    ids, mask = padded("left")
    free, _ = both(spec, ids, attention_mask=mask)
    ends = [int(free[0, ids.shape[1] + 5]), int(free[2, ids.shape[1] + 9])]
    for eos in (ends, ends[::-1]):
        ours, reference = both(spec, ids, attention_mask=mask, eos_token_id=eos, pad_token_id=None)
        assert ours.tolist() == reference.tolist()


def test_positions_of_ones_own_are_served_only_where_they_are_the_plain_ones(spec):
    ids, mask = padded("left")
    plain = (mask.cumsum(-1) - 1).clamp(min=0)
    settings: dict[str, Any] = {**PLAIN, "attention_mask": mask, "custom_generate": spec}
    without = spec.target.model.generate(ids, **settings)
    assert torch.equal(spec.target.model.generate(ids, position_ids=plain, **settings), without)
    for wrong in (plain + 3, torch.zeros_like(plain), plain.flip(1)):
        refused("position_ids are packed or shifted", spec.target.model.generate, ids, position_ids=wrong, **settings)


def test_called_by_hand_it_says_who_calls_it(spec):
    refused(r"meant to be called by model.generate\(..., custom_generate=spec\)", spec, spec.target.model, IDS)


def test_the_last_position_is_told(spec):
    ids = torch.tensor([[5] * 250])
    with pytest.warns(UserWarning, match="row 0 ends after 6 new tokens instead of 20.*transformers' own decoding may"):
        out = spec.target.model.generate(
            ids, custom_generate=spec, **{**PLAIN, "max_new_tokens": 20, "attention_mask": torch.ones_like(ids)}
        )
    assert out.shape[1] == 256


def test_a_model_that_sees_writes_text():
    """transformers hands over what its encoder gave, of a text alone an empty dict."""
    text = {"model_type": "llama", **tiny_model().config.to_diff_dict()}
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_index=VOCAB - 1)
    model = AutoModelForImageTextToText.from_config(config)
    spec, ids = selfspec.load("prompt_lookup", model), torch.tensor([[5, 9, 2, 7, 7, 1]])
    given = {**PLAIN, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, custom_generate=spec, **given), model.generate(ids, **given))
