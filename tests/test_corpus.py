from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import write_lines

from selfspec.data.corpus import EVALUATION, VALIDATION, JsonLines, PythonSource, TextFolder
from selfspec.data.prompts import cut_prompts
from selfspec.data.windows import tokenize


def test_held_out_modules_are_never_trained_on() -> None:
    source = PythonSource()
    names = [{d.name for d in part} for part in (source.train(), source.validation(), source.evaluation())]
    assert not names[0] & names[1]
    assert not names[0] & names[2]
    assert not names[1] & names[2]
    assert not set(VALIDATION) & set(EVALUATION)
    assert len(names[1]) >= 8
    assert len(names[2]) >= 8
    assert len(names[0]) > 100


def test_python_source_is_the_same_list_every_time(source_root: Path) -> None:
    source = PythonSource(str(source_root), max_files=3)
    assert [d.name for d in source.train()] == [d.name for d in source.train()]
    assert len(source.train()) == 3
    assert {d.name for d in source.validation()} == {"queue.py", "statistics.py"}
    assert {d.name for d in source.evaluation()} == {"heapq.py", "argparse.py"}


def test_tokens_and_mask_follow_the_text(tokenizer: Any, source_root: Path) -> None:
    documents = PythonSource(str(source_root)).validation()
    stream = tokenize(documents, tokenizer)
    assert tokenizer.decode(stream.tokens[stream.mask]) == "".join(d.text for d in documents)
    assert int((~stream.mask).sum()) == len(documents)
    assert stream.n_bytes == sum(len(d.text.encode()) for d in documents)


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}, {"from": "human", "value": "Bye"}]


def test_only_what_the_assistant_says_counts(tokenizer: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", [{"messages": CHAT}, {"conversations": SHAREGPT}, {"text": "plain"}])
    documents = JsonLines(path, tokenizer)._documents()
    said = [("<user>Hi</user>\n<assistant>", False), ("Hello!", True)]
    assert list(documents[0].spans) == [*said, ("</assistant>\n", False)]
    assert list(documents[1].spans) == [*said, ("</assistant>\n<user>Bye</user>\n", False)]
    assert documents[2].spans == (("plain", True),)
    stream = tokenize(documents, tokenizer)
    assert tokenizer.decode(stream.tokens[stream.mask]) == "Hello!Hello!plain"


def test_every_turn_counts_under_a_template_that_rewrites_earlier_ones(tokenizer: Any, tmp_path: Path) -> None:
    """Like Qwen3's: only the last assistant's turn is rendered with its thinking; user text quotes the answer."""
    other = copy.deepcopy(tokenizer)
    other.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]"
        "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
        "{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' }}\n{% endfor %}"
    )
    turns = [("user", "say one"), ("assistant", "one"), ("user", "now two, not one"), ("assistant", "two")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path = write_lines(tmp_path / "d.jsonl", [{"messages": messages}])
    (document,) = JsonLines(path, other)._documents()
    end = other.eos_token
    assert [text for text, counts in document.spans if counts] == [f"one{end}", f"two{end}"]
    assert document.text == other.apply_chat_template(messages, tokenize=False)


def test_line_separators_inside_a_string_are_text(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\u0085c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert JsonLines(str(path), tokenizer)._documents()[0].text == "a\u2028b\u0085c"


def test_jsonl_splits_without_overlap(tokenizer: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", [{"text": f"text {i}"} for i in range(20)])
    data = JsonLines(path, tokenizer, 0.2)
    train, held = {d.name for d in data.train()}, {d.name for d in data.validation()}
    assert len(train) == 16
    assert len(held) == 4
    assert not train & held


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2: not JSON"),
        ("[1]", "line 2: expected an object, found list"),
        ('{"messages": "x"}', "line 2: expected `text`"),
        ('{"prompt": "x"}', r"line 2: expected `text`.*\['prompt'\]"),
        ('{"messages": [{"role": "user"}]}', "line 2: a turn needs `role`"),
    ],
)
def test_broken_lines_are_named(line: str, message: str, tokenizer: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", [{"text": "fine"}, line])
    with pytest.raises(ValueError, match=message):
        JsonLines(path, tokenizer).train()


def test_a_conversation_needs_a_chat_template(tmp_path: Path) -> None:
    from selfspec.training.pretrain import train_tokenizer

    path = write_lines(tmp_path / "d.jsonl", [{"messages": CHAT}])
    with pytest.raises(ValueError, match="line 1: a conversation needs a chat template"):
        JsonLines(path, train_tokenizer(["abc"], 300)).train()


@pytest.mark.parametrize("records", [[], [{"text": " "}], [{"messages": CHAT[:1]}]])
def test_data_without_a_usable_example_is_refused(records: list[Any], tokenizer: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", records)
    with pytest.raises(ValueError, match="no usable example"):
        JsonLines(path, tokenizer).train()


def test_text_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        TextFolder(str(tmp_path / "none")).train()
    with pytest.raises(ValueError, match="no usable example"):
        TextFolder(str(tmp_path)).train()
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    data = TextFolder(str(tmp_path))
    assert len(data.train()) == 9
    assert len(data.validation()) == 1
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"x\.txt is not UTF-8"):
        data.train()


def test_prompts_have_their_length_and_start_a_line(tokenizer: Any) -> None:
    documents = PythonSource().evaluation()
    prompts = cut_prompts(documents, tokenizer, 20, 40)
    assert prompts == cut_prompts(documents, tokenizer, 20, 40)
    assert {len(p) for p in prompts} == {40}
    assert len({tuple(p) for p in prompts}) == 20
    for prompt in prompts:
        text = tokenizer.decode(prompt[:-2])
        assert any(d.text.startswith(text) or "\n" + text in d.text for d in documents)
