"""Conversations that a target writes itself: from a template alone, resumable, without duplicates."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose_config, refused, tiny_model
from families import build
from transformers import PreTrainedTokenizerFast

from selfspec.checkpoints.load_target import load_target
from selfspec.cli.training_runs import run_training
from selfspec.core.target import Target
from selfspec.data.chat_template import ChatTemplate
from selfspec.data.corpus import PythonSource
from selfspec.data.own_questions import Template, answer_temperature, first_paragraph
from selfspec.training import conversations
from selfspec.training import synthetic as module
from selfspec.training.conversations import Conversation, Rules, write_conversations
from selfspec.training.synthetic import Synthetic, synthetic, usable


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tiny_folder) -> tuple[Target, PreTrainedTokenizerFast]:
    target, tokenizer = load_target(tiny_folder)
    return target, tokenizer


@pytest.fixture(autouse=True)
def eager(monkeypatch) -> None:
    """No compiler, and questions that end: random weights rarely write the template's tokens."""

    def none(self: Target, name: str) -> None:
        if name == "compiled":
            raise ValueError("no compiler")

    monkeypatch.setattr(Target, "use_engine", none)
    monkeypatch.setattr(module, "_CHUNK", 4)
    picked = conversations._picked

    def ending(logits: Any, at: list, rows: list, rules: Rules, seed: int) -> list:
        found = picked(logits, at, rows, rules, seed)
        for i, row in enumerate(rows):
            most, ends = (
                (rules.question_tokens, rules.question_ends) if row.asks else (rules.new_tokens, rules.answer_ends)
            )
            if row.written == most - 1:
                found[i] = min(ends)
        return found

    monkeypatch.setattr(conversations, "_picked", ending)
    monkeypatch.setattr(module, "usable", lambda question, tokenizer: len(question) > 0)


def settings(folder: Path, **changes: object) -> Synthetic:
    few = {"conversations": 8, "batch": 4, "question_tokens": 8, "new_tokens": 12, "validation_share": 0.3}
    return Synthetic(folder=str(folder), **{**few, **changes})


def test_a_template_is_cut_at_its_turns(tokenizer):
    template = Template.of(ChatTemplate(tokenizer))
    assert tokenizer.decode(template.opening) == "<user>"
    assert tokenizer.decode(template.answer) == "</user>\n<assistant>"
    assert tokenizer.decode(template.again) == "</assistant>\n<user>"


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    refused(r"data=synthetic: a conversation needs a chat template, .* has none", Template.of, ChatTemplate(plain))
    plain.chat_template = "{{ messages[0]['content'] | upper }}"
    refused("the chat template marks no turns; take data=jsonl", Template.of, ChatTemplate(plain))
    plain.chat_template = "{{ raise_exception('no') }}"
    refused(r"data=synthetic: the chat template refuses it \(no\)", Template.of, ChatTemplate(plain))


@pytest.mark.parametrize(
    ("shown", "prompt"),
    [("m.content.split('</think>')[-1]", ""), ("m.content", "<think></think>")],  # thoughts go; an answer without any
)
def test_a_template_that_rewrites_answers_has_one_turn(shown, prompt, pair, tmp_path, capsys):
    target, tokenizer = pair[0], copy.deepcopy(pair[1])
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ " + shown + " }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>" + prompt + "{% endif %}"
    )
    assert Template.of(ChatTemplate(tokenizer)).once
    synthetic(settings(tmp_path, turns=2), target, tokenizer)
    assert "data.turns=2: the chat template rewrites earlier answers" in capsys.readouterr().out
    assert not Template.of(ChatTemplate(pair[1])).once


def test_conversations_are_the_targets_own_text(tmp_path, pair):
    target, tokenizer = pair
    train, validation = synthetic(settings(tmp_path), target, tokenizer)
    template = Template.of(ChatTemplate(tokenizer))
    assert len(train.is_chat) + len(validation.is_chat) <= 8
    assert train.counted
    assert validation.counted
    document = train.document(0)
    assert document.tokens[: len(template.opening)].tolist() == template.opening
    start = int(document.mask.int().argmax())
    assert document.tokens[start - len(template.answer) : start].tolist() == template.answer
    assert bool(document.mask[-1])  # nothing stands behind the last answer
    begins = [
        (document.mask[1:] & ~document.mask[:-1]).sum() for document in map(train.document, range(len(train.is_chat)))
    ]
    assert max(begins) == 2  # answers, one for each turn


def test_a_greedy_answer_is_what_the_target_says(tmp_path, pair):
    target, tokenizer = pair
    train, _ = synthetic(settings(tmp_path, sampled=0.0, turns=1), target, tokenizer)
    document = train.document(0)
    start = int(document.mask.int().argmax())
    logits = target.text(document.tokens[None]).logits
    said = document.tokens[start:-1]
    assert logits[0, start - 1 : -2].argmax(-1).equal(said)


@pytest.mark.parametrize("family", ["Llama", "Qwen3.5"])
def test_a_row_begins_anew_where_a_conversation_ended(family):
    """Greedy texts are those of conversations held one at a time, also where layers keep a state."""
    target = Target(build(family))
    template = Template([1, 2], [3, 4], [5, 6, 7])
    ends = frozenset({8})
    rules = Rules(template, 2, 3, 9, ends | {3}, ends, 1.0, lambda question: len(question) > 1)

    def texts(rows: int) -> dict[int, list[int]]:
        begun = [Conversation.begun(i, template, [9 + i], 0.0) for i in range(7)]
        return {each.number: each.tokens for each in write_conversations(target, begun, rules, rows, 40, 0)}

    alone = texts(1)
    assert texts(3) == alone
    assert len(alone) == 7
    assert any(alone.values())


def test_sampled_tokens_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(4000, -1)
    rows = [Conversation(i, [1], [False], 0.5, 0, asks=False) for i in range(4000)]
    rules = Rules(Template([1], [1], [1]), 1, 9, 9, frozenset(), frozenset(), 1.0, bool)
    found = torch.tensor(conversations._picked(logits, list(range(4000)), rows, rules, 0)).bincount(minlength=4) / 4000
    assert (found - (logits[0] / 0.5).softmax(-1)).abs().max() < 0.02


def test_an_interrupted_call_goes_on(tmp_path, pair, monkeypatch):
    target, tokenizer = pair
    whole, calls, write = synthetic(settings(tmp_path / "a"), target, tokenizer), [0], module.write

    def breaks(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(module, "write", breaks)
    with pytest.raises(KeyboardInterrupt):
        synthetic(settings(tmp_path / "b"), target, tokenizer)
    again = synthetic(settings(tmp_path / "b", batch=3), target, tokenizer)  # other rows, the same texts
    assert calls[0] == 3
    assert [c.key for c in again] == [c.key for c in whole]
    more = synthetic(settings(tmp_path / "b", conversations=10), target, tokenizer)  # keeps what is there
    assert calls[0] == 4
    assert len(more[0].tokens) > len(whole[0].tokens)
    most = synthetic(settings(tmp_path / "b", conversations=12), target, tokenizer)
    assert calls[0] == 4  # files are whole, whatever is read of them
    assert sum(len(c.is_chat) for c in most) > sum(len(c.is_chat) for c in more)
    more = most
    card = json.loads(next((tmp_path / "b").glob("*/card.json")).read_text())
    assert card["begun"] == 12
    assert card["usable"] == sum(len(c.is_chat) for c in more)


def test_equal_questions_are_kept_once():
    mask = torch.tensor([False, False, True])
    texts = [(torch.tensor(tokens, dtype=torch.int32), mask) for tokens in ([1, 2, 3], [1, 2, 4], [1, 5, 6])]
    refused("of 1 usable conversations none is left", module._divided, texts[:2], 1, 1e-9, ())
    train, validation = module._divided(texts, 1, 1e-9, (7,))  # chance alone gives validation none
    assert (len(train.is_chat), len(validation.is_chat)) == (1, 1)


def test_questions_need_letters_and_no_template_tokens(tokenizer):
    assert usable(list(tokenizer("What is a queue in Python?")["input_ids"]), tokenizer)
    assert not usable(list(tokenizer("1 + 2")["input_ids"]), tokenizer)
    special = tokenizer.all_special_ids[0]
    assert not usable([*tokenizer("What is a queue in Python?")["input_ids"], special], tokenizer)


def test_conversations_longer_than_the_positions_are_refused(tmp_path, pair):
    with pytest.raises(ValueError, match=r"2 turns of 8 \+ 300 tokens may take .* 256 positions"):
        synthetic(settings(tmp_path, new_tokens=300), *pair)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("conversations", 0),
        ("conversations", 2.5),
        ("batch", "many"),
        ("sampled", 1.5),
        ("sampled", "half"),
        ("validation_share", 1.0),
        ("validation_share", "5%"),
        ("seed", "abc"),
        ("folder", 3),
    ],
)
def test_bad_settings_are_named(tmp_path, name, value):
    refused(f"data.{name}=", replace, settings(tmp_path), **{name: value})


def test_a_training_on_them(tmp_path, tiny_folder):
    overrides = ["name=x", f"target.name={tiny_folder}", "data=synthetic", f"data.folder={tmp_path / 'texts'}"]
    overrides += ["data.conversations=8", "data.batch=8", "data.question_tokens=8", "data.new_tokens=32"]
    overrides += ["data.validation_share=0.3", "drafter.heads=2", "drafter.rank=2", "loop.steps=2", "loop.batch_size=1"]
    overrides += [
        "train.length=64",
        "train.prompts=2",
        "train.new_tokens=8",
        "train.prompt_tokens=4",
        "loop.device=cpu",
    ]
    figures = run_training(compose_config("train", *overrides[:-1]), tmp_path / "run")
    assert figures["steps"] == 2
    assert (tmp_path / "run" / "drafter" / "drafter.json").is_file()


@pytest.mark.parametrize("openings", ["Explain", None, [], [1], [["Explain"]]])
def test_openings_must_list_texts(openings):
    refused("must list texts", Synthetic, openings=openings)


@pytest.mark.parametrize("temperature", [0, -1, 3, float("nan"), "warm"])
def test_the_temperature_of_questions_is_checked(temperature):
    refused(r"data\.question_temperature=", Synthetic, question_temperature=temperature)


def test_first_questions_begin_with_the_openings(tmp_path, pair):
    target, tokenizer = pair
    train, validation = synthetic(settings(tmp_path, openings=["def", ""]), target, tokenizer)
    words = tokenizer("def", add_special_tokens=False)["input_ids"]
    start, found = len(Template.of(ChatTemplate(tokenizer)).opening), []
    for corpus in (train, validation):
        for i in range(len(corpus.is_chat)):
            document = corpus.document(i)
            found.append(document.tokens[start : start + len(words)].tolist() == words)
            assert not document.mask[: start + len(words)].any()  # what is given does not count
    assert found.count(True) >= len(found) // 2


def test_edits_are_asked_as_they_are_and_answered(tmp_path, source_root, pair, monkeypatch):
    monkeypatch.setattr(module, "PythonSource", lambda: PythonSource(str(source_root)))
    vocab = pair[0].vocab_size
    target = Target(tiny_model(dtype=torch.float32, vocab_size=vocab, max_position_embeddings=2048))
    corpora = synthetic(settings(tmp_path, edits=1.0, turns=1, new_tokens=4), target, pair[1])
    documents = [corpus.document(i) for corpus in corpora for i in range(len(corpus.is_chat))]
    assert len(documents) == 8
    assert all("```" in pair[1].decode(document.tokens) for document in documents)
    assert {int(document.mask.sum()) for document in documents} == {4}


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("Write a function that adds.\n\n", True),
        ("Write a function that adds.\n", False),
        ("Fix the following code:\n\n", False),
        ("Fix this code:\n\n```python\nx = 1\n\n", False),
        ("Fix this code:\n\n```python\nx = 1\n```\n\n", True),
        ("1.\n\n", False),
    ],
)
def test_a_question_ends_with_a_paragraph_that_leaves_nothing_open(text, ends, pair):
    ids = pair[1](text, add_special_tokens=False)["input_ids"]
    assert (first_paragraph(pair[1])(ids) is not None) is ends


def test_a_question_that_a_paragraph_ended_keeps_its_words(pair):
    template, tokenizer = Template.of(ChatTemplate(pair[1])), pair[1]
    rules = Rules(template, 1, 99, 9, frozenset(), frozenset(), 1.0, lambda question: True, first_paragraph(tokenizer))
    words = tokenizer("Write a function.\n\n", add_special_tokens=False)["input_ids"]
    conversation = Conversation.begun(0, template, [], 0.0)
    assert [conversation.add(token, rules) for token in words] == [True] * len(words)
    assert not conversation.asks
    text = tokenizer.decode(conversation.tokens)
    assert text == tokenizer.decode(template.opening) + "Write a function." + tokenizer.decode(template.answer) or (
        text.rstrip("\n").count("Write a function.") == 1
    )
    assert len(conversation.mask) == len(conversation.tokens)


def test_they_are_not_measured_with():
    refused(r"data=synthetic is for training.*decode.questions", Synthetic().evaluation)


@pytest.mark.parametrize(("openings", "conversations"), [(1, 64), (10, 128), (76, 512)])
def test_each_opening_is_answered_greedily_and_sampled(openings, conversations):
    for opening in range(openings):
        drawn = [answer_temperature(i, 0.5, openings) for i in range(opening, conversations, openings)]
        assert 0.25 <= sum(drawn) / len(drawn) <= 0.75
