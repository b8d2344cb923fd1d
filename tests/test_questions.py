"""Instructions and evaluation sets: every generator's checker, the chat template, files as others publish them."""

import copy
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from conftest import SPEC_BENCH, compose_config, refused, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import selfspec
from selfspec.cli.evaluation_runs import run_show
from selfspec.core.generate import autoregressive
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.stats import Stats
from selfspec.core.target import Target
from selfspec.data.chat import TEMPLATE, Chat
from selfspec.data.chat_template import ChatTemplate
from selfspec.data.corpus import Document, PythonSource
from selfspec.data.cut_prompts import sample_prompts
from selfspec.data.instructions import Instructions, conversations, edits, instructions
from selfspec.data.packing import Packed, openings
from selfspec.data.questions import Answering, Asking, Question, _read, read_questions
from selfspec.data.store import Corpus, joined, tokenize
from selfspec.data.tasks import EDITS, TASKS, Pool, pool
from selfspec.data.tasks.base import SPLITS, code_of, concludes
from selfspec.data.tasks.short import look_up
from selfspec.evaluation.arms import Prompt, prompts_of
from selfspec.evaluation.decode import DEFINITIONS, DecodeConfig, defined, run_benchmark, summarize
from selfspec.evaluation.points import answer_files, write_answers
from selfspec.training.distill import DistillConfig, distill
from selfspec.training.pretrain import chat_tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def held_out() -> Pool:
    return pool(PythonSource().evaluation(), "evaluation")


@pytest.fixture(scope="session")
def chatty(source_root) -> Any:
    texts = [p.read_text() for p in sorted(source_root.glob("*.py"))]
    return chat_tokenizer(train_tokenizer(texts, 400))


@pytest.mark.parametrize("group", TASKS)
def test_a_checker_takes_its_own_answer_and_no_other(group, held_out):
    made = instructions(held_out, [group], 1000 * len(TASKS[group]), seed=7)
    assert {i.task for i in made} == {make.__name__ for make in TASKS[group]}
    for instruction in made:
        for turn in instruction.turns:
            assert turn.check(turn.answer), (instruction.task, turn.answer)
    for one, other in zip(made, made[len(TASKS[group]) :], strict=False):  # the same kind, other words
        mine, others = one.turns[0].answer, other.turns[0].answer
        ends = [set(re.findall(r"\w+", text.splitlines()[-1])[-2:]) - {"times"} for text in (mine, others)]
        lenient = group in ("reason", "extract") and ends[0] & ends[1]  # only what it comes to is checked
        if one.task != "records" and mine != others and not lenient:
            assert not one.turns[0].check(others), one.task
        half = mine[: len(mine) // 2] if group != "reason" else "it is"  # half of the steps may end in the right number
        for wrong in ("", "```", half):
            assert not one.turns[0].check(wrong), (one.task, wrong)


def test_an_edit_is_right_where_nothing_else_changed():
    documents = PythonSource().evaluation()
    made = edits(documents, "evaluation", list(EDITS), 200, seed=7)
    assert [edit.group for edit in made[:5]] == list(EDITS)
    for edit in made:
        (turn,) = edit.turns
        given_code = code_of(turn.question)
        assert turn.check(turn.answer), edit
        assert turn.check(f"Sure!\n\n{turn.answer}\nDone."), edit
        assert turn.check(turn.answer.replace("```", "~~~")), edit
        assert turn.check(f"{turn.answer[:-4]}```\nDone."), edit
        assert turn.check(f"```It``` is changed.\nHere:{turn.answer}"), edit
        assert not turn.check(f"```\n{given_code}\n```"), edit  # nothing was done
        assert not turn.check("```python\npass\n```"), edit
        if edit.group != "reformat":
            more = turn.answer.replace("\n```", "\n    extra()\n```")
            assert not turn.check(more), edit
            assert not turn.check(turn.answer.replace("\n```", "\nextra()\n```")), edit


def test_no_word_is_in_two_splits():
    source = PythonSource()
    held = [source.validation(), source.evaluation()]
    pools = [pool(documents, split) for documents, split in zip(held, SPLITS[1:], strict=True)]
    assert not set(pools[0].words) & set(pools[1].words)
    same_text = [pool(source.evaluation(), split).words for split in SPLITS]  # one text, three splits: words decide
    assert sum(map(len, same_text)) == len({word for words in same_text for word in words})


def test_the_first_of_more_are_the_same(held_out):
    few, many = (instructions(held_out, list(TASKS), n, 3) for n in (20, 40))
    assert [i.turns[0].question for i in few] == [i.turns[0].question for i in many[:20]]
    assert any(len(i.turns) > 1 for i in instructions(held_out, ["extract"], 20, 3))
    alone = instructions(held_out, ["reason"], 4, 3)  # whatever other groups are asked for
    assert [i.turns[0].question for i in alone] == [i.turns[0].question for i in few if i.group == "reason"]
    for groups in (["poems"], []):
        refused("choose from edit, convert", instructions, held_out, groups, 1, 0)
    documented = Pool(held_out.words, (("f", 'def f(a: int):\n    """All."""\n'),))
    for group in ("edit",):
        refused("none of a thousand functions", instructions, documented, [group], 4, 0)
    refused("too few to make instructions of", pool, [], "train")


def test_a_template_without_a_system_role_gets_none(held_out, chatty):
    plain = copy.deepcopy(chatty)
    plain.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + TEMPLATE
    asked = instructions(held_out, ["extract"], 20, 0)
    made = [conversations(asked, ChatTemplate(tokenizer), 0) for tokenizer in (chatty, plain)]
    systems = [sum("<|system|>" in document.text for document in documents) for documents in made]
    assert (systems[0] > 0, systems[1]) == (True, 0)


def test_spans_are_the_generation_tags_of_the_template(held_out, chatty):
    documents = conversations(instructions(held_out, list(TASKS), 40, 0), ChatTemplate(chatty), 0)
    assert any(d.text.count("<|user|>") > 1 for d in documents)
    assert any("<|system|>" in d.text for d in documents)
    for document in documents:
        stream = tokenize([document], chatty)
        assert stream.tokens[0] == chatty.bos_token_id
        assert chatty.bos_token_id not in stream.tokens[1:].tolist()  # the template's own is not doubled
        turns = document.text.removeprefix(chatty.bos_token).split("<|end|>")[:-1]
        said = [turn.removeprefix("<|").split("|>", 1) for turn in turns]
        messages = [{"role": role, "content": content} for role, content in said]
        own = chatty.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert own["input_ids"] == stream.tokens.tolist()
        assert own["assistant_masks"] == stream.mask.int().tolist()
    assert chatty.decode(chatty("x = 12345\n")["input_ids"]) == "x = 12345\n"
    assert len(chatty("12345")["input_ids"]) == 5


def test_openings_end_where_an_answer_begins(held_out, chatty):
    document = next(
        d
        for d in conversations(instructions(held_out, ["extract"], 20, 0), ChatTemplate(chatty), 0)
        if len(d.spans) > 2
    )
    corpus = tokenize([Document("plain", (("x = 1\n", True),)), document, document], chatty)
    starts, ends = openings(corpus)
    assert len(starts) == 2 * sum(counts for _, counts in document.spans)
    assert sorted(set(starts.tolist())) == corpus.starts[1:3].tolist()
    for start, end in zip(starts, ends, strict=True):
        text = chatty.decode(corpus.tokens[start:end])
        assert text.endswith("<|assistant|>")
        assert document.text.startswith(text)


def test_prompts_of_conversations_leave_room_and_are_different(chatty):
    def talk(words: int) -> Document:
        said = [{"role": "user", "content": "word " * words}, {"role": "assistant", "content": "yes"}]
        return ChatTemplate(chatty).documents(Chat(said), f"{words}")[0][0]

    talks = [talk(n) for n in (1, 2, 3, 900)]  # the last is too long
    found = sample_prompts(tokenize(talks[:4], chatty), chatty, 3, 16, 8, limit=256)
    assert len({tuple(p) for p in found}) == 3
    assert max(map(len, found)) < 100
    fewer = sample_prompts(tokenize(talks[:4], chatty), chatty, 4, 16, 8, limit=256)  # training says that it is fewer
    assert sorted(fewer) == sorted(found)
    with pytest.raises(ValueError, match="0 of 1 questions leave room for an answer of 8 "):
        sample_prompts(tokenize(talks[3:4], chatty), chatty, 4, 16, 8, limit=256)
    text = Document("t", (("x = 1\n" * 400, True),))
    mixed = sample_prompts(tokenize([*talks[:3], text], chatty), chatty, 3, 16, 8)
    assert sum(len(p) == 16 for p in mixed) == 3  # three questions against some 60 rows of text
    short = [Document(f"{i}", (("x = 1\n", True),)) for i in range(99)]
    filled = sample_prompts(tokenize([*talks[:3], *short], chatty), chatty, 3, 16, 8)
    assert sorted(filled) == sorted(found)  # texts are too short for their share


def test_distillation_answers_questions(chatty, held_out, tmp_path, capsys):
    from conftest import tiny_model

    model = tiny_model(dtype=torch.float32, vocab_size=len(chatty), max_position_embeddings=512)
    target = Target(model)
    talks = tokenize(conversations(instructions(held_out, ["extract"], 6, 0), ChatTemplate(chatty), 0), chatty)
    config = DistillConfig(rows=6, prompt_tokens=200, new_tokens=200)
    whole, _ = distill(target, talks, config, 0, tmp_path)
    assert len(whole.starts) == 7
    asked = {tuple(talks.tokens[a:b].tolist()) for a, b in zip(*openings(talks), strict=True)}
    row = whole.document(0).tokens.tolist()
    start = next(i for i, counts in enumerate(whole.mask.tolist()) if counts)
    assert tuple(row[:start]) in asked
    options = Options(200, Sampling(1.0), [0], target.end_tokens)
    own = autoregressive(target, [row[:start]], options).token_ids[0]
    assert row[start : start + len(own)] == own
    assert whole.mask[start : start + len(own)].all()
    again, _ = distill(target, talks, config, 0, tmp_path)
    assert torch.equal(again.tokens, whole.tokens)
    with pytest.raises(ValueError, match=r"none of .* questions leaves room for an answer in 16 tokens"):
        distill(target, talks, DistillConfig(6, 8, 8), 0, tmp_path)
    assert "questions leave" not in capsys.readouterr().out
    lengths = (end - start for start, end in zip(*openings(talks), strict=True))
    room = int(sorted(lengths)[3]) + len(talks.prompt_end) + 1
    distill(target, talks, DistillConfig(1, room - 4, 4), 0, tmp_path)
    assert f"7 of 10 questions leave no room for an answer in {room} tokens" in capsys.readouterr().out


def of_sizes(sizes: Sequence[int]) -> Corpus:
    """Documents of these lengths, the tokens of each its length."""
    tokens, starts = torch.tensor([n for n in sizes for _ in range(n)]), torch.tensor([0, *sizes]).cumsum(0)
    return joined(tokens, torch.ones_like(tokens, dtype=torch.bool), starts, torch.zeros(len(sizes), dtype=torch.bool))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=200), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_packed_rows_hold_every_token_once(sizes, seed):
    rows = Packed(of_sizes(sizes), 12, 4, seed)
    batch = rows.rows(range(rows.per_epoch))
    assert (batch["mask"] == (batch["documents"] >= 0)).all()
    assert sorted(batch["tokens"][batch["mask"]].tolist()) == sorted(n for n in sizes for _ in range(n))
    for tokens, documents in zip(batch["tokens"], batch["documents"], strict=True):
        for n in range(int(documents.max()) + 1):
            own = tokens[documents == n]
            assert len(set(own.tolist())) == 1
            assert len(own) <= min(12, own[0])  # whole, or a part of a longer one
            assert len(own) == own[0] or own[0] > 12
    assert rows.filled > 0.5 or rows.per_epoch < 3


def test_packed_batches_follow_from_the_step():
    sizes = [n % 11 + 1 for n in range(300)]
    one, two = Packed(of_sizes(sizes), 16, 4, seed=1), Packed(of_sizes(sizes), 16, 4, seed=1)
    later = [two.batch(step) for step in (40, 3)][::-1]
    for step, expected in zip((3, 40), later, strict=True):
        assert all(torch.equal(value, expected[key]) for key, value in one.batch(step).items())
    halves = [Packed(of_sizes(sizes), 16, 4, 1, rank, 2).batch(3)["tokens"] for rank in range(2)]
    assert torch.equal(torch.cat(halves), one.batch(3)["tokens"])
    epoch = [i for step in range(one.per_epoch // 4) for i in one.numbers(step)]
    assert len(set(epoch)) == len(epoch)
    refused("4 rows a step do not divide over 3 processes", Packed, of_sizes(sizes), 16, 4, 0, 0, 3)


# -- sets


def ask(name: str, tokenizer: Any, groups: list[str] | None = None, prompts: int = 6, **changes: Any) -> list[Question]:
    return read_questions(Asking(name, groups, prompts, 24, **changes), tokenizer, PythonSource().evaluation)


def test_sets_have_groups_in_turn(tokenizer):
    assert [q.group for q in ask("instructions", tokenizer, prompts=7)] == [*TASKS, "edit", "convert"]
    assert {q.group for q in ask("source", tokenizer, ["continuation"], 3)} == {"continuation"}
    assert {q.group for q in ask("source", tokenizer)} == {"source"}
    for name in ("instructions", "source"):
        refused(r"no group \['poems'\]; it has", ask, name, tokenizer, ["poems"])
    bare = train_tokenizer(["text"], 300)
    refused("has no chat template; give questions=source, or chat=false", ask, "instructions", bare)
    assert bare.decode(list(ask("instructions", bare, prompts=1, chat=False)[0].ids[0])).startswith(
        ("Rename", "Please", "In")
    )


RECORDS = [
    ({"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["c"]}, "81", "writing", ("a", "b")),
    ({"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "x"}, "HumanEval/0", "q", ("def f():\n",)),
    ({"question": "How many?", "answer": "#### 3"}, "q-3", "q", ("How many?",)),
    ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, "q-4", "q", ("u",)),
    ({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}, "q-5", "q", ("h",)),
    ({"question_id": "x1", "category": "coding", "sub_category": "", "turns": ["t"]}, "x1", "coding", ("t",)),
    ("plain", "q-7", "q", ("plain",)),
]  # fmt: skip


def test_files_as_others_publish_them(tokenizer, tmp_path):
    path = write_lines(tmp_path / "q.jsonl", [json.dumps(record) for record, *_ in RECORDS])
    found = {q.id: q for q in ask(path, tokenizer, prompts=20)}
    for _, own, group, turns in RECORDS:
        assert (found[own].group, found[own].turns) == (group, turns)
    assert found["q-4"].system == "s"
    folder = {q.id for q in ask(str(tmp_path), tokenizer, prompts=20)}
    assert folder == set(found)
    assert [q.id for q in ask(path, tokenizer, ["writing"])] == ["81"]
    refused(r"no group \['cooking'\]; it has writing, q, coding", ask, path, tokenizer, ["cooking"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("3", "line 1: expected an object, found int"),
        ('{"other": 1}', r"line 1: asks nothing; .* found \['other'\]"),
        ('{"turns": ["a", " "]}', "line 1: a turn without text: ' '"),
        ('{"turns": [3]}', "line 1: a turn without text: 3"),
        ('{"prompt": "\\ud800"}', "line 1: a turn with half of a surrogate pair"),
        ('{"turns": "hello"}', "line 1: turns must be a list of texts, not 'hello'"),
        ('{"prompt": "word", "question_id": NaN}', r"line 1: not JSON \(NaN is no number of JSON\)"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "line 1: a turn needs `role` and `content`"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "line 1: asks nothing"),
        ("", "asks nothing"),
    ],
)
def test_a_line_that_asks_nothing_is_named(line, message, tokenizer, tmp_path):
    refused(message, ask, write_lines(tmp_path / "q.jsonl", [line]), tokenizer)
    with pytest.raises(FileNotFoundError, match="no such set; there are instructions, edits, source"):
        ask(str(tmp_path / "nothing.jsonl"), tokenizer)


@pytest.mark.skipif(not SPEC_BENCH.is_file(), reason="Spec-Bench's questions are not beside this checkout")
def test_spec_bench_is_read_whole(tokenizer):
    found = ask(str(SPEC_BENCH), tokenizer, prompts=480)
    assert len({q.id for q in found}) == 480
    assert len({q.group for q in found}) == 13
    assert {len(q.turns) for q in found} == {1, 2}


# -- prompts and answers


@pytest.fixture(scope="module")
def spec(heads_folder) -> selfspec.api.Spec:
    return selfspec.load(str(heads_folder), dtype="float32")


def test_later_turns_stand_behind_the_targets_own_answers(spec):
    question = Question("q", "g", ("one", "two"), system="s")
    (first, second), skipped = prompts_of(spec, [question], {"max_new_tokens": 5}, 3)
    assert not skipped
    answer = spec.autoregressive([first.ids], max_new_tokens=5, seed=first.seed).texts[0]
    expected = spec.tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "two"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert second.ids == spec.tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert (first.turn, second.turn) == (0, 1)
    assert first.seed != second.seed
    beside = prompts_of(spec, [Question("other", "g", ("one",)), question], {"max_new_tokens": 5}, 3)[0]
    assert beside[1:] == [first, second]  # whatever else is asked
    long = Question("long", "g", ("word " * 400, "and?"))
    kept, skipped = prompts_of(spec, [long, question], {"max_new_tokens": 5}, 0)
    assert len(kept) == 2
    length = len(long.opening(0, [], spec.tokenizer))
    assert skipped == [f"long, turn {turn} ({length} tokens)" for turn in (1, 2)]
    refused("all questions fill the target's 256 positions", prompts_of, spec, [long], {"max_new_tokens": 5}, 0)


def read_as_spec_bench(path: Path, base: Path) -> tuple[float, float, float]:
    """What its evaluation/speed.py makes of two files: mean accepted tokens, tokens per second, and the speedup, with
    the baseline's tokens counted by its own field."""
    figures = []
    for place in (path, base):
        rows = [json.loads(line) for line in place.read_text().splitlines()]
        rates, lengths = [], []
        for row in rows:
            choice = row["choices"][0]
            rates.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
            lengths += choice["accept_lengths"]
        figures.append((sum(lengths) / len(lengths), sum(rates) / len(rates)))
    return figures[0][0], figures[0][1], figures[0][1] / figures[1][1]


def test_spec_bench_reads_our_answers(spec, tmp_path):
    lines = [
        {"question_id": 7, "category": "writing", "turns": ["a b", "c"]},
        {"question_id": 9, "category": "qa", "turns": ["d"]},
    ]
    path = write_lines(tmp_path / "q.jsonl", [json.dumps(line) for line in lines])
    questions = ask(path, spec.tokenizer)
    config = DecodeConfig(max_new_tokens=9, repeats=1, arms=["autoregressive", "speculative"])
    prompts, _ = prompts_of(spec, questions, config.arguments(), config.seed)
    records = run_benchmark(spec, prompts, config, 6)
    files = answer_files(tmp_path, "a.jsonl", config.arms)
    write_answers(files, questions, records, spec, "x")
    ours, base = files["speculative"], files["autoregressive"]
    assert base == tmp_path / "a-autoregressive.jsonl"
    tau, rate, speedup = read_as_spec_bench(ours, base)
    point = summarize(records)
    assert tau == pytest.approx(point["speculative"]["acceptance_length"])
    assert tau == pytest.approx(
        defined("spec_bench", [r for r in records if r.arm == "speculative"], [])["mean_accepted_tokens"]
    )
    assert rate > 0 < speedup
    rows = [[json.loads(line) for line in place.read_text().splitlines()] for place in (ours, base)]
    assert [row["question_id"] for row in rows[0]] == [7, 9]
    assert [len(row["choices"][0]["turns"]) for row in rows[0]] == [2, 1]
    for one, other in zip(*rows, strict=True):  # equal.py: the turns line by line
        assert str(one["choices"][0]["turns"]) == str(other["choices"][0]["turns"])
    for row in rows[0]:
        choice = row["choices"][0]
        assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
        assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
        assert len(choice["wall_time"]) == len(choice["turns"])
    for place in (ours, base):  # of any arm
        refused("exists; choose another file", answer_files, tmp_path, "a.jsonl", config.arms)
        place.unlink()
    refused("need 1", DecodeConfig, answers="a.jsonl", batch_size=2)


def test_definitions_of_others(spec):
    records = run_benchmark(
        spec, [Prompt([5, 9, 2]), Prompt([8, 1, 30])], DecodeConfig(max_new_tokens=20, repeats=1), 6
    )
    own = [r for r in records if r.arm == "speculative"]
    stats = [r.stats for r in own if r.stats is not None]
    passes, tokens = sum(s.passes for s in stats), sum(s.tokens for s in stats)
    found = {name: defined(name, own, [0.5, 0.5]) for name in DEFINITIONS}
    assert found["spec_bench"]["mean_accepted_tokens"] == pytest.approx(tokens / passes)
    assert found["vllm"]["mean_acceptance_length"] == pytest.approx(1 + sum(found["vllm"]["per_position"]))
    assert found["vllm"]["mean_acceptance_length"] == pytest.approx(
        1 + sum(a for s in stats for a in s.accepted) / sum(s.drafts for s in stats)
    )
    assert 0 < sum(s.drafts for s in stats) <= passes
    before, nothing = Stats(5, 5, 40, 9, accepted=[4]), Stats(3, 3, 3, 3)  # of an older version; nothing was drafted
    mixed = [replace(own[0], stats=each) for each in (Stats(5, 5, 40, 9, accepted=[4], drafts=4), before, nothing)]
    assert defined("vllm", mixed, [])["per_position"] == [8 / 9]
    assert found["specforge"]["simulated_length"] == 1 + 0.5 + 0.25
    assert defined("specforge", own, [])["simulated_length"] is None
    assert found["modelopt"]["mean_over_requests"] == pytest.approx(sum(s.tokens / s.passes for s in stats) / 2)


def test_right_answers_and_regime_are_counted_by_group(spec):
    expected = spec.autoregressive([[5, 9, 2]], max_new_tokens=8).texts[0]
    prompts = [Prompt([5, 9, 2], 0, "a", check=lambda t: t == expected), Prompt([8, 1], 1, "b", check=lambda t: False)]
    records = run_benchmark(spec, prompts, DecodeConfig(max_new_tokens=8, repeats=1), 6)
    point = summarize(records)
    for arm in ("autoregressive", "speculative"):
        assert (point["arms"][arm]["right"], point["arms"][arm]["of"]) == (1, 2)
    assert [point["groups"][g]["arms"]["speculative"]["right"] for g in "ab"] == [1, 0]
    plain = point["arms"]["autoregressive"]
    assert 0 < plain["entropy"] < 6
    assert 0 < plain["top1"] <= 1


def test_the_data_source_mixes_conversations_and_source(source_root, chatty):
    data = Instructions(chatty, count=12, held_out=8, root=str(source_root))
    train, validation = data.train(), data.validation()
    assert sum(d.conversation for d in train) > 8 < len(train)
    assert any(not d.conversation for d in validation)
    assert not any(d.conversation for d in data.evaluation())


def test_a_conversation_is_a_prompt(spec):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    ids = Question("q", "g", ("one",), system="s").opening(0, [], spec.tokenizer)
    assert spec.encode([messages, "text"])[0] == ids
    assert spec.generate([messages], 5).token_ids == spec.generate([ids], 5).token_ids
    refused("prompt 1: a turn needs `role` and `content`", spec.encode, [messages, [{"role": "user"}]])
    bare = selfspec.api.Spec(spec.target, spec.drafter)
    refused("prompt 0 is a conversation, but target", bare.encode, [messages])


def test_questions_are_asked_on_one_day(chatty):
    """Of templates that write the date: a measurement goes on after midnight."""
    dated = copy.deepcopy(chatty)
    dated.chat_template = "{{ strftime_now('%d %b %Y') }}" + chatty.chat_template
    assert "26 Jul 2024" in dated.decode(Question("q", "g", ("one",)).opening(0, [], dated))


def test_answers_side_by_side(heads_folder, source_root, capsys):
    settings = (f"drafter={heads_folder}", f"data.root={source_root}", "dtype=float32", "show.max_new_tokens=9")
    run_show(compose_config("show", *settings, "show.prompts=3"))
    out = capsys.readouterr().out
    assert out.count("the same tokens") >= 3
    assert out.count("WRONG") == 2 * out.count("the same tokens")  # random weights answer nothing
    assert [f"(group {group})" in out for group in TASKS] == [True, True, True, False, False]
    left, right = (
        next(line for line in out.splitlines() if " | " in line and "plain" not in line and "WRONG" not in line)
    ).split(" | ", 1)
    assert "\033" not in out  # which is no terminal
    assert left.strip() == right.strip()


def test_texts_that_may_have_been_trained_on_are_named(heads_folder, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    shutil.copytree(heads_folder, tmp_path / "run/drafter")
    turns = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}"}] for i in range(20)]
    talks = [{"messages": both} for both in turns]
    data = {"_target_": "selfspec.data.records.JsonLines", "path": str(write_lines(tmp_path / "d.jsonl", talks))}
    OmegaConf.save({"data": {**data, "validation_share": 0.05}}, tmp_path / "run/config.yaml")
    asks = ["dtype=float32", "data=jsonl", f"data.path={data['path']}", "show.max_new_tokens=2", "show.prompts=2"]
    for share, odd in {"0.05": False, "0.2": True}.items():
        run_show(compose_config("show", f"drafter={tmp_path / 'run'}", *asks, f"data.validation_share={share}"))
        said = "was trained with data.validation_share=0.05, and is asked with 0.2, of texts that it may"
        assert (said in capsys.readouterr().out) == odd


@pytest.mark.parametrize("keys", [("turns", "reference"), ("question", "answer")])
def test_answers_are_compared_with_a_reference_number(tmp_path, keys):
    """As GSM8K has them, whose rows Spec-Bench takes over; other references are no numbers."""
    many = keys[0] == "turns"
    rows = [
        ("How far?", "2 * 600 = <<2*600=1200>>1200\n#### 1,200"),
        ("Why?", "Since it rains."),
        ("When?", "#### noon"),
        ("Much?", "#### 1e400"),
        ("Part?", "#### $.5"),
    ]
    lines = [
        json.dumps({"reference": None} | {k: [v] if many else v for k, v in zip(keys, row, strict=True)})
        for row in rows
    ]
    (tmp_path / "set.jsonl").write_text("\n".join(lines))
    (tmp_path / "set.jsonl.bak").write_text("of an editor")
    assert len(_read(tmp_path)) == 5
    (tmp_path / "set.jsonl.gz").touch()
    refused("hold set.jsonl and set.jsonl.gz; take one of them out", _read, tmp_path)
    far, why, when, much, part = _read(tmp_path / "set.jsonl")
    (check,) = far.checks
    assert check("600 and 600 again, so it is 1200.")
    assert check("So 1,200.0 km")
    assert not check("1200, of which 600")
    assert not check("far")
    assert check("From 10 to 600-1200")  # no minus
    assert check("1.2e3")
    assert not check("Of 1,200 these: 12,00")
    assert (why.checks, when.checks, much.checks) == ((), (), ())
    assert part.checks[0]("It is .5")
    lines = [json.dumps({"turns": ["a", "b"], "reference": ["#### noon", "#### 5"]})]
    (tmp_path / "set.jsonl").write_text("\n".join(lines))
    assert _read(tmp_path / "set.jsonl")[0].checks == ()


def test_a_group_has_no_more_than_was_asked_of_each(tmp_path, tokenizer):
    rows = [{"question_id": f"{group}{i}", "category": group, "turns": ["x"]} for group in "AB" for i in range(20)]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, [*rows[:3], *rows[20:]])))
    chosen = read_questions(Answering(str(tmp_path / "set.jsonl"), prompts=10, chat=False), tokenizer, list, each=True)
    assert Counter(question.group for question in chosen) == {"A": 3, "B": 10}


def test_an_echo_is_no_answer(held_out):
    for instruction in instructions(held_out, ["convert", "reason"], 60, 3):
        for turn in instruction.turns:
            assert not turn.check(turn.question)


@pytest.mark.parametrize(
    ("record", "system", "turns"),
    [
        ({"turns": ["a", "b"], "system": "Be brief."}, "Be brief.", ("a", "b")),
        ({"prompt": "a", "system_prompt": "Be brief."}, "Be brief.", ("a",)),
        ({"instruction": "Translate:", "input": "Hello"}, None, ("Translate:\n\nHello",)),
        ({"instruction": "Translate:", "input": ""}, None, ("Translate:",)),
        ({"question": "Who?", "context": "It was Ann."}, None, ("It was Ann.\n\nWho?",)),
        (
            {"messages": [{"role": r, "content": r[0]} for r in ("system", "developer", "user", "assistant", "user")]},
            "s\n\nd",
            ("u", "u"),
        ),
    ],
)
def test_nothing_of_a_question_is_left_out(record, system, turns, tmp_path):
    path = write_lines(tmp_path / "q.jsonl", [record])
    (question,) = _read(Path(path))
    assert (question.system, question.turns) == (system, turns)


def test_a_turn_that_can_not_be_asked_is_named(tmp_path):
    roles = ("user", "tool", "user")
    path = write_lines(tmp_path / "q.jsonl", [{"messages": [{"role": role, "content": "a"} for role in roles]}])
    refused("a turn of the role 'tool' between questions can not be asked", _read, Path(path))


@pytest.mark.parametrize(
    ("answer", "right"),
    [("The sum is 47.", True), ("It is -47.", False), ("3.47", False), ("It is 47/7.", False), ("47.50", False)],
)
def test_a_number_is_compared_whole(answer, right):
    assert concludes(47)(answer) == right


def test_a_list_that_is_given_back_is_no_answer(held_out):
    for turn in (look_up(held_out, Random(seed))[0] for seed in range(40)):
        listed = turn.question.partition(":\n")[2].rpartition("\n")[0]
        assert turn.check(turn.answer)
        assert not turn.check(listed)


@pytest.mark.parametrize(
    ("said", "right"),
    [("<think>```\n1\n```</think>2", True), ("<think>2", False), ("<think>2</think>1", False), ("2", True)],
)
def test_what_is_only_thought_is_no_answer(said, right, tokenizer, monkeypatch):
    prompt = Prompt([0], check=lambda answer: answer.strip() == "2", turn_text="q")
    monkeypatch.setattr("selfspec.evaluation.arms.text_of", lambda tokenizer, ids: said)
    assert prompt.right(tokenizer, [1]) == right
