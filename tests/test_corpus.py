import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refused, write_lines
from tokenizers.processors import TemplateProcessing

from selfspec.data.chat import Chat
from selfspec.data.corpus import EVALUATION, VALIDATION, Document, PythonSource, TextFolder
from selfspec.data.cut_prompts import cut_prompts
from selfspec.data.documents import _digest
from selfspec.data.encoded import beginning
from selfspec.data.packing import Packed, openings
from selfspec.data.records import Hub, JsonLines, Parquet, files_of
from selfspec.data.store import stored, tokenize
from selfspec.training.distill import _Source
from selfspec.training.states import documents_of as parts_of
from selfspec.training.states import key_of
from selfspec.training.states_folder import FromFolder


def test_held_out_modules_are_never_trained_on():
    source = PythonSource()
    names = [{d.name for d in part} for part in (source.train(), source.validation(), source.evaluation())]
    assert not names[0] & names[1]
    assert not names[0] & names[2]
    assert not names[1] & names[2]
    assert not set(VALIDATION) & set(EVALUATION)
    assert len(names[1]) >= 8
    assert len(names[2]) >= 8
    assert len(names[0]) > 100


def test_python_source_is_the_same_list_every_time(source_root):
    source = PythonSource(str(source_root), max_files=3)
    assert [d.name for d in source.train()] == [d.name for d in source.train()]
    assert len(source.train()) == 3
    assert {d.name for d in source.validation()} == {"queue.py", "statistics.py"}
    assert {d.name for d in source.evaluation()} == {"heapq.py", "argparse.py"}


def test_tokens_and_mask_follow_the_text(tokenizer, source_root):
    documents = PythonSource(str(source_root)).validation()
    stream = tokenize(documents, tokenizer)
    assert tokenizer.decode(stream.tokens[stream.mask]) == "".join(d.text for d in documents)
    assert int((~stream.mask).sum()) == len(documents)
    assert stream.n_bytes == sum(len(d.text.encode()) for d in documents)


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}, {"from": "human", "value": "Bye"}]


def test_only_what_the_assistant_says_counts(tokenizer, tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"messages": CHAT}, {"conversations": SHAREGPT}, {"text": "plain"}])
    documents = [document for document, _ in JsonLines(path=path, tokenizer=tokenizer).documents()]
    said = [("<user>Hi</user>\n<assistant>", False), ("Hello!", True)]
    assert list(documents[0].spans) == [*said, ("</assistant>\n", False)]
    assert list(documents[1].spans) == [*said, ("</assistant>\n<user>Bye</user>\n", False)]
    assert documents[2].spans == (("plain", True),)
    stream = tokenize(documents, tokenizer)
    assert tokenizer.decode(stream.tokens[stream.mask]) == "Hello!Hello!plain"


def test_every_turn_counts_under_a_template_that_rewrites_earlier_ones(tokenizer, tmp_path):
    """Like Qwen3's: only the last assistant's turn is rendered with its thinking; user text quotes the answer."""
    other = copy.deepcopy(tokenizer)
    other.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]"
        "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
        "{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' }}\n{% endfor %}"
    )
    turns = [("user", "say one"), ("assistant", "one"), ("user", "now two, not one"), ("assistant", "two")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path = write_lines(tmp_path / "d.jsonl", [{"messages": messages}, {"text": "x"}])
    source = JsonLines(path=path, tokenizer=other)
    documents = [document for document, _ in source.documents()][:-1]
    said = [[text for text, counts in document.spans if counts] for document in documents]
    assert said == [[f"[assistant]<think></think>{word}{other.eos_token}"] for word in ("one", "two")]
    assert [document.text for document in documents] == [
        other.apply_chat_template(messages[:n], tokenize=False) for n in (2, 4)
    ]
    parts = {part for document, part in source.documents() if document.text.startswith("[user]")}
    assert len(parts) == 1  # a record's documents validate together, or train together


def test_line_separators_inside_a_string_are_text(tokenizer, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\u0085c"}, ensure_ascii=False) + '\n{"text": "x"}\n', encoding="utf-8")
    documents = JsonLines(path=str(path), tokenizer=tokenizer).documents()
    assert [document.text for document, _ in documents] == ["a\u2028b\u0085c", "x"]


def test_files_that_people_have(tokenizer, tmp_path):
    """Gzip under any name, an empty shard beside a full one, and arrays, whose errors say what is read instead."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    packed = tmp_path / "packed.jsonl"
    packed.write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'))
    assert len(list(JsonLines(path=str(packed), tokenizer=tokenizer).documents())) == 2
    for name, rows in (("empty", []), ("full", ["a", "b"])):
        parquet.write_table(arrow.table({"text": arrow.array(rows, arrow.string())}), tmp_path / name)
    paths = [str(tmp_path / name) for name in ("empty", "full")]
    assert len(list(Parquet(path=paths, tokenizer=tokenizer).documents())) == 2
    for array in ('[{"text": "a"}]\n', '[\n {"text": "a"}\n]\n'):
        (tmp_path / "array.jsonl").write_text(array)
        refused(
            "one object a line", list, JsonLines(path=str(tmp_path / "array.jsonl"), tokenizer=tokenizer).documents()
        )


def test_jsonl_splits_without_overlap(tokenizer, tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"text": f"text {i}"} for i in range(20)])
    data = JsonLines(path=path, tokenizer=tokenizer, validation_share=0.2)
    train, held = {d.name for d in data.train()}, {d.name for d in data.validation()}
    assert len(train) == 16
    assert len(held) == 4
    assert not train & held


def test_answers_to_one_question_fall_on_one_side(tokenizer, tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {role: name, "content": f"a{j}"}]}
        for i in range(12)
        for j, (role, name) in enumerate((("role", "assistant"), ("from", "gpt"), ("role", "assistant")))
    ]
    ids = [{"input_ids": [*range(i, i + 9), j], "loss_mask": [0] * 9 + [1]} for i in range(12) for j in range(3)]
    ids = [{**line, "tokens": 10} for line in ids]  # how many there are
    for lines in (chats, ids):
        one, other = (set[str](), set[str]())
        for line in lines:
            asked = json.dumps(line["messages"][0] if "messages" in line else line["input_ids"][:9])
            (one if _digest(line) < 0.5 else other).add(asked)
        assert one
        assert other
        assert not one & other
    said = [("system", "s"), ("user", "Hi"), ("assistant", "Hello")]
    forms = [
        {"messages": [{"role": role, "content": text} for role, text in said]},
        {"conversations": [{"from": {"user": "human"}.get(role, role), "value": text} for role, text in said]},
        {"messages": [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said]},
        {"messages": [{"role": role, "content": text} for role, text in said[1:]], "system": "s"},
    ]
    assert len(set(map(_digest, forms))) == 1  # however it is written
    plain = [{"input_ids": [0, i, i], "loss_mask": [0, 1, 1]} for i in range(12)]  # of texts, behind a BOS
    assert len({_digest(line) for line in plain}) == 12


def test_a_file_counts_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_lines(tmp_path / "small.jsonl", [{"text": "a"}])
    (found,) = files_of(["small.jsonl", "sm*.jsonl", path, "./small.jsonl"])
    assert found.resolve() == Path(path).resolve()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2: not JSON"),
        ("[1]", "line 2: expected an object, found list"),
        ('{"messages": "x"}', "line 2: expected a string as `text`"),
        ('{"prompt": "x"}', r"line 2: expected a string as `text`.*prompt"),
        ('{"messages": [{"role": "user"}]}', "line 2: a turn needs `role`"),
    ],
)
def test_broken_lines_are_named(line, message, tokenizer, tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"text": "fine"}, line])
    refused(message, JsonLines(path=path, tokenizer=tokenizer).train)


@pytest.mark.parametrize("records", [[], [{"text": " "}], [{"messages": CHAT[:1]}]])
def test_data_without_a_usable_example_is_refused(records, tokenizer, tmp_path):
    path = write_lines(tmp_path / "d.jsonl", records)
    refused("no usable example", JsonLines(path=path, tokenizer=tokenizer).train)


def test_text_folders(tmp_path):
    refused("is not a folder", TextFolder, str(tmp_path / "none"))
    refused("no usable example", TextFolder(str(tmp_path)).train)
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    data = TextFolder(str(tmp_path))
    assert len(data.train()) == 9
    assert len(data.validation()) == 1
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\xff")
    refused(r"x\.txt is not UTF-8", data.train)


def test_prompts_have_their_length_and_start_a_line(tokenizer):
    documents = PythonSource().evaluation()
    prompts = cut_prompts(documents, tokenizer, 20, 40)
    assert prompts == cut_prompts(documents, tokenizer, 20, 40)
    assert {len(p) for p in prompts} == {40}
    assert len({tuple(p) for p in prompts}) == 20
    for prompt in prompts:
        text = tokenizer.decode(prompt[:-2])
        assert any(d.text.startswith(text) or "\n" + text in d.text for d in documents)
    refused("no usable example", cut_prompts, [], tokenizer, 4, 48)


def test_texts_that_are_cut_begin_as_whole_ones_do(tokenizer):
    """Where a tokenizer puts a BOS token before every text, parts of long documents, prompts and stretches have it."""
    own = copy.deepcopy(tokenizer)
    bos, again = own.bos_token, own.bos_token_id
    own.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, again)])
    assert (beginning(tokenizer), beginning(own)) == ((), (again,))
    documents = PythonSource().evaluation()[:2]
    corpus, plain = tokenize(documents, own), tokenize(documents, tokenizer)
    assert torch.equal(corpus.tokens, plain.tokens)
    packed, before = Packed(corpus, 32, 1, 0), Packed(plain, 32, 1, 0)
    rows = packed.rows(range(packed.per_epoch))
    documents_of = rows["documents"]
    first = (documents_of.diff(dim=1, prepend=torch.full((len(documents_of), 1), -2)) != 0) & (documents_of >= 0)
    assert set(rows["tokens"][first].tolist()) == {again}
    assert not rows["mask"][first].any()
    assert rows["mask"].sum() == corpus.mask.sum() == before.rows(range(before.per_epoch))["mask"].sum()
    parts = sorted(zip(packed.starts.tolist(), packed.lengths.tolist(), packed.more.tolist(), strict=True))
    assert torch.equal(torch.cat([corpus.tokens[a : a + n - more] for a, n, more in parts]), corpus.tokens)
    states = object.__new__(FromFolder)  # rows that a training kept: whole documents are found again
    states.folder, states._kept = Path("kept"), [torch.zeros(1)]
    states.places = {key_of(part): (Path("0"), 0) for _, _, part in parts_of(rows)}
    found = states.covered(corpus, 32, "training")
    assert torch.equal(found.tokens, corpus.tokens)
    assert torch.equal(Packed(found, 32, 1, 0).lengths, packed.lengths)
    refused("leaves no room behind the 1 tokens that texts begin with", Packed, corpus, 1, 1, 0)
    prompts = cut_prompts(documents, own, 4, 24)
    assert {(len(prompt), prompt[0]) for prompt in prompts} == {(24, again)}
    streams, _ = _Source.of(corpus, 64).prompts(20, 8, 64, torch.Generator().manual_seed(0))
    assert {(len(one.tokens), int(one.tokens[0]), bool(one.mask[0])) for one in streams} == {(20, again, False)}


# -- records and their tokens


def talk(i: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"It is {i}!"}]}


def test_records_are_tokenized_once(tokenizer, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "d.jsonl", [talk(i) if i % 3 else {"text": f"text {i}\n" * i} for i in range(40)])
    source = JsonLines(path=path, tokenizer=tokenizer)
    train, validation = stored(source, tokenizer, tmp_path / "cache")
    for corpus, documents in ((train, source.train()), (validation, source.validation())):
        whole = tokenize(documents, tokenizer)
        assert corpus.tokens.tolist() == whole.tokens.tolist()
        assert corpus.mask.tolist() == whole.mask.tolist()
        assert corpus.starts.tolist() == whole.starts.tolist()
        assert corpus.is_chat.tolist() == whole.is_chat.tolist() == [d.conversation for d in documents]
        assert (corpus.n_bytes, corpus.counted) == (whole.n_bytes, whole.counted)
    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "documents", None)  # not read again
        again, _ = stored(JsonLines(path=path, tokenizer=tokenizer), tokenizer, tmp_path / "cache")
        assert again.tokens.tolist() == train.tokens.tolist()
    other = copy.deepcopy(tokenizer)
    other.chat_template += "."
    assert stored(JsonLines(path=path, tokenizer=other), other, tmp_path / "cache")[0].key != train.key
    write_lines(Path(path), [talk(i) for i in range(40)])
    assert stored(source, tokenizer, tmp_path / "cache")[0].key != train.key
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_broken_records_are_counted_and_limited(tokenizer, tmp_path, capsys):
    lines = [talk(i) for i in range(30)] + ["{broken", {"messages": [{"role": "user"}]}, {"text": "\ud800"}]
    path = write_lines(tmp_path / "d.jsonl", [*lines, {"text": ""}])
    with (tmp_path / "d.jsonl").open("ab") as file:
        file.write(b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl, line 35: not UTF-8.*3 before it were tolerated.*data.tolerate=4"):
        stored(JsonLines(path=path, tokenizer=tokenizer, tolerate=3), tokenizer, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
    for _ in range(2):  # read, then from the cache
        source = JsonLines(path=path, tokenizer=tokenizer, tolerate=4)
        train, validation = stored(source, tokenizer, tmp_path / "cache")
        assert len(train.is_chat) + len(validation.is_chat) == 30
        said = capsys.readouterr().err
        assert "4 broken records" in said
        assert "line 31: not JSON" in said
        assert "line 33: the text holds half of a surrogate pair" in said


def test_tokens_are_those_of_the_whole_text(tokenizer):
    """Encoded part by part, a text may have other tokens than where it is written in one go; an answer begins behind
    its prompt's last token all the same, as in decoding, and a prompt loses nothing to it."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    for spans, pieces in {
        (("x = ", False), ("(1)", True), ("\n\n", False)): ("x = (1)\n\n",),
        (("x = pri", False), ("nt(1)", True)): ("x = pri", "nt(1)"),
        (("retu", False), ("rn x", True), ("\n\npri", False), ("nt(1)", True)): ("retu", "rn x\n\npri", "nt(1)"),
    }.items():
        document = Document("d", spans)
        corpus = tokenize([document], tokenizer)
        assert corpus.tokens.tolist() == [token for piece in pieces for token in ids(piece)]
        assert len(pieces) == 1 or ids(document.text) != corpus.tokens.tolist()
        assert tokenizer.decode(corpus.tokens[corpus.mask]) == "".join(text for text, counts in spans if counts)
        _, ends = openings(corpus)
        assert tokenizer.decode(corpus.tokens[: ends[0]]) == spans[0][0]
    plain = tokenize([Document("d", (("x = 1", True),))], tokenizer)  # text alone stands behind a separator
    assert plain.tokens[0] in (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert plain.tokens[1:].tolist() == tokenizer("x = 1", add_special_tokens=False)["input_ids"]


def test_many_records_are_divided_by_their_text(tokenizer, tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"text": f"text {i % 1500}"} for i in range(3000)])
    source = JsonLines(path=path, tokenizer=tokenizer)
    train, held = [d.text for d in source.train()], [d.text for d in source.validation()]
    assert not set(train) & set(held)
    assert len(train) + len(held) == 3000
    assert 200 < len(held) < 400


def test_greetings_and_names_of_roles_leave_the_sides_alone(tokenizer, tmp_path):
    """The side follows from what is asked, not from a greeting before it, however its role is called."""
    greeting = [{"role": "system", "content": "You are a bot."}, {"role": "Assistant", "content": "Welcome!"}]
    lines = [
        {"messages": [*greeting, {"role": "user", "content": f"q {i}"}, {"role": "GPT", "content": f"a {i} {k}"}]}
        for i in range(1100)
        for k in (0, 1)
    ]
    data = JsonLines(path=write_lines(tmp_path / "d.jsonl", lines), tokenizer=tokenizer, validation_share=0.1)
    sides: dict[str, set[str]] = {}
    for document, part in data.documents():
        sides.setdefault(document.text.partition("q ")[2].split("<")[0], set()).add(part)
    assert all(len(parts) == 1 for parts in sides.values())
    assert 60 < sum(parts == {"validation"} for parts in sides.values()) < 160


def test_a_side_does_not_follow_from_the_template(tokenizer, tmp_path):
    """A template may render the date: what was held out yesterday must not train today."""
    path = write_lines(tmp_path / "d.jsonl", [talk(i) for i in range(40)])
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ 'Today is Monday.' }}" + other.chat_template
    held = [{d.text[-9:] for d in JsonLines(path=path, tokenizer=each).validation()} for each in (tokenizer, other)]
    assert held[0] == held[1] != set()


def test_equal_files_fall_on_one_side(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"text {i % 5}\n")
    source = TextFolder(str(tmp_path))
    train, held = [d.text for d in source.train()], [d.text for d in source.validation()]
    assert len(train) + len(held) == 20
    assert len(held) == 4
    assert not set(train) & set(held)


def test_parquet_and_data_sets_by_name_are_read_alike(tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{**talk(i), "text": None} if i % 2 else {"messages": None, "text": f"text {i}"} for i in range(20)]
    path = write_lines(tmp_path / "d.jsonl", [{k: v for k, v in row.items() if v is not None} for row in rows])
    texts = {d.text for d in JsonLines(path=path, tokenizer=tokenizer).train()}
    folder = tmp_path / "set"
    folder.mkdir()
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    one = Parquet(path=str(folder / "*.parquet"), tokenizer=tokenizer)
    two = Hub(name=str(folder), tokenizer=tokenizer)
    for source in (one, two):
        assert {d.text for d in source.train()} == texts
        corpus, _ = stored(source, tokenizer, tmp_path / "cache")
        assert len(corpus.is_chat) == len(texts)
    assert two.fingerprint() == Hub(name=str(folder), tokenizer=tokenizer).fingerprint()
    (folder / "broken.parquet").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"broken\.parquet can not be read as Parquet"):
        Parquet(path=str(folder / "broken.parquet"), tokenizer=tokenizer).train()
    refused(r"data.name='nobody/none' .* can not be loaded", Hub(name="nobody/none", tokenizer=tokenizer).train)


def test_names_with_signs_of_patterns_are_names(tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    for name, text in (("data1", "wrong"), ("data[1]", "right")):
        datasets.Dataset.from_list([{"text": f"{text} {i}"} for i in range(4)]).to_parquet(tmp_path / f"{name}.parquet")
    found = [
        record["text"] for _, record in Parquet(path=str(tmp_path / "data[1].parquet"), tokenizer=tokenizer).records()
    ]
    assert found == [f"right {i}" for i in range(4)]
    (tmp_path / "a" / "b").mkdir(parents=True)
    for place in (tmp_path, tmp_path / "a", tmp_path / "a" / "b"):
        write_lines(place / "x.jsonl", [{"text": "a"}])
    assert len(files_of(str(tmp_path / "**" / "*.jsonl"))) == 3


def test_gzipped_files_and_patterns(tokenizer, tmp_path):
    for part in range(2):
        with gzip.open(tmp_path / f"{part}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": f"text {part} {i}"}) + "\n" for i in range(5))
    source = JsonLines(path=str(tmp_path / "*.gz"), tokenizer=tokenizer)
    assert len(source.train() + source.validation()) == 10
    refused(r"none\*\.jsonl' is not a file, and matches none", JsonLines(path="none*.jsonl", tokenizer=tokenizer).train)


def test_a_damaged_cache_is_made_anew(tokenizer, tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [talk(i) for i in range(20)])
    source = JsonLines(path=path, tokenizer=tokenizer)
    whole = stored(source, tokenizer, tmp_path / "cache")[0].tokens.tolist()
    (folder,) = (tmp_path / "cache").iterdir()
    for name, content in (("train.tokens", b""), ("train.talks", None), ("about.json", b"{}"), ("about.json", b"[")):
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        assert stored(source, tokenizer, tmp_path / "cache")[0].tokens.tolist() == whole
        assert [one.name for one in (tmp_path / "cache").iterdir()] == [folder.name]


def test_files_that_can_not_be_read_are_named(tokenizer, tmp_path):
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-10])
    (tmp_path / "no.jsonl.gz").write_bytes(b'{"text": "a"}')
    for name in ("cut.jsonl.gz", "no.jsonl.gz"):
        with pytest.raises(ValueError, match=rf"{name} can not be read to its end"):
            JsonLines(path=str(tmp_path / name), tokenizer=tokenizer, tolerate=100).train()
    for path in ([], None, 5, ["a", None], str(tmp_path)):
        refused(r"data\.path=", JsonLines(path=path, tokenizer=tokenizer).train)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"text": "", "messages": CHAT}, "Hello!"),
        ({"text": None, "conversations": SHAREGPT[:2]}, "Hello!"),
        ({"messages": [{"role": "User", "content": "Hi"}, {"role": "model", "content": "Hello!"}]}, "Hello!"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": [{"type": "text", "text": "Hello!"}]}]}, "Hello!"),
    ],
)
def test_conversations_as_others_write_them(record, text, tokenizer, tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [record, {"text": "x"}])
    (document, _), _ = JsonLines(path=path, tokenizer=tokenizer).documents()
    assert [part for part, counts in document.spans if counts] == [text]


def test_a_records_own_system_text_and_weights_are_read(tokenizer, tmp_path):
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    for key in ("system", "system_prompt"):  # the same as in questions
        chat = Chat.of({"conversations": turns, key: "Be brief."}, "x")
        assert [turn["role"] for turn in chat.messages] == ["system", "user", "assistant"]
    refused("x: system must be a string", Chat.of, {"conversations": turns, "system": ["Be brief."]}, "x")
    odd = [{"role": "assistant", "content": "Bad", "weight": "0"}]
    refused("x: the weight of a turn must be a number", Chat.of, {"messages": odd}, "x")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Bad", "weight": 0}]
    messages += [{"role": "user", "content": "Again"}, {"role": "assistant", "content": "Good", "weight": 1}]
    assert Chat.of({"messages": messages}, "x").answers == [3]


@pytest.mark.parametrize("tokens", [[], ["a"]])
def test_a_conversation_may_name_its_tokens(tokens, tokenizer, tmp_path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = write_lines(tmp_path / "d.jsonl", [{"messages": messages, "tokens": tokens}, {"text": "x"}])
    documents = [document for document, _ in JsonLines(path=path, tokenizer=tokenizer).documents()]
    assert "Hello" in [text for document in documents for text, counts in document.spans if counts]


def test_a_data_set_that_was_saved(tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"text": f"text {i}"} for i in range(6)]).save_to_disk(str(tmp_path / "saved"))
    assert len(list(Hub(name=str(tmp_path / "saved"), tokenizer=tokenizer).records())) == 6
    ids = datasets.Dataset.from_list([{"input_ids": [1, 2, i], "loss_mask": [0, 1, 1]} for i in range(6)])
    ids.with_format("torch").save_to_disk(str(tmp_path / "tensors"))  # as speculators does
    assert len(list(Hub(name=str(tmp_path / "tensors"), tokenizer=tokenizer).documents())) == 6
    with pytest.raises(ValueError, match="has no subset, split or revision"):
        list(Hub(name=str(tmp_path / "saved"), split="train[:2]", tokenizer=tokenizer).records())
