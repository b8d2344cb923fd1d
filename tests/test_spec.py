import copy
import inspect
import math
import pickle
import pydoc
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import Watch, made, random_drafter, refused, save_tiny, stock, tiny_model, typed
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor, T5Config, T5ForConditionalGeneration

import selfspec
from selfspec.api import Spec
from selfspec.checkpoints.load_target import load_target
from selfspec.checkpoints.weights_hash import weights_hash
from selfspec.core.contract import Context, Session
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling, warp
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.detokenize import text_of
from selfspec.drafters.early_exit import EarlyExit
from selfspec.drafters.feature import Feature
from selfspec.drafters.medusa import Medusa
from selfspec.drafters.registry import _Seen
from selfspec.drafters.sequential import SequentialHeads
from selfspec.hf_generate import from_config
from selfspec.request import Request

TEXTS = ["def parse(self):\n    ", "import os\n"]


@pytest.fixture(scope="module")
def spec(heads_folder) -> Spec:
    return selfspec.load(str(heads_folder))


def test_generates_texts_and_ids_alike(spec):
    ids = [spec.tokenizer(text)["input_ids"] for text in TEXTS]
    for temperature in (0.0, 1.0):
        by_text = spec.generate(TEXTS, 20, temperature, seed=4)
        by_ids = spec.generate(ids, 20, temperature, seed=4, nodes=5)
        oracle = spec.autoregressive(TEXTS, 20, temperature, seed=4)
        assert by_text.token_ids == by_ids.token_ids == oracle.token_ids
        assert by_text.texts == oracle.texts == [spec.tokenizer.decode(t) for t in oracle.token_ids]


def test_stats_have_the_promised_names(spec):
    stats = spec.generate(TEXTS, 12).stats
    assert stats.tokens == 24
    assert stats.passes <= 24
    assert stats.acceptance_length == stats.tokens / stats.passes
    assert all(0 <= share <= 1 for share in stats.accepted_per_depth + stats.conditional_per_depth)
    assert min(stats.seconds_draft, stats.seconds_target, stats.seconds_other) > 0


def test_two_streams_do_not_disturb_each_other(spec):
    streams = [spec.stream(text, 20, temperature=1.0, seed=6) for text in TEXTS]
    pieces: list[list[str]] = [[], []]
    for turn in range(200):
        if (piece := next(streams[turn % 2], None)) is not None:
            pieces[turn % 2].append(piece)
    for text, parts in zip(TEXTS, pieces, strict=True):
        assert "".join(parts) == spec.generate([text], 20, temperature=1.0, seed=6).texts[0]


def test_target_model_is_stock_and_untouched(spec, tiny_folder):
    assert type(spec.target.model).__module__.startswith("transformers.models.llama")
    assert weights_hash(spec.target.model) == weights_hash(load_target(tiny_folder)[0].model)


def test_run_folders_and_overrides(heads_folder, tiny_folder):
    spec = selfspec.load(str(heads_folder.parent), target=tiny_folder, dtype="bfloat16", device="cpu")
    assert spec.target.dtype == torch.bfloat16
    assert len(spec.generate(TEXTS, 8).token_ids[0]) == 8


def test_ends_at_any_eos_of_the_generation_config(heads_folder):
    spec = selfspec.load(str(heads_folder))
    free = spec.generate(TEXTS[:1], 30).token_ids[0]
    spec.target.model.generation_config.eos_token_id = torch.tensor([319, free[9]])
    assert spec.generate(TEXTS[:1], 30).token_ids[0] == free[: free.index(free[9]) + 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": ""}, "prompt 0 is empty"),
        ({"prompts": [""]}, "prompt 0 is empty"),
        ({"prompts": [[1], [2, 9999]]}, "prompt 1 holds token id 9999"),
        ({"seed": [1, 2, 3]}, "seed has 3 entries for 2 prompts"),
        ({"prompts": ["x" * 4000]}, "256 positions"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"nodes": 0}, "nodes=0"),
        ({"nodes": 10**6}, "nodes=1000000"),
        ({"temperature": 1e-310}, "temperature=1e-310"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
        ({"seed": 2**70}, "seed=1180591620717411303424"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": [1, None]}, "seed=None"),
        ({"prompts": [[1.5]]}, "token id=1.5"),
        ({"prompts": [None]}, "prompt 0 is NoneType"),
        ({"prompts": [b"abc"]}, "prompt 0 is bytes"),
        ({"prompts": ["\udce9"]}, "lone surrogate"),
        ({"prompts": [1, "a"]}, "prompt 0: token id='a' must be an integer"),
        ({"prompts": [{"role": "user"}]}, "prompt 0: a turn needs"),
        ({"stop": ""}, "stop holds an empty string"),
        ({"prompts": torch.tensor([True, False])}, "token id=True must be an integer"),
        ({"prompts": bytearray(b"ab")}, "prompts is of type bytearray"),
        ({"prompts": np.array(3)}, "prompts is of type int"),
        ({"prompts": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
        ({"generation_config": {"max_new_tokens": 3}}, "generation_config is a dict"),
        ({"stop": 5}, "stop=5 must be a string or a list of strings"),
        ({"generation_config": GenerationConfig(num_beams=3)}, "num_beams=3, which generate does not take"),
        ({"generation_config": GenerationConfig(token_healing=True)}, "token_healing=True, .* heal the prompt before"),
        ({"top_p": 2.0}, "top_p=2.0"),
        ({"top_k": "5"}, "top_k='5' must be a number"),
        ({"top_k": 2.5}, "top_k=2.5 must be an integer"),
        ({"min_p": "x"}, "min_p='x' must be a number"),
        ({"temperature": 2**2000}, "must be a number"),
        ({"prompts": {"input_ids": [[1]]}}, "prompts is of type dict; give a text"),
        ({"prompts": 5}, "prompts is of type int; give a text"),
        ({"prompts": b"abc"}, "prompts is of type bytes; give a text"),
        ({"prompts": [{1, 2}]}, "prompt 0 is set"),
    ],
)
def test_bad_input_is_named(spec, arguments, message):
    refused(message, spec.generate, **{"prompts": TEXTS, "max_new_tokens": 4, **arguments})


def test_numpy_and_torch_integers_are_integers(spec):
    want = spec.generate(TEXTS, 6, 1.0, seed=[3, 4]).token_ids
    assert spec.generate(TEXTS, np.int64(6), 1.0, seed=torch.tensor([3, 4])).token_ids == want
    assert spec.generate(TEXTS, 6, 1.0, seed=np.int64(3)).token_ids == spec.generate(TEXTS, 6, 1.0, seed=3).token_ids


def test_bad_places_are_named(tmp_path, heads_folder):
    refused(r"no drafter at 'runs/nothing'.*tiny-medusa", selfspec.load, "runs/nothing", error=FileNotFoundError)
    refused(r"config\.json", selfspec.load, str(heads_folder), target=str(tmp_path), error=FileNotFoundError)
    refused("dtype='int4'", selfspec.load, str(heads_folder), dtype="int4")
    model = T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=32, num_layers=2, d_ff=32))
    model.save_pretrained(tmp_path / "t5")
    refused("encoder-decoder", load_target, str(tmp_path / "t5"))


def test_without_a_tokenizer_ids_still_work(tmp_path, tokenizer):
    folder = tmp_path / "bare"
    save_tiny(folder, tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    target, none = load_target(str(folder))
    spec = Spec(target, made("medusa", target, heads=2, rank=2), none)
    assert none is None
    assert len(spec.generate([[1, 2, 3]], 5).token_ids[0]) == 5
    refused("no tokenizer", spec.generate, ["text"])
    refused("no tokenizer", spec.stream, "text")


def test_embedded_assets_are_small():
    assets = Path(selfspec.__file__).parent / "assets"
    assert sum(p.stat().st_size for p in (assets / "tiny-target").iterdir()) <= 25e6
    drafters = [folder.parent for folder in assets.glob("*/drafter.json")]
    kinds = ("medusa", "early-exit", "eagle3")
    real = {"smollm2-medusa", "smollm2-eagle3", "qwen-coder-eagle3"}
    assert {folder.name for folder in drafters} == {f"tiny-{kind}" for kind in kinds} | real
    sizes = {folder.name: sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) for folder in drafters}
    assert all(size <= 10e6 for name, size in sizes.items() if name not in real)
    assert sum(sizes[name] for name in real) <= 30e6 + 24e6


def test_command_line(heads_folder, capsys):
    call = f"complete --drafter {heads_folder} --max-new-tokens 12"
    for more in ([], ["--color"]):
        assert typed(*call.split(), *more, "import os") == 0
        said = capsys.readouterr()
        assert "import os" in said.out
        assert ("per pass" in said.err) == bool(more)


def test_one_prompt_is_one_row(spec):
    """A text, ids and a conversation without a list around them."""
    result = spec.generate(TEXTS[0], 12)
    assert result.token_ids == spec.generate(TEXTS[:1], 12).token_ids
    assert result.text == result.texts[0]
    talk = [{"role": "user", "content": "hello"}]
    assert spec.generate(talk, 6).token_ids == spec.generate([talk], 6).token_ids
    assert "".join(spec.stream(talk, 6)) == spec.generate(talk, 6).text
    with pytest.raises(ValueError, match="there are 2 rows; take texts"):
        _ = spec.generate(TEXTS, 2).text
    refused("stream takes one prompt, not 2", spec.stream, TEXTS, 2)


def test_a_result_says_why_each_row_ended(spec, heads_folder):
    text = spec.generate("one two three", max_new_tokens=12).text
    assert spec.generate(["one two three"] * 2, max_new_tokens=12).finish_reasons == ["length"] * 2
    assert spec.generate("one two three", max_new_tokens=12, stop=text[:3]).finish_reasons == ["stop"]
    across = text[:1]  # a stop string that begins in the prompt is none of the answer
    assert spec.generate("one two three", max_new_tokens=12, stop=f"three{across}").finish_reasons == ["length"]
    spec = selfspec.load(str(heads_folder))
    token = spec.generate([[5, 9, 2]], 4).token_ids[0][2]
    spec.target.model.generation_config.eos_token_id = [token]
    assert spec.generate([[5, 9, 2]], 4).finish_reasons == ["stop"]


def test_editors_see_the_arguments(spec):
    for method in (spec.generate, spec.autoregressive, spec.stream):
        names = list(inspect.signature(method).parameters)
        assert names[1:] == [field.name for field in fields(Request)]
    assert "max_new_tokens" in pydoc.render_doc(Spec.generate)


@pytest.mark.parametrize(
    ("drafter", "target"), [("tiny-meduza", None), ("promt_lookup", None), ("lookahead", "tny-target")]
)
def test_embedded_names_are_suggested(drafter, target):
    right = {"tiny-meduza": "tiny-medusa", "promt_lookup": "prompt_lookup", "lookahead": "tiny-target"}[drafter]
    refused(f"did you mean '{right}'", selfspec.load, drafter, target, error=FileNotFoundError)


def test_a_generation_config_is_taken(spec):
    config = GenerationConfig(max_new_tokens=9, do_sample=True, temperature=0.8, top_k=20, stop_strings=["zz"])
    want = spec.generate(TEXTS, 9, 0.8, 20, seed=5).token_ids
    assert spec.generate(TEXTS, generation_config=config, seed=5).token_ids == want
    open_ = GenerationConfig(max_new_tokens=48, do_sample=True, temperature=1.5)  # top_k is 50 there
    want = spec.generate(TEXTS, 48, 1.5, 50, seed=5).token_ids
    assert spec.generate(TEXTS, generation_config=open_, seed=5).token_ids == want
    assert want != spec.generate(TEXTS, 48, 1.5, seed=5).token_ids
    want = spec.generate(TEXTS, 9, 0.8, 20, seed=5).token_ids
    assert spec.autoregressive(TEXTS, generation_config=config, seed=5).token_ids == want
    assert len(spec.generate(TEXTS, 4, generation_config=config, seed=5).token_ids[0]) == 4  # what is given counts
    greedy = GenerationConfig(max_new_tokens=9, temperature=0.8)  # transformers draws only with do_sample
    assert spec.generate(TEXTS, generation_config=greedy).token_ids == spec.generate(TEXTS, 9).token_ids
    assert from_config(GenerationConfig(), GenerationConfig(max_new_tokens=5))["max_new_tokens"] == 5  # the model's
    end = spec.generate(TEXTS[0], 9).token_ids[0][3]
    ended = spec.generate(TEXTS[0], generation_config=GenerationConfig(max_new_tokens=9, eos_token_id=end))
    assert ended.token_ids[0].index(end) == len(ended.token_ids[0]) - 1


CONFIGS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of a call, and of the model
    ({}, {}),
    ({"temperature": 0.7}, {"do_sample": True}),
    *(({"do_sample": True, **more}, {}) for more in (
        {}, {"temperature": 1.5}, {"temperature": 1e-5}, {"top_k": 0}, {"top_k": 3}, {"top_p": 0.0}, {"top_p": 1.0},
        {"top_k": 0, "top_p": 0.4}, {"min_p": 0.2, "top_k": 0}, {"min_p": 0.0}, {"top_k": 10_000},
        {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.05}, {"typical_p": 1.0, "repetition_penalty": 1.0},
    )),
    ({"do_sample": True}, {"temperature": 0.6, "top_p": 0.9, "top_k": 20}),
    ({"do_sample": True, "top_k": 5}, {"do_sample": False, "top_p": 0.5}),
    ({"do_sample": False}, {"do_sample": True, "top_p": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("call", "own"), CONFIGS)
def test_a_generation_config_means_what_transformers_says(call, own, spec, monkeypatch):
    """The tokens that are left to draw from, and how likely they are, by transformers' own warpers; both ways in."""
    model, config = spec.target.model, GenerationConfig(max_new_tokens=12, **call)
    monkeypatch.setattr(model, "generation_config", GenerationConfig(eos_token_id=0, pad_token_id=0, **own))
    arguments = from_config(config, model.generation_config)
    names = ("temperature", "top_k", "top_p", "min_p")
    scores = torch.randn(6, spec.target.vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    ours = warp(scores, Sampling(**{name: arguments.get(name) for name in names}).warpers())
    whole = model._prepare_generation_config(config)[0]
    model._prepare_special_tokens(whole, False, device="cpu")
    theirs = scores
    for processor in model._get_logits_processor(whole, input_ids_seq_length=1, device="cpu"):
        theirs = processor(torch.zeros(6, 1, dtype=torch.long), theirs)
    assert (arguments["temperature"] > 0) == bool(whole.do_sample)
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    torch.testing.assert_close(ours, theirs)
    ids = torch.tensor([[5, 9, 2, 7]])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, generation_config=config, custom_generate=spec, seed=3)
    assert spec.generate(ids, generation_config=config, seed=3).token_ids[0] == out[0, 4:].tolist()


def test_what_a_models_own_config_asks_for_is_not_passed_over(spec, monkeypatch):
    monkeypatch.setattr(spec.target.model, "generation_config", GenerationConfig(repetition_penalty=1.05))
    with pytest.raises(ValueError, match=r"has repetition_penalty=1.05 of the model's own, which generate does not"):
        spec.generate(TEXTS[0], generation_config=GenerationConfig(max_new_tokens=4))
    config = GenerationConfig(max_new_tokens=4, repetition_penalty=1.0)
    assert len(spec.generate(TEXTS[0], generation_config=config).token_ids[0]) <= 4


def test_what_is_given_is_not_changed(spec):
    count = torch.tensor(8)
    rows = spec.generate(TEXTS, max_new_tokens=count).token_ids
    assert [len(row) for row in rows] == [8, 8]
    assert int(count) == 8
    end = spec.generate(TEXTS[0], 9).token_ids[0][3]
    for eos in (end, [end], torch.tensor([end]), np.array([end])):
        config = GenerationConfig(max_new_tokens=9)
        config.eos_token_id = eos
        assert spec.generate(TEXTS[0], config).token_ids[0][-1] == end  # also as the first argument
    own = spec.target.model.generation_config
    assert spec.generate(TEXTS, 5, generation_config=own).token_ids == spec.generate(TEXTS, 5).token_ids


def test_results_are_shown_in_one_line(spec):
    result = spec.generate(["<b>x</b> & y"], 12)
    for shown in (repr(spec), repr(result), repr(result.stats)):
        assert len(shown.splitlines()) == 1
        assert len(shown) < 160
    assert f"{result.stats.acceptance_length:.2f} per pass" in repr(result)
    page = result._repr_html_()
    assert page.count("<span") == sum(drafted for _, drafted in result.pieces())
    assert "<b>" not in page
    assert "".join(text for text, _ in result.pieces()) == result.text


def test_without_a_seed_torchs_generator_governs_it_and_calls_differ(spec):
    torch.manual_seed(5)
    one, other = spec.generate(TEXTS[:1], 12, 1.0), spec.generate(TEXTS[:1], 12, 1.0)
    assert one.seed != other.seed
    assert one.token_ids != other.token_ids
    torch.manual_seed(5)
    assert spec.generate(TEXTS[:1], 12, 1.0).token_ids == one.token_ids
    assert spec.generate(TEXTS[:1], 12, 1.0, seed=one.seed).token_ids == one.token_ids
    before = torch.get_rng_state()
    spec.generate(TEXTS[:1], 4)  # greedy text needs no noise
    assert torch.equal(torch.get_rng_state(), before)
    firsts = {spec.generate([[5, 9, 2]], 1, 1.0).token_ids[0][0] for _ in range(40)}
    assert len(firsts) > 3  # one token 40 times where all calls drew the same noise


def test_scalars_arrays_and_ranges_are_taken(spec):
    want = spec.generate(TEXTS, 6, 0.5, seed=[3, 4]).token_ids
    for temperature in (np.float32(0.5), torch.tensor(0.5), np.float64(0.5)):
        for seed in (np.array([3, 4]), range(3, 5), (3, 4)):
            assert spec.generate(TEXTS, 6, temperature, seed=seed).token_ids == want
    ids = torch.tensor([[5, 9, 2], [7, 7, 1]])
    assert spec.generate(ids, 4).token_ids == spec.generate(ids.tolist(), 4).token_ids
    one = spec.generate([[5, 9, 2]], 4).token_ids
    assert spec.generate(torch.tensor([5, 9, 2]), 4).token_ids == spec.generate([5, 9, 2], 4).token_ids == one
    with pytest.raises(ValueError, match="prompts has 3 dimensions; give one row of token ids per prompt"):
        spec.generate(torch.zeros(1, 1, 2, dtype=torch.int64), 4)
    with pytest.raises(TypeError, match=r"unknown argument 'temprature' .did you mean 'temperature'"):
        spec.generate(TEXTS, temprature=1.0)
    refused("lossy='typical' can not be streamed", spec.stream, TEXTS[0], 4, lossy="typical")


def test_a_target_that_was_changed_is_named(heads_folder):
    spec = selfspec.load(str(heads_folder))
    before = spec.generate(TEXTS, 6).token_ids
    for part in (spec.target.model, spec.target.model.model):  # whole, or the decoder alone
        part.train()
        refused(r"training mode.*call target.model.eval\(\)", spec.generate, TEXTS, 4)
        part.eval()
    assert spec.generate(TEXTS, 6).token_ids == before
    spec.target.model.config.return_dict = False
    assert spec.generate(TEXTS, 6).token_ids == before
    spec.target.model.config.return_dict = True
    layers, config = spec.target.layers, spec.target.model.config
    layers.append(layers[-1])
    config.num_hidden_layers += 1
    refused("has 4 layers, it had 3; load it anew", spec.generate, TEXTS, 4)
    del layers[-1]
    config.num_hidden_layers -= 1
    spec.target.model.to(torch.float64)
    refused(r"changed after loading.*float32.*float64.*load it then", spec.generate, TEXTS, 4)
    spec.target.model.to(torch.float32)
    spec.target.model.resize_token_embeddings(400)
    refused(r"changed after loading.*400", spec.autoregressive, TEXTS, 4)


def follows(spec: Spec, *changes: Callable[[], Any]) -> list[list[int]]:
    """Each change of the stock model counts from the next call on, drafted and plain: the texts behind them."""
    ids, texts = torch.tensor(spec.encode(TEXTS[:1])), []
    for change in (lambda: None, *changes):
        change()
        texts.append(stock(spec.target.model, ids[0].tolist(), 12))
        assert spec.generate(TEXTS[:1], 12).token_ids[0] == texts[-1] == spec.autoregressive(TEXTS[:1], 12).token_ids[0]
    assert len(set(map(tuple, texts))) >= 4
    return texts


class Steered(torch.nn.Module):
    """A layer inside a module that keeps how it steers in containers and objects."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.by, self.more, self.control = layer, {"by": 1.0}, [0.0], SimpleNamespace(vector=None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.layer(*args, **kwargs) * self.by["by"] + self.more[0]
        return out if self.control.vector is None else out + self.control.vector


def test_what_a_users_module_keeps_counts(tiny_folder):
    spec = selfspec.load("prompt_lookup", tiny_folder)
    layers = spec.target.model.model.layers
    steered, vector = Steered(layers[1]).eval(), torch.full((spec.target.hidden_size,), 9.0)
    layers[1] = steered
    follows(
        spec,
        lambda: steered.by.update(by=-3.0),
        lambda: steered.more.__setitem__(0, 5.0),
        lambda: setattr(steered.control, "vector", vector),
        lambda: vector.mul_(torch.linspace(-3, 3, len(vector))),
    )


def test_settings_that_are_changed_after_the_first_call_count(heads_folder):
    """A hook, which is gone when it is removed, numbers and tensors that modules hold, and values of the config."""
    spec = selfspec.load(str(heads_folder))
    model, layer, hooks = spec.target.model, spec.target.layers[1], list[Any]()
    layer.by, layer.steer = 1.0, torch.zeros(spec.target.hidden_size)
    steering = lambda m, a, out: out * m.by + m.steer  # noqa: E731
    texts = follows(
        spec,
        lambda: hooks.append(layer.register_forward_hook(lambda m, a, out: out * -3.0 + 1.0)),
        lambda: hooks.pop().remove(),
        lambda: hooks.append(layer.register_forward_hook(steering)),
        lambda: setattr(layer, "by", -3.0),
        lambda: layer.steer.normal_(),
        lambda: setattr(layer, "steer", torch.ones_like(layer.steer)),
        lambda: setattr(model.model.norm, "variance_epsilon", 10.0),
        lambda: setattr(layer.self_attn, "scaling", 3.0),
    )
    assert texts[0] == texts[2] == texts[3] != texts[1]
    spec.target.model.lock = Lock()
    layer.by = 2.0
    refused("holds what can not be copied .*lock.*; take it off", spec.generate, TEXTS[:1], 4)


def test_modules_that_are_shared_exchanged_or_given_values_count(heads_folder):
    spec = selfspec.load(str(heads_folder))
    layers, mlp = spec.target.layers, spec.target.layers[1].mlp
    kinds = [type("Times", (torch.nn.Tanh,), {"forward": lambda self, x, n=n: n * x}) for n in (-9, 9)]
    layers[0].scales = {"by": -1.5}

    def act(function: Any) -> None:
        del mlp.act_fn
        mlp.act_fn = function

    follows(
        spec,
        lambda: setattr(layers[2], "mlp", layers[0].mlp),
        lambda: setattr(layers[2], "mlp", layers[1].mlp),
        lambda: layers[0].register_forward_hook(lambda m, a, out: out * m.scales["by"]),
        lambda: layers[0].scales.update(by=2.5),
        lambda: act(torch.tanh),
        lambda: act(torch.relu),
        *(lambda i=i: act(torch.nn.Hardtanh(-i, i).eval()) for i in range(1, 12)),  # some lie where others lay
        lambda: setattr(mlp.act_fn, "__class__", kinds[0]),
        lambda: setattr(mlp.act_fn, "__class__", kinds[1]),
    )


def stock_text(spec: Spec, text: str, count: int) -> str:
    return text_of(spec.tokenizer, stock(spec.target.model, spec.encode(text)[0], count))


@pytest.mark.parametrize("drafter", ["heads", "early_exit", "mask"])
def test_a_call_under_another_hook_leaves_an_open_stream_and_later_calls_right(drafter, heads_folder, tiny_folder):
    """A stream stays open while a hook comes and goes, is read under another hook than it was made under, or is made
    before parts are built."""
    spec = selfspec.load(str(heads_folder))
    if drafter != "heads":
        spec.drafter = random_drafter(drafter, spec.target).eval()
    layer, text = spec.target.layers[0], TEXTS[0]

    def hook() -> Any:
        return layer.register_forward_hook(lambda m, a, out: out * -1.0)

    early = spec.stream(text, 20)
    handle = hook()
    hooked = "".join(early)
    handle.remove()
    plain = stock_text(spec, text, 20)
    opened = spec.stream(text, 20)
    begun, late = next(opened), spec.stream(text, 20)
    handle = hook()
    assert spec.generate(text, 20).texts[0] == "".join(late) == hooked == stock_text(spec, text, 20) != plain
    handle.remove()
    assert (
        begun + "".join(opened) == spec.generate(text, 20).texts[0] == spec.autoregressive(text, 20).texts[0] == plain
    )


def test_following_that_was_interrupted_is_done_by_the_next_call(heads_folder, monkeypatch):
    spec = selfspec.load(str(heads_folder))
    spec.generate(TEXTS[0], 8)
    handle = spec.target.layers[0].register_forward_hook(lambda m, a, out: out * -1.0)
    for name in ("attention_windows", "longest_context"):
        monkeypatch.setattr(f"selfspec.core.support.{name}", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            spec.generate(TEXTS[0], 8)
        monkeypatch.undo()
    assert spec.generate(TEXTS[0], 8).texts[0] == stock_text(spec, TEXTS[0], 8)
    handle.remove()


def test_hooks_around_the_decoder_see_the_prompt(heads_folder):
    spec = selfspec.load(str(heads_folder))
    before = spec.generate(TEXTS[0], 12).texts[0]

    def other_tokens(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "input_ids": (kwargs["input_ids"] + 1) % module.config.vocab_size}

    handle = spec.target.model.register_forward_pre_hook(other_tokens, with_kwargs=True)
    assert spec.generate(TEXTS[0], 12).texts[0] == stock_text(spec, TEXTS[0], 12) != before
    handle.remove()


def test_what_a_drafter_writes_to_its_context_has_no_effect(spec):
    class Writes:
        reads = spec.drafter.reads

        def session(self, target: Target, rows: int) -> Session:
            inner = spec.drafter.session(target, rows)

            def propose(context: Context) -> DraftTree:
                tree = inner.propose(context)
                context.roots.zero_()
                context.lengths[:] = [0]
                context.tokens[0].clear()
                return tree

            return SimpleNamespace(propose=propose, observe=inner.observe)

    ids = spec.encode(TEXTS[:1])
    options = Options(16, Sampling(1.0), 3, processors=[RepetitionPenaltyLogitsProcessor(1.3)])
    assert (
        speculative(spec.target, ids, options, Writes(), 8).token_ids
        == autoregressive(spec.target, ids, options).token_ids
    )


@pytest.mark.parametrize(
    ("tree", "message"),
    {
        "None": "returned a NoneType; it has to return a DraftTree",
        "chain(context.roots[:, None].expand(-1, 9))": r"returned tokens \[2, 9\]; expected \[2, 1 to 8\]",
        "chain(context.roots[:1, None])": r"returned tokens \[1, 1\]; expected \[2, 1 to 8\]",
        "chain(context.roots[:, None].float())": "tokens of torch.float32; they have to be int64",
        "DraftTree(context.roots[:, None] * 0 + 10**6, context.roots[:, None] * 0 - 1)": "token 1000000, outside of 0",
        "DraftTree(context.roots[:, None] * 0 - 5, context.roots[:, None] * 0 - 1)": "has a token -5; tokens are 0 or",
        "DraftTree(three, three.new_tensor([[-1, 0, 1]] * 2), deepest=1)": "deepest=1, but the tree has a node 2",
        "DraftTree(three, three.new_tensor([[-1, 0, 1]] * 2), plain=2)": "plain=2: only a tree with a view",
    }.items(),
)
def test_trees_that_can_not_be_verified_are_refused(tree, message, spec):
    names = {"chain": chain, "DraftTree": DraftTree, "three": torch.ones(2, 3, dtype=torch.long)}
    drafter = SimpleNamespace(
        reads=(),
        session=lambda *_: SimpleNamespace(
            propose=lambda context: eval(tree, {**names, "context": context}), observe=lambda accepted: None
        ),
    )
    refused(message, speculative, spec.target, [[5, 9], [2, 3]], Options(4), drafter, 8)


def test_padding_in_rows_of_ids_is_warned_of(heads_folder):
    spec = selfspec.load(str(heads_folder))
    spec.tokenizer.pad_token = spec.tokenizer.convert_ids_to_tokens(7)
    with pytest.warns(UserWarning, match="prompt 1 begins or ends with the padding token 7"):
        spec.generate(torch.tensor([[5, 9, 2], [7, 9, 2]]), 2)


def test_a_spec_is_neither_copied_nor_pickled(spec):
    for function in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="another process calls"):
            function(spec)


class Recorder:
    """A hook that keeps what it saw, and can not be copied."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.lock = Lock()

    def __call__(self, module: object, args: object, output: torch.Tensor) -> None:
        self.seen.append(output.shape[1])


def test_a_hook_with_a_state_is_called_itself(heads_folder):
    spec, recorder = selfspec.load(str(heads_folder)), Recorder()
    handle = spec.target.layers[0].register_forward_hook(recorder)
    stats = spec.generate([[5, 9, 2]], 6, nodes=4).stats
    handle.remove()
    assert len(recorder.seen) == 1 + stats.calls


def test_a_small_vocabulary_is_drafted_for():
    target = Target(tiny_model(vocab_size=7))
    for kind in (Medusa, Feature, SequentialHeads, EarlyExit):
        drafter = made(kind, target).eval()
        plain = autoregressive(target, [[1, 2, 3]], Options(20, Sampling(1.0), 2))
        assert speculative(target, [[1, 2, 3]], Options(20, Sampling(1.0), 2), drafter, 16).token_ids == plain.token_ids


def test_a_session_serves_one_call(spec):
    class Keeps:
        reads = spec.drafter.reads

        def __init__(self) -> None:
            self.kept = spec.drafter.session(spec.target, 1)

        def session(self, target: Target, rows: int) -> Session:
            return self.kept

    drafter: Any = Keeps()
    drafter = _Seen(drafter)
    speculative(spec.target, [[5, 9, 2]], Options(4), drafter, 4)
    with pytest.raises(ValueError, match=r"Keeps: session gave that of an earlier call"):
        speculative(spec.target, [[5, 9, 2]], Options(4), drafter, 4)
    watch = Watch(spec.drafter)
    contexts: list[Context] = []
    propose = watch.propose
    watch.propose = lambda context: contexts.append(context) or propose(context)
    speculative(spec.target, [[5, 9, 2]], Options(4), watch, 4)
    context = contexts[-1]
    refused("this call of generate has ended", spec.target.forward, chain(context.roots[:, None]), context.cache)


def test_the_last_position_is_told(spec):
    prompt = [[5] * 250]
    with pytest.warns(UserWarning, match="row 0 ends after 6 new tokens instead of 20.*256 positions"):
        assert len(spec.generate(prompt, 20).token_ids[0]) == 6


def test_words_of_other_libraries(llama):
    spec = Spec(llama, made("prompt_lookup", llama))
    wanted = spec.generate([[5, 9, 2]], max_new_tokens=6)
    assert spec.generate([[5, 9, 2]], max_tokens=6, do_sample=False, top_k=0).token_ids == wanted.token_ids
    warm = spec.generate([[5, 9, 2]], 6, temperature=1.0, seed=3)
    assert spec.generate([[5, 9, 2]], 6, do_sample=True, seed=3).token_ids == warm.token_ids
    assert (len(warm), list(warm), warm[0]) == (1, warm.texts, warm.texts[0])
    assert warm.stats.tau == warm.stats.acceptance_length
    assert warm.stats.tokens_per_second == pytest.approx(6 / warm.stats.seconds)
    for word, way in (
        ({"max_length": 9}, "generate takes no max_length; give max_new_tokens"),
        ({"repetition_penalty": 1.1}, r"custom_generate=spec, repetition_penalty=\.\.\."),
        ({"max_tokens": 3, "max_new_tokens": 3}, "max_tokens and max_new_tokens are the same"),
        ({"num_beams": 4}, "beam search is not served"),
        ({"tools": []}, r'as {"messages": \[\.\.\.\], "tools": \[\.\.\.\]}'),
        ({"enable_thinking": False}, r'"chat_template_kwargs": {"enable_thinking": \.\.\.}}'),
        ({"bogus": 4}, "unknown argument 'bogus'"),
    ):
        refused(way, spec.generate, [[5, 9, 2]], **word, error=TypeError)
    with pytest.raises(ValueError, match=r"do_sample=True and temperature=0.0 contradict"):
        spec.generate([[5, 9, 2]], do_sample=True, temperature=0.0)


def test_keywords_win_over_a_generation_config(llama):
    spec = Spec(llama, made("prompt_lookup", llama))
    greedy = GenerationConfig(max_new_tokens=9, do_sample=False)
    config = spec.generate([[5, 9, 2]], generation_config=greedy, max_tokens=6, do_sample=True, seed=3)
    warm = spec.generate([[5, 9, 2]], 6, temperature=1.0, top_k=50, seed=3)  # transformers' default beside a config
    assert config.token_ids == warm.token_ids
    assert warm.__bool__()
    cool = GenerationConfig(max_new_tokens=6, do_sample=False, temperature=0.3, top_k=7)
    found = spec.generate([[5, 9, 2]], generation_config=cool, do_sample=True, seed=3)
    assert found.token_ids == spec.generate([[5, 9, 2]], 6, temperature=0.3, top_k=7, seed=3).token_ids
    assert cool.do_sample is False
    greedy = spec.generate([[5, 9, 2]], generation_config=cool, do_sample=False, temperature=None)
    assert greedy.token_ids == spec.generate([[5, 9, 2]], 6).token_ids
    refused(
        "contradict", spec.generate, [[5, 9, 2]], generation_config=GenerationConfig(temperature=0.0), do_sample=True
    )


def test_a_prompt_that_fills_the_context_is_no_short_answer(llama):
    spec = Spec(llama, made("prompt_lookup", llama))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"prompt 0 has .* tokens; the target is served up to"):
            spec.generate([[5] * (llama.max_positions + 50)], 6)
