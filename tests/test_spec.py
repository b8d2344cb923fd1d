from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import save_tiny
from transformers import T5Config, T5ForConditionalGeneration

import selfspec
from selfspec.generate import autoregressive
from selfspec.spec import Spec, load_target

TEXTS = ["def parse(self):\n    ", "import os\n"]


@pytest.fixture(scope="module")
def spec(heads_folder: Path) -> Spec:
    return selfspec.load(str(heads_folder))


def test_generates_texts_and_ids_alike(spec: Spec) -> None:
    ids = [spec.tokenizer(text)["input_ids"] for text in TEXTS]
    for temperature in (0.0, 1.0):
        by_text = spec.generate(TEXTS, 20, temperature, seed=4)
        by_ids = spec.generate(ids, 20, temperature, seed=4, nodes=5)
        oracle = spec.autoregressive(TEXTS, 20, temperature, seed=4)
        assert by_text.token_ids == by_ids.token_ids == oracle.token_ids
        assert by_text.texts == oracle.texts == [spec.tokenizer.decode(t) for t in oracle.token_ids]


def test_stats_have_the_promised_names(spec: Spec) -> None:
    stats = spec.generate(TEXTS, 12).stats
    assert stats.tokens == 24
    assert stats.passes <= 24
    assert stats.acceptance_length == stats.tokens / stats.passes
    assert all(0 <= share <= 1 for share in stats.accepted_per_depth + stats.conditional_per_depth)
    assert min(stats.seconds_draft, stats.seconds_target, stats.seconds_other) > 0


def test_stream_is_the_text_of_generate(spec: Spec) -> None:
    pieces = list(spec.stream(TEXTS[0], 30, temperature=1.0, seed=2))
    assert "".join(pieces) == spec.generate(TEXTS[:1], 30, temperature=1.0, seed=2).texts[0]


def test_two_streams_do_not_disturb_each_other(spec: Spec) -> None:
    streams = [spec.stream(text, 20, temperature=1.0) for text in TEXTS]
    pieces: list[list[str]] = [[], []]
    for turn in range(200):
        if (piece := next(streams[turn % 2], None)) is not None:
            pieces[turn % 2].append(piece)
    for text, parts in zip(TEXTS, pieces, strict=True):
        assert "".join(parts) == spec.generate([text], 20, temperature=1.0).texts[0]


def test_target_model_is_stock_and_untouched(spec: Spec, tiny_folder: str) -> None:
    assert type(spec.target.model).__module__.startswith("transformers.models.llama")
    assert spec.target.checksum() == load_target(tiny_folder)[0].checksum()


def test_run_folders_and_overrides(heads_folder: Path, tiny_folder: str) -> None:
    spec = selfspec.load(str(heads_folder.parent), target=tiny_folder, dtype="bfloat16", device="cpu")
    assert spec.target.dtype == torch.bfloat16
    assert len(spec.generate(TEXTS, 8).token_ids[0]) == 8


def test_ends_at_any_eos_of_the_generation_config(heads_folder: Path) -> None:
    spec = selfspec.load(str(heads_folder))
    free = spec.generate(TEXTS[:1], 30).token_ids[0]
    spec.target.model.generation_config.eos_token_id = [319, free[9]]
    assert spec.generate(TEXTS[:1], 30).token_ids[0] == free[: free.index(free[9]) + 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": "one string"}, "prompts is one string"),
        ({"prompts": [""]}, "prompt 0 is empty"),
        ({"prompts": ["x" * 4000]}, "256 positions"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
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
        ({"prompts": [1, 2]}, "one list of token ids"),
        ({"top_p": 2.0}, "top_p=2.0"),
    ],
)
def test_bad_input_is_named(spec: Spec, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec.generate(**{"prompts": TEXTS, "max_new_tokens": 4, **arguments})  # type: ignore[arg-type]


def test_numpy_and_torch_integers_are_integers(spec: Spec) -> None:
    want = spec.generate(TEXTS, 6, 1.0, seed=[3, 4]).token_ids
    assert spec.generate(TEXTS, np.int64(6), 1.0, seed=torch.tensor([3, 4])).token_ids == want
    assert spec.generate(TEXTS, 6, 1.0, seed=np.int64(3)).token_ids == spec.generate(TEXTS, 6, 1.0, seed=3).token_ids


def test_bad_places_are_named(tmp_path: Path, heads_folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no drafter at 'runs/nothing'.*tiny-medusa"):
        selfspec.load("runs/nothing")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        selfspec.load(str(heads_folder), target=str(tmp_path))
    with pytest.raises(ValueError, match="dtype='int8'"):
        selfspec.load(str(heads_folder), dtype="int8")
    model = T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=32, num_layers=2, d_ff=32))
    model.save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="encoder-decoder"):
        load_target(str(tmp_path / "t5"))


def test_without_a_tokenizer_ids_still_work(tmp_path: Path, tokenizer: object) -> None:
    folder = tmp_path / "bare"
    save_tiny(folder, tokenizer)  # type: ignore[arg-type]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    target, none = load_target(str(folder))
    from selfspec.drafters.medusa import Medusa

    spec = Spec(target, Medusa(target, heads=2, rank=2), none)
    assert none is None
    assert len(spec.generate([[1, 2, 3]], 5).token_ids[0]) == 5
    with pytest.raises(ValueError, match="no tokenizer"):
        spec.generate(["text"])
    with pytest.raises(ValueError, match="no tokenizer"):
        next(spec.stream("text"))


@pytest.mark.parametrize("name", ["tiny-medusa", "tiny-early-exit", "tiny-sequential", "tiny-feature"])
def test_embedded_heads_in_float32_are_exact(name: str) -> None:
    """The committed target and heads: identity with the oracle and with transformers, at work rather than at random."""
    spec = selfspec.load(name, dtype="float32")
    prompts = [
        "def fibonacci(n):\n",
        "class Stack:\n    def __init__(self):\n",
        "import os\nimport sys\n\n",
        "try:\n    ",
    ]
    for temperature in (0.0, 0.7, 1.0):
        fast = spec.generate(prompts, 48, temperature, nodes=16)
        assert fast.token_ids == spec.autoregressive(prompts, 48, temperature).token_ids
        assert fast.stats.acceptance_length > 1.5
    for prompt in prompts:
        ids = torch.tensor([spec.tokenizer(prompt)["input_ids"]])
        reference = spec.target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48)
        assert spec.generate([prompt], 48).token_ids[0] == reference[0, ids.shape[1] :].tolist()


def test_embedded_assets_are_small() -> None:
    assets = Path(selfspec.__file__).parent / "assets"
    assert sum(p.stat().st_size for p in (assets / "tiny-target").iterdir()) <= 25e6
    drafters = [folder.parent for folder in assets.glob("*/drafter.json")]
    assert {folder.name for folder in drafters} == {"tiny-medusa", "tiny-early-exit", "tiny-sequential", "tiny-feature"}
    for folder in drafters:
        assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) <= 10e6


def test_command_line(heads_folder: Path) -> None:
    call = [sys.executable, "-m", "selfspec", "--heads", str(heads_folder), "--max-new-tokens", "12"]
    plain = subprocess.run([*call, "import os"], capture_output=True, text=True, env=os.environ)
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.startswith("import os")
    colored = subprocess.run([*call, "--color", "import os"], capture_output=True, text=True, env=os.environ)
    assert colored.returncode == 0, colored.stderr
    assert "per pass" in colored.stderr
    wrong = subprocess.run([*call, "--temperature", "-1", "x"], capture_output=True, text=True, env=os.environ)
    assert wrong.returncode == 1
    assert "selfspec: temperature=-1.0" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_oracle_and_engine_share_signature_and_result() -> None:
    import inspect

    assert inspect.signature(Spec.generate) == inspect.signature(Spec.autoregressive)
    assert inspect.signature(autoregressive).return_annotation == "Result"
