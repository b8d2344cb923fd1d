"""A real vLLM on the CPU writes text and hands out hidden states: docs/large_targets.md command by command, and what it
gives beside what the trainer computes itself. `make serving` installs vLLM."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import Chain
from conftest import write_lines
from test_vllm import configured, judge

import selfspec
from selfspec.checkpoints.drafter_folder import save_drafter
from selfspec.checkpoints.load_target import load_target, load_tokenizer
from selfspec.checkpoints.target_parts import load_parts
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.data.records import JsonLines
from selfspec.data.store import tokenize
from selfspec.drafters.registry import build, config_class, drafter_class
from selfspec.training.states import wanted_layers
from selfspec.training.states_server import FromServer
from selfspec.utils.files import write_text
from selfspec.utils.openai_client import Servers

ROOT = Path(__file__).parents[2]
VLLM = Path(os.environ.get("SELFSPEC_VLLM", ROOT / ".venv-vllm"))
RESULTS = ROOT / "runs/serving/large_targets.json"
TARGET = "smollm2"
SELFSPEC = [sys.executable, "-m", "selfspec"]
# What makes the page's trainings short
SHORT = "loop.steps=12 loop.batch_size=2 loop.validate_every=12 train.prompts=4 train.new_tokens=24 logger=none"
SHORT += " train.validation_rows=2 +drafter.llama.intermediate_size=512"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (VLLM / "bin/python").is_file(), reason=f"no vLLM at {VLLM}: make serving installs it"),
    pytest.mark.timeout(3600),
]


def environment() -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    kept = {k: v for k, v in os.environ.items() if k not in ("SELFSPEC_CACHE", "SELFSPEC_ENGINE")}
    return {
        **kept,
        **quiet,
        "SELFSPEC_VLLM": str(VLLM),
        "PYTHONPATH": str(ROOT),
        "TARGET": TARGET,
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def served(words: list[str] | str, port: int, folder: Path) -> Iterator[None]:
    """A server for as long as the block runs."""
    log = folder / f"server-{port}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            words,
            shell=isinstance(words, str),
            cwd=folder,
            env=environment(),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            for _ in range(240):
                time.sleep(1)
                if "Application startup complete" in log.read_text():
                    break
                assert process.poll() is None, log.read_text()[-4000:]
            else:
                raise AssertionError(log.read_text()[-4000:])
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def keep_figures(**figures: Any) -> None:
    """Keep what was measured for notebooks/results/large_targets.md."""
    before = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    write_text(RESULTS, json.dumps(before | figures, indent=1) + "\n")


def questions(folder: Path, count: int) -> str:
    """Short questions, each another."""
    words = ["sum", "list", "sort", "reverse", "merge", "split", "filter", "search", "parse", "print"]
    lines = [
        {"messages": [{"role": "user", "content": f"Write a Python function that can {words[i % 10]} {i} numbers."}]}
        for i in range(count)
    ]
    return write_lines(
        folder / "questions.jsonl",
        [{**line, "messages": [*line["messages"], {"role": "assistant", "content": "-"}]} for line in lines],
    )


def run(command: str, folder: Path) -> str:
    words = [*SELFSPEC, *shlex.split(command.replace("$TARGET", TARGET))[1:]]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def test_the_page(tmp_path):
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/large_targets.md").read_text(), re.DOTALL)
    commands = [block.strip().replace("\\\n", " ") for block in blocks][1:]
    dry, plain, write, states, train, record, check, offline, export, serve, accept = commands
    questions(tmp_path, 20)
    start, minutes = time.perf_counter(), dict[str, float]()

    def timed(name: str) -> None:
        minutes[name] = round((time.perf_counter() - start) / 60, 1)

    def server(command: str) -> tuple[list[str], int]:
        words = shlex.split(command.replace("$TARGET", TARGET))[1:]
        return [*SELFSPEC, *words], int(words[words.index("--port") + 1])

    with served(*server(dry), tmp_path):
        pass
    assert (tmp_path / "untrained/config.json").is_file()
    timed("untrained files served")
    with served(*server(plain), tmp_path):
        run(write, tmp_path)
    records = [json.loads(line) for line in next(tmp_path.glob("answers/answers.jsonl")).read_text().splitlines()]
    assert sorted(record["id"] for record in records) == list(range(20))
    assert all(record["tokens"] for record in records)
    timed("20 questions answered")
    with served(*server(states), tmp_path):
        said = run(f"{train} {SHORT} drafter.layers=[1,14,26]", tmp_path)
        assert "the trainer waited" in said
        assert not list((tmp_path / "states").glob("*.safetensors"))
        timed("trained beside the server")
        run(record, tmp_path)
    said = run(check, tmp_path)
    assert "they train: eagle3" in said
    assert len(re.findall(r"relative error \d", said)) == 4
    run(f"{offline} {SHORT} drafter.layers=[1,14,26]", tmp_path)
    timed("trained on a folder")
    said = run(export, tmp_path)
    printed = shlex.split(next(line for line in said.splitlines() if line.startswith("vllm serve")))
    speculative = printed[printed.index("--speculative-config") + 1]
    words, port = server(serve)
    assert json.loads(words[words.index("--serve") + 1]).keys() == json.loads(speculative).keys()
    words[words.index("--serve") + 1] = speculative
    with served(words, port, tmp_path):
        said = run(accept, tmp_path)
    assert float(re.findall(r"acceptance length ([\d.]+)", said)[0]) >= 1.0
    timed("served, acceptance counted")
    keep_figures(page_minutes=minutes, page_acceptance=re.findall(r"^(?:accept|given).*", said, re.MULTILINE))


@pytest.fixture(scope="module")
def states_server(tmp_path_factory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("server"), 8011
    words = [*SELFSPEC, "serve-target", TARGET, "--folder", str(folder / "states"), "--port", str(port)]
    with served([*words, "--length", "512", "--dtype", "float32", "--run"], port, folder):
        yield f"http://127.0.0.1:{port}"


def talks(folder: Path, count: int) -> str:
    """Conversations with answers, as long as a row is not."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Count from {i} to {i + 5}."},
                {"role": "assistant", "content": " ".join(str(n) for n in range(i, i + 6)) + " and no further."},
            ]
        }
        for i in range(count)
    ]
    return write_lines(folder / "chat.jsonl", lines)


def test_states_of_64_texts_are_the_trainers_own(states_server, tmp_path):
    target, tokenizer = load_target(TARGET, "float32", "cpu")
    parts, _ = load_parts(TARGET, "float32", "cpu")
    data = JsonLines(path=talks(tmp_path, 64), tokenizer=tokenizer)
    corpus = tokenize([document for document, _ in data.documents()], tokenizer)
    reads = build(drafter_class("eagle3"), parts, config_class(drafter_class("eagle3"))()).reads
    states, worst = FromServer(parts, reads, Servers((states_server,)), None, 1.0), 0.0
    begun = time.perf_counter()
    for i in range(64):
        tokens = corpus.document(i).tokens
        found = states.of(tokens)
        layers = [layer - 1 for layer in wanted_layers(reads, target.n_layers)]
        own = target.text(tokens[None], False, reads=tuple(layers)).features
        for column, layer in enumerate(layers):
            worst = max(worst, float((found[:, column] - own[layer][0]).norm() / own[layer][0].norm()))
    keep_figures(states_worst_relative_error=worst, states_seconds=round(time.perf_counter() - begun, 1))
    assert worst < 1e-4


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_losses_from_a_server_a_folder_and_the_target(kind, states_server, tmp_path):
    parts, tokenizer = load_parts(TARGET, "float32", "cpu")
    torch.manual_seed(0)
    small = {"llama": {"intermediate_size": 256}} if kind == "eagle3" else {"rank": 4}
    drafter = build(drafter_class(kind), parts, config_class(drafter_class(kind))(**small))
    save_drafter(drafter, tmp_path / "first/drafter", parts, TARGET, tokenizer, "untrained")
    chat, loss = talks(tmp_path, 64), dict[str, list[float]]()
    own = "+drafter.llama.intermediate_size=256" if kind == "eagle3" else "drafter.rank=4"
    common = (
        f"selfspec train drafter={kind} {own} target.name={TARGET} target.dtype=float32 data=jsonl data.path={chat} "
    )
    common += f"train.init_from={tmp_path / 'first'} train.length=128 loop.steps=20 loop.batch_size=2 loop.log_every=1 "
    common += "loop.validate_every=20 train.prompts=4 train.new_tokens=16 train.validation_rows=2 loop.precision=no "
    common += "logger=none"
    layers = ",".join(map(str, [2, 15, 27, 30]))
    run(f"selfspec states --write {tmp_path / 'kept'} --url {states_server} --target {TARGET} --path {chat}", tmp_path)
    ways = {
        "server": f"train.states=server train.states_url={states_server} train.states_layers=[{layers}]",
        "folder": f"train.states={tmp_path / 'kept'}",
        "in process": "",
    }
    for name, how in ways.items():
        run(f"{common} {how} name={name.replace(' ', '_')}", tmp_path)
        lines = (tmp_path / "runs" / name.replace(" ", "_") / "train.jsonl").read_text().splitlines()
        loss[name] = [record["train"]["loss"] for line in lines if "train" in (record := json.loads(line))]
    far = {
        name: max(abs(a - b) for a, b in zip(values, loss["in process"], strict=True)) for name, values in loss.items()
    }
    keep_figures(**{f"losses_{kind}": {"first": loss["in process"][0], "last": loss["in process"][-1], "apart": far}})
    assert len(loss["server"]) == 20
    assert max(far.values()) < 1e-3
    if kind == "eagle3":
        counted(tmp_path, chat)


def counted(folder: Path, chat: str, length: int = 3) -> None:
    """vLLM accepts what our own chains of the drafter that states have trained accept, to the count."""
    run(f"selfspec export runs/server --to vllm --out served --target {TARGET}", folder)
    spec = selfspec.load(str(folder / "runs/server"), TARGET, dtype="float32", device="cpu", engine="eager")
    messages = [json.loads(line)["messages"][:1] for line in Path(chat).read_text().splitlines()[:8]]
    rows = [spec.tokenizer.apply_chat_template(m, add_generation_prompt=True)["input_ids"] for m in messages]
    theirs = judge(folder, TARGET, "float32", {"all": rows}, configured("eagle3", folder / "served", length), 32)["all"]
    on, drafts, counts = Options(32 + length + 1, Sampling(0.0), 0, frozenset()), 0, list[list[int]]()
    options = Options(32, Sampling(0.0), 0, spec.target.end_tokens)
    for row in rows:
        chain = Chain(spec.drafter, length)
        speculative(spec.target, [row], options, chain, length + 1)
        drafts += len(chain.drafted)
        counts.append(chain.accepted(row + autoregressive(spec.target, [row], on).token_ids[0]))
    ours = [sum(values) for values in zip(*counts, strict=True)]
    keep_figures(accepted={"drafts": [drafts, *theirs["drafts"]], "here": ours, "vllm": theirs["accepted"]})
    assert [drafts, *ours] == [*theirs["drafts"], *theirs["accepted"]]


def test_200_questions_with_a_kill(tmp_path):
    port = 8012
    words = [*SELFSPEC, "serve-target", TARGET, "--plain", "--port", str(port), "--length", "512", "--run"]
    questions(tmp_path, 200)
    command = f"selfspec distill name=text target.name={TARGET} data=server data.url=http://127.0.0.1:{port} "
    command += "data.source.path=questions.jsonl data.new_tokens=48 data.folder=answers"
    with served(words, port, tmp_path):
        begun = time.perf_counter()
        first = subprocess.Popen(
            [*SELFSPEC, *shlex.split(command)[1:]],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while len(b"".join(p.read_bytes() for p in tmp_path.glob("answers/answers.jsonl")).splitlines()) < 60:
            time.sleep(0.5)
            assert first.poll() is None
        first.kill()
        first.wait()
        run(command, tmp_path)
        seconds = time.perf_counter() - begun
    records = [json.loads(line) for line in next(tmp_path.glob("answers/answers.jsonl")).read_text().splitlines()]
    assert sorted(record["id"] for record in records) == list(range(200))
    tokens = sum(record["new_tokens"] for record in records)
    keep_figures(
        answers={"questions": 200, "tokens": tokens, "seconds": round(seconds), "rate": round(tokens / seconds, 1)}
    )
    assert load_tokenizer(TARGET).decode(records[0]["tokens"][0]["input_ids"])
