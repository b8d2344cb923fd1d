"""Text from a served model: answers to other data's questions and to its own, resumable, counted, refused where the
server is not what it should be."""

import copy
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import compose_config, refused, write_lines
from fake_server import FakeServer
from transformers import PreTrainedTokenizerFast

from selfspec.checkpoints.load_target import load_target
from selfspec.cli.training_runs import run_check
from selfspec.core.target import Target
from selfspec.data import server as module
from selfspec.data.documents import Broken
from selfspec.data.records import JsonLines
from selfspec.data.server import Server, merged
from selfspec.data.store import stored, tokenize
from selfspec.utils import openai_client as client

Pair = tuple[Target, PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def pair(tiny_folder) -> Pair:
    target, tokenizer = load_target(tiny_folder)
    return target, tokenizer


@pytest.fixture
def fake(pair, tmp_path) -> Any:
    made = FakeServer(*pair, tmp_path / "states")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(client, "_FIRST", 0.01)


def source(pair: Pair, folder: Path, count: int = 6, turns: int = 2) -> JsonLines:
    lines = []
    for i in range(count):
        messages = [{"role": "system", "content": "be brief"}] if i % 2 else []
        for turn in range(turns):
            messages += [{"role": "user", "content": f"question {i} {turn}"}, {"role": "assistant", "content": "old"}]
        lines.append({"messages": messages})
    return JsonLines(path=write_lines(folder / "asked.jsonl", lines), tokenizer=pair[1])


def asking(pair: Pair, fake: FakeServer, folder: Path, **changes: Any) -> Server:
    settings = {"url": fake.url, "tokenizer": pair[1], "ends": pair[0].end_tokens, "new_tokens": 8, "at_once": 3}
    settings |= {"folder": str(folder / "kept"), "patience": 0.2, "validation_share": 0.4}
    if "source" not in changes:
        settings["source"] = source(pair, folder)
    return Server(**{**settings, **changes})


def test_answers_are_the_targets_own_tokens(pair, fake, tmp_path):
    data = asking(pair, fake, tmp_path, sampled=0.0)
    data.write()
    records = [record for _, record in data.records()]
    assert [record["id"] for record in records] == list(range(6))
    for record in records:
        assert all(turn["content"] != "old" for turn in record["messages"])
        ids, mask = record["tokens"][-1]["input_ids"], record["tokens"][-1]["loss_mask"]
        assert sum(mask) > 0
        assert len(ids) == len(mask)
    train, validation = stored(data, pair[1], tmp_path / "texts")
    assert train.is_chat.all()
    assert train.counted + validation.counted == sum(sum(t["loss_mask"]) for r in records for t in r["tokens"])
    first = train.document(0)
    start = int(first.mask.int().argmax())  # greedy text: each token is the likeliest behind those before it
    logits = pair[0].text(first.tokens[None]).logits
    assert logits[0, start - 1 : -1].argmax(-1)[first.mask[start:]].tolist() == first.tokens[first.mask].tolist()


def test_history_is_the_models_own(pair, fake, tmp_path):
    fake.finish = "stop"
    asking(pair, fake, tmp_path, at_once=1).write()
    second = next(body for body in fake.asked if len(body["messages"]) > 3)
    assert second["messages"][-2]["role"] == "assistant"
    assert second["messages"][-2]["content"] != "old"
    assert {body["temperature"] for body in fake.asked} == {0.0, 1.0}


def test_an_answer_that_was_cut_ends_its_conversation(pair, fake, tmp_path):
    fake.finish = "length"
    data = asking(pair, fake, tmp_path)
    data.write()
    assert len(fake.asked) == 6
    assert {tuple(record["finish"]) for _, record in data.records()} == {("length",)}
    assert json.loads((data.place / "card.json").read_text())["answers"] == {"length": 6}


def test_what_closes_a_cut_answer_does_not_count(pair, fake, tmp_path):
    fake.ids, fake.said, counted = False, {"content": "four words of answer"}, {}
    for fake.finish in ("stop", "length"):
        (tmp_path / fake.finish).mkdir()
        data = asking(pair, fake, tmp_path / fake.finish)
        data.write()
        train, _ = stored(data, pair[1], tmp_path / "texts")
        counted[fake.finish] = pair[1].decode(train.document(0).tokens[train.document(0).mask])
        file = JsonLines(path=str(data.path), tokenizer=pair[1], ends=data.ends, validation_share=0.4)
        again, _ = stored(file, pair[1], tmp_path / "again")
        assert again.counted == train.counted  # as data=jsonl reads them
    assert counted["length"] == "four words of answer"
    assert counted["stop"].startswith(counted["length"])
    assert counted["stop"] != counted["length"]


def test_a_killed_run_goes_on_without_asking_twice(pair, fake, tmp_path):
    fake.dies_after, fake.finish = 7, "stop"
    data = asking(pair, fake, tmp_path, at_once=1)
    refused("does not answer", data.write, error=ConnectionError)
    kept = [record["id"] for _, record in data.records()]
    assert 0 < len(kept) < 6
    with data.path.open("ab") as file:
        file.write(b'{"id": 5, "messa')  # cut off in the middle
    fake.dies_after, before = None, len(fake.asked)
    again = asking(pair, fake, tmp_path, at_once=1)
    again.write()
    assert [record["id"] for _, record in again.records()] == list(range(6))
    assert len(fake.asked) - before == 2 * (6 - len(kept))
    count = len(fake.asked)
    again.write()
    assert len(fake.asked) == count


def test_one_dead_server_of_two_ends_nothing(pair, fake, tmp_path):
    other = FakeServer(*pair, tmp_path)
    fake.finish, other.finish, other.dies_after = "length", "length", 1
    data = asking(pair, fake, tmp_path, url=[other.url, fake.url], patience=1.0)
    data.write()
    other.close()
    assert len(list(data.records())) == 6
    assert not (data.place / "failed.jsonl").read_text()


def test_one_process_writes(pair, fake, tmp_path):
    data = asking(pair, fake, tmp_path)
    data.place.mkdir()
    with (data.place / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused("another process is writing", data.write)


@pytest.mark.parametrize(("key", "said"), [("sk sesame\x07", "OPENAI_API_KEY"), ("sk-sésame", "OPENAI_API_KEY")])
def test_a_key_that_is_none_is_not_shown(pair, fake, tmp_path, monkeypatch, key, said):
    monkeypatch.setenv(client.KEY, key)
    with pytest.raises(ValueError, match=said) as error:
        asking(pair, fake, tmp_path).write()
    assert "same" not in str(error.value)


def test_work_is_shared_and_tried_again(pair, fake, tmp_path):
    other = FakeServer(*pair, tmp_path)
    fake.refuse, fake.finish, other.finish = [503, 429, 500], "length", "length"
    data = asking(pair, fake, tmp_path, url=[fake.url + "/v1", other.url], patience=5.0)
    data.write()
    other.close()
    assert len(list(data.records())) == 6
    assert fake.asked
    assert other.asked


def test_failures_are_counted_and_kept_beside(pair, fake, tmp_path):
    fake.refuse, fake.finish = [400, 400], "length"
    data = asking(pair, fake, tmp_path, errors=2)
    data.write()
    failed = [json.loads(line) for line in (data.place / "failed.jsonl").read_text().splitlines()]
    assert len(failed) == 2
    assert "status 400" in failed[0]["why"]
    assert len(list(data.records())) == 4
    fake.refuse = [400]
    refused(r"more than data.errors=0", asking(pair, fake, tmp_path, errors=0).write)


def test_a_request_at_which_a_server_always_fails_is_a_failure(pair, fake, tmp_path):
    """And not one at which all fail: others are answered meanwhile."""
    fake.fails, fake.finish = "question 2 0", "length"
    data = asking(pair, fake, tmp_path, errors=1, patience=2.0)
    data.write()
    (failed,) = [json.loads(line) for line in (data.place / "failed.jsonl").read_text().splitlines()]
    assert failed["id"] == 2
    assert "status 500" in failed["why"]
    assert len(list(data.records())) == 5
    again = asking(pair, fake, tmp_path, errors=1, patience=0.2)  # where it is the only one that is left
    again.write()
    assert len((again.place / "failed.jsonl").read_text().splitlines()) == 1


def test_its_own_questions(pair, fake, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "usable", lambda question, tokenizer: True)
    fake.finish = "stop"
    data = asking(pair, fake, tmp_path, source=None, conversations=3, openings=["Write", ""], question_tokens=6)
    data.write()
    asked = [record["messages"][0]["content"] for _, record in data.records()]
    assert [question.startswith("Write") for question in asked] == [True, False, True]
    fake.finish = "length"
    again = {"source": None, "conversations": 2, "errors": 0, "seed": 1, "question_tokens": 6}
    refused("holds answers of other settings", asking(pair, fake, tmp_path, **again).write)
    endless = asking(pair, fake, tmp_path / "other", **again)
    refused("came out empty or endless", endless.write)


def test_only_what_the_model_says_counts(pair, fake, tmp_path):
    """Turns of the source that answer nothing stay, without counting; behind any role that asks the model answers."""
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "assistant", "content": "old greeting"},
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": "old call", "tool_calls": [call]},
        {"role": "ipython", "content": "none"},
        {"role": "assistant", "content": "old answer"},
    ]
    beside = {"chat_template_kwargs": {"thinking": False}, "tools": [{"type": "function"}]}
    data = JsonLines(path=write_lines(tmp_path / "d.jsonl", [{"messages": turns, **beside}] * 3), tokenizer=pair[1])
    fake.ids, fake.said, fake.finish = False, {"content": "half of \ud83d"}, "stop"
    tokenizer = copy.deepcopy(pair[1])
    tokenizer.chat_template += "{% if depth %}{% endif %}"
    written = asking((pair[0], tokenizer), fake, tmp_path, source=data, chat_template_kwargs={"depth": 2})
    written.write()
    _, record = next(written.records())
    assert [turn["content"] for turn in record["messages"]] == [
        "old greeting",
        "rain?",
        "old call",
        "none",
        "half of ?",
    ]
    assert [turn.get("weight") for turn in record["messages"]] == [0, None, 0, None, None]
    assert {name: record[name] for name in beside} == {
        **beside,
        "chat_template_kwargs": {"depth": 2, "thinking": False},
    }
    assert fake.asked[0]["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert "weight" not in fake.asked[0]["messages"][0]


@pytest.mark.parametrize("said", ["content", {"content": "a", "tool_calls": 3}])
def test_answers_of_other_forms_are_failures(said, pair, fake, tmp_path, monkeypatch):
    monkeypatch.setattr(fake, "said", {})
    answer = {
        "choices": [{"message": said, "finish_reason": "stop"}],
        "usage": {"completion_tokens": "x"},
        "model": "tiny",
    }
    monkeypatch.setattr(client.Servers, "post", lambda self, path, body: answer)
    data = asking(pair, fake, tmp_path, errors=20)
    if isinstance(said, str):
        refused("none of 6 conversations was answered", data.write)
        assert "another form than OpenAI's" in (data.place / "failed.jsonl").read_text()
    else:
        data.write()
        assert len(data.answered()) == 6


def test_an_interruption_loses_no_answer_that_was_on_its_way(pair, fake, tmp_path, monkeypatch):
    real, calls = module.wait, iter(range(100))

    def interrupted(*given: Any, **more: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return real(*given, **more)

    monkeypatch.setattr(module, "wait", interrupted)
    data = asking(pair, fake, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        data.write()
    assert 3 <= len(data.answered()) < 6
    asked = {body["seed"] for body in fake.asked}
    assert len(data.answered()) == len(asked)


def test_a_damaged_line_costs_its_answer_alone(pair, fake, tmp_path, capsys):
    data = asking(pair, fake, tmp_path)
    data.write()
    lines = data.path.read_bytes().splitlines(keepends=True)
    data.path.write_bytes(b"".join([lines[0], b"{" + lines[1][2:], *lines[2:5], lines[5][:9]]))
    before = len(fake.asked)
    asking(pair, fake, tmp_path).write()
    assert sorted(data.answered()) == list(range(6))
    assert len({body["seed"] for body in fake.asked[before:]}) == 2


@pytest.mark.parametrize("found", ["found", ""])
def test_tools_stay_as_they_are(found, pair, fake, tmp_path):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    turns = [
        {"role": "user", "content": "look it up"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": found},
        {"role": "assistant", "content": "old"},
    ]
    tools = [{"type": "function", "function": {"name": "look"}}]
    lines = write_lines(tmp_path / "tools.jsonl", [{"messages": turns, "tools": tools}])
    data = asking(pair, fake, tmp_path, source=JsonLines(path=lines, tokenizer=pair[1]))
    data.write()
    assert len(fake.asked) == 1
    assert fake.asked[0]["tools"] == tools
    record = next(record for _, record in data.records())
    assert record["messages"][1]["tool_calls"] == [call]
    assert record["messages"][2] == turns[2]
    assert record["messages"][-1]["content"] != "old"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "other"}, "answers as 'other'"),
        ({"layers": [1]}, "this server hands out hidden states"),
        ({"said": {"content": ""}}, "the answer is empty"),
    ],
)
def test_another_server_is_refused(pair, fake, tmp_path, wrong, said):
    for name, value in wrong.items():
        setattr(fake, name, value)
    data = asking(pair, fake, tmp_path, errors=0)
    refused(said, data.write)


@pytest.mark.parametrize("ids", [True, False])
def test_another_template_is_refused(pair, fake, tmp_path, ids):
    fake.template, fake.ids = copy.deepcopy(pair[1]), ids
    fake.template.chat_template = "{% for m in messages %}[{{ m['role'] }}]: {{ m['content'] }} {% endfor %}"
    refused("the chat template here", asking(pair, fake, tmp_path).write)


def test_no_server_and_no_model(pair, fake, tmp_path):
    refused(r"serves tiny, not 'large'", asking(pair, fake, tmp_path, model="large").write)
    fake.close()
    refused("does not answer", asking(pair, fake, tmp_path, source=None, conversations=1).write, error=ConnectionError)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "http://user:secret@host:8000"}, "OPENAI_API_KEY"),
        ({"url": "https://host/v1?key=secret"}, "OPENAI_API_KEY"),
        ({"url": "localhost:8000"}, "no address"),
        ({"url": []}, "names no server"),
        ({"url": "http://h", "source": None}, "data.conversations"),
        ({"url": "http://h", "new_tokens": 0}, "data.new_tokens=0"),
        ({"url": "http://h", "sampled": 2}, "data.sampled=2"),
        ({"url": "http://h", "openings": "Write"}, "data.openings"),
    ],
)
def test_wrong_settings(pair, settings, said):
    with pytest.raises(ValueError, match=said) as error:
        Server(**{"source": object(), "tokenizer": pair[1], **settings})
    assert "secret" not in str(error.value)


def test_the_key_is_sent_and_written_nowhere(pair, fake, tmp_path, monkeypatch):
    monkeypatch.setenv(client.KEY, "sesame\n")
    data = asking(pair, fake, tmp_path)
    data.write()
    assert fake.keys == {"Bearer sesame"}
    assert not any("sesame" in path.read_text(errors="replace") for path in data.place.rglob("*") if path.is_file())


def test_a_check_asks_nothing(pair, fake, tmp_path, tiny_folder):
    source(pair, tmp_path)
    config = compose_config(
        "train",
        *["name=x", f"target.name={tiny_folder}", "data=server", f"data.url={fake.url}", f"data.folder={tmp_path}"],
        *[f"data.source.path={tmp_path / 'asked.jsonl'}", "train.length=64", "loop.precision=no", "loop.batch_size=2"],
    )
    said = "\n".join(run_check(config, tmp_path / "run"))
    assert "6 conversations are asked of tiny, 0 are answered" in said
    assert not fake.asked


def test_merged_turns():
    one = merged([([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])])
    assert one == [{"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 1, 0, 1]}]
    two = merged([([1, 2], [3, 4]), ([1, 2, 4, 5], [6])])
    assert [part["input_ids"] for part in two] == [[1, 2, 3, 4], [1, 2, 4, 5, 6]]


def test_records_of_token_ids(pair, tmp_path):
    """As speculators regenerates them."""
    lines = [{"input_ids": [5, 6, 7, i], "loss_mask": [0, 0, 1, 1]} for i in range(8, 14)]
    data = JsonLines(path=write_lines(tmp_path / "ids.jsonl", lines), tokenizer=pair[1])
    corpus = tokenize(data.train(), pair[1])
    assert corpus.document(0).tokens[:3].tolist() == [5, 6, 7]
    assert corpus.document(0).mask.tolist() == [False, False, True, True]
    for wrong, said in (
        ({"input_ids": [1, 2], "loss_mask": [1]}, "of one length"),
        ({"input_ids": [1, "a"], "loss_mask": [1, 1]}, "lists of integers"),
        ({"input_ids": [1, 2], "loss_mask": [-100, 7]}, "loss_mask holds -100; give 1 for tokens that count"),
    ):
        data = JsonLines(path=write_lines(tmp_path / "wrong.jsonl", [*lines, wrong]), tokenizer=pair[1])
        refused(said, data.train)
    cut = [{"input_ids": [1, 2, i], "loss_mask": [0, 0, 0]} for i in range(3)]  # before their answer
    broken = Broken()
    data = JsonLines(path=write_lines(tmp_path / "cut.jsonl", [*lines, *cut]), tokenizer=pair[1])
    assert len(list(data.documents(broken))) == 6
    assert broken.empty == 3
    beyond = [{"input_ids": [0, 100_000 + i], "loss_mask": [0, 1]} for i in range(4)]
    data = JsonLines(path=write_lines(tmp_path / "beyond.jsonl", beyond), tokenizer=pair[1])
    refused("they were made by another", data.train)
