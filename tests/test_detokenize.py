"""What is streamed, joined, is the text of generate, for every kind of tokenizer; and where stop strings end it."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from selfspec.api import Spec
from selfspec.checkpoints.loading import find_drafter
from selfspec.cli.main import main
from selfspec.core.target import Target
from selfspec.detokenize import Detokenizer, StopStrings, text_of

TEXT = ["naïve café – 日本語 🙂 don't he's isn't . , ! ? ' x", "import os\ndef main(argv):\n    return 'a b'\n"] * 3
SPECIAL = ["[UNK]", "[EOS]"]


def fast(model: Any, pre: Any, decoder: Any, trainer: Any, **settings: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre
    if decoder is not None:
        backend.decoder = decoder
    backend.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[EOS]", **settings)


def byte_level() -> PreTrainedTokenizerFast:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    return fast(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), trainer)


def word_piece(clean: bool = False) -> PreTrainedTokenizerFast:
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    parts = models.WordPiece(unk_token="[UNK]"), pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return fast(*parts, trainer, clean_up_tokenization_spaces=clean)


def words() -> PreTrainedTokenizerFast:
    trainer = trainers.WordLevelTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    return fast(models.WordLevel(unk_token="[UNK]"), pre_tokenizers.Whitespace(), None, trainer)


def unigram() -> PreTrainedTokenizerFast:
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="[UNK]", show_progress=False)
    return fast(models.Unigram(), pre_tokenizers.Metaspace(), decoders.Metaspace(), trainer)


def sentence_piece() -> PreTrainedTokenizerFast:
    every = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=every, show_progress=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model = models.BPE(byte_fallback=True, unk_token="[UNK]")
    return fast(model, pre_tokenizers.Metaspace(), decoders.Sequence(steps), trainer)


def characters() -> PreTrainedTokenizerFast:
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=SPECIAL, show_progress=False)
    return fast(models.BPE(), pre_tokenizers.Split("", "isolated"), decoders.Fuse(), trainer)


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "WordPiece": word_piece,
    "WordPiece, cleaned up": lambda: word_piece(True),
    "words": words,
    "Unigram": unigram,
    "SentencePiece": sentence_piece,
    "ByT5": ByT5Tokenizer,
    "characters": characters,
}


def spec_of(tokenizer: Any, more: int) -> Spec:
    """A random target whose vocabulary is larger than the tokenizer's, as padded ones are."""
    target = Target(tiny_model(vocab_size=len(tokenizer) + more, dtype=torch.float32))
    target.model.generation_config.eos_token_id = None
    return Spec(target, find_drafter("prompt_lookup", target), tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_joined_are_the_text(kind):
    spec, prompt = spec_of(KINDS[kind](), 9), [[5, 9, 12, 7]]
    for seed in range(2):
        settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "seed": seed}
        result = spec.generate(prompt, **settings, trace=True, stop=())
        assert "".join(spec.stream(prompt, **settings)) == result.text
        assert "".join(text for text, _ in result.pieces()) == result.text
        assert "".join(token.text for token in result.trace.tokens()) == result.text
        stop = result.text[5:8]
        ended = spec.generate(prompt, **settings, stop=[stop])
        assert stop in ended.text
        assert len(ended.token_ids[0]) <= len(result.token_ids[0])
        assert ended.token_ids == spec.autoregressive(prompt, **settings, stop=stop).token_ids
        assert "".join(spec.stream(prompt, **settings, stop=stop)) == ended.text


def test_words_that_are_written_anew():
    """WordPiece puts `don ' t` together once it is whole."""
    tokenizer = word_piece(True)
    ids = tokenizer("he's isn't . x", add_special_tokens=False)["input_ids"]
    text = Detokenizer(tokenizer)
    assert "".join([*(text.add([token]) for token in ids), text.rest()]) == text_of(tokenizer, ids) == "he's isn't. x"


def test_bytes_are_text_together_or_not_at_all():
    tokenizer = sentence_piece()
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "😀😃".encode()[:6]]
    end = tokenizer("a")["input_ids"]
    for tokens in (ids, ids + end, [*ids[:1], tokenizer.eos_token_id, *ids[1:], *end]):  # a special one between
        text = Detokenizer(tokenizer)
        assert "".join([*(text.add([t]) for t in tokens), text.rest()]) == text_of(tokenizer, tokens)


def test_a_stop_string_ends_where_its_last_token_does():
    tokenizer = byte_level()
    prompt = tokenizer("os\n")["input_ids"]
    new = tokenizer("a 日b os\n")["input_ids"]
    for strings in (["os\n"], ["日"], ["a ", "zz"], ["\n"]):
        stop, texts = StopStrings(tokenizer, strings), [text_of(tokenizer, new[:n]) for n in range(len(new) + 1)]
        end = next(n for n, text in enumerate(texts) if strings[0] in text)
        ended = [bool(stop(torch.tensor([prompt + new[:n]] * 2), None).all()) for n in range(1, len(new) + 1)]
        assert ended.index(True) + 1 == end, strings  # not where the prompt holds it


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    return subprocess.run(["bash", "-c", script], env=everything, capture_output=True, text=True, timeout=200)


COMMAND = f"{sys.executable} -m selfspec complete"


def test_a_terminal_that_is_not_utf_8(monkeypatch):
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["selfspec", "complete", "naïve 日本", "--max-new-tokens", "4"])
    main()
    assert screen.getvalue().startswith(b"na?ve ??")


def test_a_closed_pipe():
    done = run(f"{COMMAND} 'def f(' --engine eager --max-new-tokens 4 | true; echo ${{PIPESTATUS[0]}}")
    assert done.stdout == "141\n"
    assert "Err" not in done.stderr


def test_a_stream_that_is_left_open_ends_quietly():
    code = "import selfspec; g = selfspec.load('tiny-medusa', engine='eager').stream('def f(', 20); next(g)"
    done = run(f'{sys.executable} -c "{code}"')
    assert done.returncode == 0
    assert "Exception" not in done.stderr
