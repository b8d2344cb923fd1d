"""Conversations: the chat template, and which of its words the assistant says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

END = "<|end|>"
ROLES = ("system", "user", "assistant")
# Every turn is its role, its words and an end token. The generation tags tell transformers what the assistant says.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '" + END + "' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '" + END + "' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def spans(messages: Sequence[dict[str, str]], tokenizer: Tokenizer, name: str) -> tuple[tuple[str, bool], ...]:
    """The conversation (messages of `role` and `content`) through the tokenizer's chat template, cut into (text, counts
    in the loss): what the assistant says counts, its end token included. Raises ValueError where the tokenizer has no
    template, with `name` as the place."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"{name}: a conversation needs a chat template, and tokenizer {tokenizer.name_or_path!r} has none; use a "
            "chat model's tokenizer, or plain `text`"
        )
    return tuple(_spans(messages, tokenizer))


def _spans(messages: Sequence[dict[str, str]], tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    text = str(tokenizer.apply_chat_template(list(messages), tokenize=False))
    done = at = 0
    for message in messages:
        content = message["content"].strip()
        if not content or (found := text.find(content, at)) < 0:
            continue  # a template may leave a message out
        at = found + len(content)
        if message["role"] == "assistant":
            if tokenizer.eos_token and text.startswith(tokenizer.eos_token, at):
                at += len(tokenizer.eos_token)
            yield text[done:found], False
            yield text[found:at], True
            done = at
    if text[done:]:
        yield text[done:], False
