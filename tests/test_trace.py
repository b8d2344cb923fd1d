"""The trace of a call: the call's own tokens, whole text, who drafted what, files that are read again."""

import json
from typing import Any

import pytest
import torch
from conftest import VOCAB, made, refused, tiny_model
from test_drafters import PROMPTS, WAYS, Row, built, of_rows
from test_drafters import row as row  # a fixture: every drafter of the contract
from transformers import GenerationConfig

import selfspec
from selfspec.api import Spec
from selfspec.budget.policy import Experience
from selfspec.core.sampling import Noise
from selfspec.core.target import Target
from selfspec.drafters.hybrid import Hybrid
from selfspec.engine.engine import Engine
from selfspec.trace import VERSION, Trace, read_traces, token_text


def traced(row: Row, target: Target, temperature: float, **settings: Any) -> tuple[Spec, Any]:
    spec = Spec(target, built(row, target))
    return spec, spec.generate(PROMPTS[:3], 20, temperature, seed=5, nodes=9, trace=True, **settings)


@of_rows(WAYS)
@pytest.mark.parametrize(("temperature", "buffers"), [(0.0, True), (0.8, False)])
def test_a_trace_is_of_the_call_and_changes_nothing(row, temperature, buffers):
    target = Target(tiny_model(), engine=Engine(None, quiet=True) if buffers else None)
    spec, found = traced(row, target, temperature)
    assert found.token_ids == spec.generate(PROMPTS[:3], 20, temperature, seed=5, nodes=9).token_ids
    trace = found.trace
    assert len(trace.passes) == found.stats.passes
    for number, ids in enumerate(found.token_ids):
        own = [line for line in trace.passes if line["row"] == number]
        assert [token for line in own for token in line["emitted"]] == ids
        position = len(PROMPTS[number]) - 1
        for line in own:
            assert line["position"] == position
            assert line["tokens"][0] == (PROMPTS[number] + ids)[position]
            assert max(line["tokens"]) < VOCAB  # mask rows are counted, not shown
            assert [line["tokens"][node] for node in line["path"][1:]] == line["emitted"][: len(line["path"]) - 1]
            assert [line["parents"][node] for node in line["path"]] == [-1, *line["path"][:-1]]
            position += len(line["emitted"])
        drafted = [bool(token.sources) for token in trace.tokens(number)]
        assert drafted == found.from_draft[number]


def test_what_was_picked_among_is_told(llama):
    """Probabilities are the target's, the noise is the call's, and the pick is their largest sum."""
    spec = Spec(llama, made("prompt_lookup", llama))
    trace = spec.generate([PROMPTS[2]], 12, 0.7, seed=5, trace=True).trace
    noise, ids = Noise([5], [0], VOCAB, llama.device), list(PROMPTS[2])
    for line in trace.passes:
        for token, choices in zip(line["emitted"], line["choices"], strict=True):
            logits = llama.model(torch.tensor([ids])).logits[0, -1] / 0.7
            own = noise.ahead([len(ids)], 1)[0, 0]
            assert choices[0][0] == token == int((logits + own).argmax())
            for found, _, probability, drawn in choices:
                assert probability == pytest.approx(float(logits.softmax(-1)[found]), rel=1e-3)
                assert drawn == pytest.approx(float(own[found]), rel=1e-3)
            ids.append(token)
        assert sum(line["seconds"].values()) > 0


def test_members_of_a_hybrid_are_told_apart():
    spec = selfspec.load("tiny-medusa+prompt_lookup", dtype="float32")
    prompt = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n"
    found = spec.generate(prompt, 40, trace=True)
    trace = found.trace
    assert trace.header["sources"] == ["prompt_lookup", "tiny-medusa"]
    assert {tuple(whose) for line in trace.passes for whose in line["sources"][1:]} >= {(0,), (1,)}
    assert "".join(token.text for token in trace.tokens()) == found.text


def test_a_node_of_two_members_is_of_both_and_a_cut_tree_keeps_whose_its_nodes_are(llama):
    members = {name: made("prompt_lookup", llama) for name in ("one", "other")}
    spec = Spec(llama, Hybrid(llama, members))
    spec._learned.past[False, 1] = [0.001 + 0.0001 * n for n in range(65)], Experience()  # costs: nothing is measured
    for nodes in (8, "auto"):
        trace = spec.generate([[5, 9, 2, 7] * 6], 24, nodes=nodes, trace=True).trace
        drafted = [whose for line in trace.passes for whose in line["sources"][1:]]
        assert drafted
        assert {tuple(whose) for whose in drafted} == {(0, 1)}


def test_text_is_whole_where_tokens_are_parts_of_characters():
    spec = selfspec.load("tiny-medusa", dtype="float32")
    part = spec.tokenizer("🧵")["input_ids"][0]
    assert token_text(spec.tokenizer, part) == "\\xf0"
    assert token_text(spec.tokenizer, spec.tokenizer("def")["input_ids"][0]) == "def"
    assert token_text(None, 7) == "7"
    found = spec.generate("s = '🧵 日本'\nprint('🧵", 24, 1.0, seed=2, trace=True)
    assert "".join(token.text for token in found.trace.tokens()) == found.text


def test_plain_decoding_is_traced_too(llama):
    spec = Spec(llama, made("prompt_lookup", llama))
    found = spec.autoregressive([PROMPTS[0], PROMPTS[2]], 8, trace=True)
    assert found.trace.header["drafter"] == "plain"
    assert [line["path"] for line in found.trace.passes] == [[0]] * 16
    assert spec.autoregressive([PROMPTS[0]], 8).trace is None
    refused("stream yields text alone", selfspec.load("tiny-medusa").stream, "x", trace=True)


def test_a_file_is_read_again(llama, tmp_path):
    spec = Spec(llama, made("prompt_lookup", llama))
    trace = spec.generate(PROMPTS[:2], 8, 1.0, seed=1, trace=True).trace
    trace.write(tmp_path / "a.jsonl")
    refused("there is no folder .*none; make it", trace.write, tmp_path / "none" / "a.jsonl")
    (again,) = read_traces(tmp_path / "a.jsonl")
    assert (again.header, again.passes) == (trace.header, trace.passes)
    (tmp_path / "two.jsonl").write_text(trace.lines() * 2)
    assert len(read_traces(tmp_path / "two.jsonl")) == 2
    assert repr(again) == f"Trace(prompt_lookup, {len(trace.passes)} passes)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no trace"),
        ("{", "line 1 is no line of a trace"),
        ("[]\n", "line 1 is no line of a trace"),
        ('{"row": 0}\n', "line 1 is no line of a trace"),
        (f'{{"trace": {VERSION + 1}}}\n', f"a trace of version {VERSION + 1}, not {VERSION}"),
        (f'{{"trace": {VERSION}}}\n', "it has no 'device'"),
    ],
)
def test_what_is_no_trace_is_named(text, message, tmp_path):
    (tmp_path / "t.jsonl").write_text(text)
    refused(message, read_traces, tmp_path / "t.jsonl")


def test_a_lossy_call_and_an_early_end_are_traced(llama):
    spec = Spec(llama, made("prompt_lookup", llama))
    prompt = [5, 9, 2, 7] * 6
    found = spec.generate([prompt], 30, 1.0, seed=1, lossy="top_k:5", trace=True)
    assert found.lossy.altered
    assert found.trace.header["lossy"] == "top_k:5"
    assert all(
        choices[0][0] == token
        for line in found.trace.passes
        for token, choices in zip(line["emitted"], line["choices"], strict=True)
    )
    assert spec.autoregressive([prompt], 3, lossy="top_k:5", trace=True).trace.header["lossy"] is None
    eos = spec.generate([prompt], 30).token_ids[0][9]
    config = GenerationConfig(max_new_tokens=30, eos_token_id=eos, do_sample=False)
    short = spec.generate([prompt], generation_config=config, trace=True)
    emitted = [token for line in short.trace.passes for token in line["emitted"]]
    assert emitted == short.token_ids[0]
    assert emitted[-1] == eos
    assert len(short.trace.tokens()) == len(emitted)


def test_lines_are_json_alone(llama):
    spec = Spec(llama, made("prompt_lookup", llama))
    trace = spec.generate([PROMPTS[2]], 8, 1.0, seed=1, top_k=1, trace=True).trace  # all others have no finite score
    assert isinstance(trace, Trace)
    for line in trace.lines().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
