"""Other engines on the same model: llama.cpp and OpenVINO GenAI, each in a process of its own.

They live in an environment of their own (`make .venv-peers/.ready`), since they need other versions of the packages
that are used here. A process waits while others decode. An engine that can not decode is left out, with a line.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from selfspec.api import Spec
from selfspec.checkpoints.named import gguf_file
from selfspec.core.sampling import Sampling
from selfspec.core.stats import Stats
from selfspec.core.target import Target
from selfspec.evaluation.arms import Call, Prompt
from selfspec.output import Generated
from selfspec.utils.files import Figures, cache_folder
from selfspec.utils.progress import progress

PYTHON = Path(".venv-peers/bin/python")
_LLAMA = """
import ctypes, json, os, sys, time
import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
source, folder, threads, name, context = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
ftype = {"bf16": 32, "q8_0": 7}.get(name)
path = source if ftype is None else f"{folder}/{name}.gguf"
if ftype is not None and not os.path.exists(path):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = ftype, True, threads
    if llama_cpp.llama_model_quantize(source.encode(), f"{path}.tmp".encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp can not write {path}")
    os.replace(f"{path}.tmp", path)
drafts = {}
if name == "lookup":  # without logits_all it fails behind 512 tokens
    drafts = {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=10), "logits_all": True}
model = llama_cpp.Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False, **drafts)
calls, evaluate = [0], model.eval
def counted(tokens):
    calls[0] += 1
    return evaluate(tokens)
model.eval = counted
system = llama_cpp.llama_print_system_info().decode().strip()
print(json.dumps({"version": f"llama-cpp-python {llama_cpp.__version__}: {system}"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    model.reset()
    calls[0], tokens, begun, first = 0, [], time.perf_counter(), None
    for token in model.generate(request["prompt"], temp=0.0, repeat_penalty=1.0):
        first = first or time.perf_counter()
        tokens.append(int(token))
        if token in request["ends"] or len(tokens) == request["count"]:
            break
    reply = {"seconds": time.perf_counter() - begun, "prompt": first - begun}
    print(json.dumps({"tokens": tokens, "passes": calls[0], **reply}), flush=True)
"""
_OPENVINO = """
import json, os, shutil, subprocess, sys
import numpy, openvino, openvino_genai
source, folder, threads, name = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
path = f"{folder}/openvino_{name}"
if not os.path.exists(path):
    shutil.rmtree(f"{path}.tmp", ignore_errors=True)
    command = os.path.join(os.path.dirname(sys.executable), "optimum-cli"), "export", "openvino", "--model", source
    size = ["--group-size", "64"] if name == "int4" else []
    more = "--task", "text-generation-with-past", "--weight-format", name, *size, f"{path}.tmp"
    subprocess.run([*command, *more], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.replace(f"{path}.tmp", path)
pipe = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
print(json.dumps({"version": f"OpenVINO GenAI {openvino_genai.__version__}"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    ids = numpy.array([request["prompt"]])
    given = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample = request["count"], False
    config.stop_token_ids, config.ignore_eos = set(request["ends"]), not request["ends"]
    result = pipe.generate(given, config)
    tokens, times = [int(token) for token in result.tokens[0]], result.perf_metrics
    reply = {"seconds": times.get_generate_duration().mean / 1000, "prompt": times.get_ttft().mean / 1000}
    print(json.dumps({"tokens": tokens, "passes": len(tokens), **reply}), flush=True)
"""


class Peer:
    """One model in one engine. version: what the engine says of itself; failed: whether its process ended."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (until `close`)
        self.process = subprocess.Popen(
            [str(PYTHON), "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            text=True,
        )
        self.failed = False
        try:
            self.version = str(self._line().get("version", ""))
        except BaseException:  # an interrupt, while it makes its files
            self.close()
            raise

    def _line(self) -> Figures:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            with suppress(json.JSONDecodeError):  # a line of the engine's own
                reply = json.loads(line)
                if isinstance(reply, dict):
                    return reply
        self.failed = True
        return {}

    def answer(self, prompt: list[int], count: int, ends: Iterable[int] = ()) -> Figures | None:
        """Greedy `tokens` behind a prompt, at most `count`, up to one of `ends`; `passes` of the model, `seconds` of
        the call, and those until the first token, `prompt`. None where the process ended."""
        if self.failed:
            return None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"prompt": prompt, "count": count, "ends": [*ends]}) + "\n")
            self.process.stdin.flush()
        except OSError:  # it has ended
            self.failed = True
            return None
        return self._line() or None

    @property
    def last_words(self) -> str:
        """The last line of its standard error, and its exit code. It is over then."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.complaints.seek(0)
        lines = self.complaints.read().splitlines() or [""]
        return f"{lines[-1]:.200} (exit code {self.process.wait()})".strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.complaints.close()


def check_peers(names: Sequence[str], target: str) -> None:
    """Raises ValueError where the other engines are not installed, or llama.cpp is asked for and this target has no
    GGUF file."""
    if not PYTHON.is_file():
        raise ValueError(
            f"{PYTHON} is missing; in the repository's folder make .venv-peers/.ready builds the other engines (twenty "
            "minutes)"
        )
    _source(names, target)


def _source(names: Sequence[str], target: str) -> str:
    """The GGUF file of a target, where one of these engines reads it; else the target's name."""
    return str(gguf_file(target)) if any(name.startswith("llamacpp_") for name in names) else target


def made_with(names: Sequence[str], target: str) -> str:
    """The engines' versions, and what they read."""
    versions = (
        path.name.removesuffix(".dist-info") for path in PYTHON.parents[1].glob("lib/*/site-packages/*.dist-info")
    )
    packages = {"llamacpp": ("llama_cpp_",), "openvino": ("openvino_genai", "optimum")}
    wanted = tuple(start for engine in {name.partition("_")[0] for name in names} for start in packages[engine])
    used = sorted(each for each in versions if each.startswith(wanted))
    source = Path(_source(names, target))
    size = f", {source.stat().st_size} bytes" if source.is_file() else ""
    return f"{', '.join(used)}: {source.name}{size}"


@contextmanager
def started(names: Sequence[str], target: Target, context: int) -> Iterator[dict[str, Peer]]:
    """A model in these of PEERS, until the end of the block; those that can not decode are named and left out.
    llama.cpp reads the target's GGUF file, OpenVINO its weights as safetensors. context: tokens of prompt and answer,
    at most. Files in other formats are made once for each file and version of the engines. Raises
    ValueError as `check_peers` does."""
    if not names:
        yield {}
        return
    check_peers(names, name := target.name)
    made = hashlib.sha256(f"{made_with(names, name)} {Path(name).resolve()}".encode()).hexdigest()[:8]
    folder = cache_folder() / "peers" / made
    folder.mkdir(parents=True, exist_ok=True)
    sources = {
        "llamacpp": (_LLAMA, _source(names, name)),
        "openvino": (_OPENVINO, str(target.model.config.name_or_path)),
    }
    peers, room = dict[str, Peer](), str(context + 16)  # prompt lookup drafts beyond the end
    try:
        for peer in progress(names, desc="other engines start", leave=False):
            engine, _, form = peer.partition("_")
            program, source = sources[engine]
            peers[peer] = Peer(program, source, str(folder), str(torch.get_num_threads()), form, room)
            works = peers[peer].answer([1] * 8, 4) is not None
            print(f"{peer}: {peers[peer].version if works else f'left out, {peers[peer].last_words}'}")
        yield {peer: each for peer, each in peers.items() if not each.failed}
    finally:
        for each in peers.values():
            each.close()


def answering(peer: Peer, name: str, spec: Spec, max_new_tokens: int) -> Call:
    """A model in another engine as an arm: greedy, one prompt at a time. Raises ValueError where its process ended."""
    ends = sorted(spec.target.end_tokens)

    def call(batch: Sequence[Prompt], sampling: Sampling) -> Generated:
        (prompt,) = batch
        assert sampling.temperature == 0, "refused by CompareConfig"
        room = max_new_tokens if (most := spec.target.max_positions) is None else most - len(prompt.ids)
        if (reply := peer.answer(prompt.ids, min(max_new_tokens, room), ends)) is None:
            raise ValueError(
                f"{name} ended: {peer.last_words}; what was measured is kept. Leave it out of compare.methods"
            )
        tokens, passes = reply["tokens"], reply["passes"]
        stats = Stats(passes, passes, tokens=len(tokens), seconds_prefill=reply["prompt"])
        stats.seconds_target = reply["seconds"] - reply["prompt"]
        return Generated([tokens], [], [[False] * len(tokens)], stats)

    return call
