"""A vLLM that serves a target for training elsewhere: its command for text, for hidden states and for an untrained
drafter's files, what a folder of states holds, and what the server of a drafter counts."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoints.embedded import resolve
from selfspec.checkpoints.target_files import Shards
from selfspec.checkpoints.target_parts import layer_by_layer, load_parts
from selfspec.core.target import Target
from selfspec.data.questions import Question
from selfspec.data.server import EXACT
from selfspec.drafters.base import Drafter
from selfspec.drafters.registry import build, config_class, drafter_class
from selfspec.training.states import ABOUT, States, key_of, wanted_layers, write_about
from selfspec.training.states_server import FromServer
from selfspec.utils.files import Figures, atomic, disk_room, mean, read_json, shown
from selfspec.utils.openai_client import Servers
from selfspec.utils.progress import progress

KINDS = ("eagle3", "medusa", "sequential", "mtp", "block")  # that are trained on states alone
_CPU = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_PROBED = 64  # tokens of the text on which states are held against the target's own
_CLOSE = 0.2  # relative error of states up to which they can be of the same layer, in any dtype
_COUNTERS = "vllm:spec_decode_num_"


def server_command(
    target: str,
    folder: Path,
    python: str,
    port: int,
    length: int,
    dtype: str,
    layers: Sequence[int] | None = None,
    drafter: Figures | None = None,
) -> tuple[dict[str, str], list[str]]:
    """Environment and command of a server. target: a folder or a hub id; folder: that hidden states are written into;
    python: of vLLM's environment; length: tokens of a request at most, as far as the target reaches; layers: whose
    states it hands out, in its own counting (None: of none, for text); drafter: vLLM's speculative config of a drafter
    that it serves."""
    place = Path(resolve(target))
    config = read_json(place / "config.json") if (place / "config.json").is_file() else {}
    most = min(length + 1, (config.get("text_config") or config).get("max_position_embeddings") or length + 1)
    words = [python, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(place.absolute()) if place.is_dir() else target, "--port", str(port)]
    words += ["--served-model-name", target, "--dtype", dtype, "--max-model-len", str(most)]
    gpus, environment = torch.cuda.device_count(), dict[str, str]()
    if gpus > 1 and layers is not None:  # the first is the trainer's
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[1 : 1 + _beside(gpus)])
    if gpus > 1:
        words += ["--tensor-parallel-size", str(2 ** (gpus.bit_length() - 1) if layers is None else _beside(gpus))]
    if not gpus:
        words += ["--enforce-eager", "--max-num-seqs", "8"]
        environment = dict(_CPU)
    if drafter is not None:
        words += ["--speculative-config", json.dumps(drafter)]
    if layers is not None:
        ids = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
        drafting = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": ids}
        connector: Figures = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
        if not gpus:
            connector["kv_connector"] = "CpuHiddenStatesConnector"
            connector["kv_connector_module_path"] = "selfspec_cpu_connector"
            environment["PYTHONPATH"] = str(Path(__file__).with_name("vllm"))
        connector["kv_connector_extra_config"] = {"shared_storage_path": str(folder.absolute())}
        # States of a prompt are whole only where it is read in one pass, and not from a cache
        words += ["--no-enable-chunked-prefill", "--no-enable-prefix-caching"]
        words += ["--max-num-batched-tokens", str(max(most, 2048))]
        words += ["--speculative-config", json.dumps(drafting), "--kv-transfer-config", json.dumps(connector)]
    return environment, words


def _beside(gpus: int) -> int:
    """GPUs for a server where one is the trainer's: a power of two, which divides attention heads."""
    return 2 ** ((gpus - 1).bit_length() - 1)


def shown_command(environment: dict[str, str], words: Sequence[str]) -> str:
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(words)])


def untrained(
    target: str, kind: str, layers: Sequence[int] | None = None, draft_vocab: int | None = None
) -> tuple[Target, Tokenizer, Drafter]:
    """A drafter of this kind with the weights that its training begins with, on a target without its layers. layers:
    whose outputs it reads, as `drafter.layers` (None: the kind's own choice); draft_vocab: as `drafter.draft_vocab`.
    Raises ValueError."""
    if kind not in KINDS:
        raise ValueError(f"--drafter {kind}: {', '.join(KINDS)} are trained on hidden states; others run the target")
    config, asked = config_class(drafter_class(kind)), {"layers": layers and list(layers), "draft_vocab": draft_vocab}
    settings = {name: value for name, value in asked.items() if value is not None}
    if odd := sorted(settings.keys() - {part.name for part in fields(config)}):
        raise ValueError(f"--{odd[0].replace('_', '-')}: a {kind} drafter has no such choice; leave it out")
    loaded, tokenizer = load_parts(target, device="cpu")
    torch.manual_seed(0)
    return loaded, tokenizer, build(drafter_class(kind), loaded, config(**settings))


# -- folders of states


def described(folder: Path) -> Iterator[str]:
    """What a folder of states holds, as lines. Raises ValueError for one without any."""
    shapes, tokens, size, odd = Counter[tuple[int, int, str]](), 0, 0, 0
    paths = sorted(folder.rglob("*.safetensors"))
    for path in progress(paths, desc=f"states in {folder}", unit=" files"):
        try:
            with safe_open(path, "pt") as file:
                part = file.get_slice("hidden_states")
                count, columns, width = part.get_shape()
                shapes[columns, width, part.get_dtype()] += 1
        except Exception:  # safetensors' own kinds: cut off, being written, or no file of states
            odd += 1
            continue
        tokens, size = tokens + count, size + path.stat().st_size
    if not shapes:
        raise ValueError(f"{folder} holds no file of token_ids and hidden_states")
    yield f"{shapes.total()} texts of {tokens} tokens, {size / 1e9:.3f} GB, {size / tokens:.0f} bytes a token"
    for (columns, width, dtype), count in shapes.most_common():
        yield f"  {count} files: {columns} layers of width {width}, {dtype}"
    if len(shapes) > 1:
        yield "  they differ: training takes files of one form alone"
    if odd:
        yield f"  {odd} files are being written, cut off, or none of states: they are left out"
    if (folder / ABOUT).is_file():
        about = read_json(folder / ABOUT)
        yield f"  layers {about.get('layers')} (0 is the embeddings) of {about.get('model')!r}"
    else:
        yield "  which layers they are of is not recorded; training takes them for what the drafter reads, and the last"


def dtype_of(folder: Path) -> str:
    """In which dtype a target is held against states: the record's own."""
    for path in sorted(folder.rglob("*.safetensors")):
        with suppress(Exception), safe_open(path, "pt") as file:  # safetensors' own kinds
            return {"F32": "float32", "F16": "float16"}.get(file.get_slice("hidden_states").get_dtype(), "bfloat16")
    return "auto"


def serves(layers: Sequence[int], target: Target) -> list[str]:
    """The kinds of drafters that states of these layers train."""
    have, found = set(layers), []
    for kind in KINDS:
        try:
            drafter = build(drafter_class(kind), target, config_class(drafter_class(kind))())
        except ValueError:
            continue
        if set(wanted_layers(drafter.reads, target.n_layers)) <= have:
            found.append(kind)
    return found


def probe(states: States, tokens: Tensor, shards: Shards) -> list[str]:
    """Hold states of one text, int64 [n], against those of the target's own layers, of which one at a time is read from
    the checkpoint. Returns what was found; raises ValueError where a column holds another layer than it should."""
    target, recorded, errors = states.target, states.of(tokens)[:_PROBED], dict[int, list[float]]()
    tokens = tokens[:_PROBED]
    bar = progress(layer_by_layer(target, tokens[None].to(target.device), shards), total=target.n_layers, desc="probe")
    for layer, outputs in bar:
        own = outputs[0].float().cpu()
        apart = [recorded[:, column].float() - own for column in range(len(states.layers))]
        errors[layer + 1] = [float(difference.norm() / own.norm()) for difference in apart]
    lines, wrong = [], []
    for column, said in enumerate(states.layers):
        if not said:
            lines.append(f"column {column}: the embeddings, which are not held against the target")
            continue
        of_layers = {layer: found[column] for layer, found in errors.items()}
        nearest = min(of_layers, key=lambda layer: of_layers[layer])
        lines.append(f"column {column}: layer {said}, relative error {of_layers.get(said, math.inf):.1e}")
        if nearest != said or of_layers[said] > _CLOSE:
            wrong.append(
                f"column {column} should be layer {said}, nearest is {nearest} ({of_layers[nearest]:.1e} away)"
            )
    if wrong:
        raise ValueError(
            f"hidden states are not those of {target.name!r}: {'; '.join(wrong)}. Layers are counted from 0, the "
            "embeddings, so the output of layer l is l + 1; numbers that are one off, or another checkpoint, show so"
        )
    return lines


def record(states: FromServer, documents: Sequence[Tensor], folder: Path) -> int:
    """Have the states of documents, int64 [n] each, written into a folder, for training without the server. Returns
    how many were written now: files that are there stay."""
    folder.mkdir(parents=True, exist_ok=True)
    about = folder / ABOUT
    found = read_json(about) if about.is_file() else {}
    for name, value in {"layers": states.layers, "model": states.target.name}.items():
        if found.get(name, value) != value:
            raise ValueError(f"{folder} holds states of {name} {found[name]}, not {value}; give another folder")
    write_about(folder, states.layers, states.target.name)
    places = [(folder / f"hs_{key_of(tokens).hex()}.safetensors", tokens) for tokens in documents]
    missing = [(place, tokens) for place, tokens in dict(places).items() if not place.is_file()]

    def write(job: tuple[Path, Tensor]) -> int:
        place, tokens = job
        path, found = states.recorded(tokens)
        states.check(found, tokens, str(path))
        with disk_room(place), atomic(place) as scratch:
            shutil.move(path, scratch)
        path.with_name(path.name + ".lock").unlink(missing_ok=True)
        return len(tokens)

    with ThreadPoolExecutor(states.at_once) as pool, progress(total=len(missing), desc="states", unit=" texts") as bar:
        tokens, begun = 0, time.perf_counter()
        for count in pool.map(write, missing):
            tokens += count
            bar.update()
            bar.set_postfix(
                {"tokens": tokens, "rate": f"{tokens / (time.perf_counter() - begun):.0f}/s"}, refresh=False
            )
    write_about(folder, states.layers, states.target.name)
    return len(missing)


# -- a drafter that is served


def acceptance(url: str, questions: Sequence[Question], new_tokens: int, temperature: float, at_once: int) -> Figures:
    """What a server counts of its drafter on these questions. Raises ValueError for a server that drafts nothing."""
    servers = Servers((url,))
    before = servers.metrics((_COUNTERS,))

    def ask(question: Question) -> int:
        arguments = {name: value for name, value in question.beside.items() if name != "tools"}
        body = {"messages": question.messages(0, ()), "max_tokens": new_tokens, "temperature": temperature, "seed": 0}
        body |= {**EXACT, **{name: value for name, value in question.beside.items() if name == "tools"}}
        body |= {"chat_template_kwargs": arguments} if arguments else {}
        answer = servers.post("/v1/chat/completions", body)
        return int((answer.get("usage") or {}).get("completion_tokens") or 0)

    with ThreadPoolExecutor(at_once) as pool:
        tokens = sum(progress(pool.map(ask, questions), total=len(questions), desc="questions"))
    after = servers.metrics((_COUNTERS,))

    def change(name: str) -> dict[str, float]:
        found = after.get(f"{_COUNTERS}{name}_total", {})
        return {
            labels: value - before.get(f"{_COUNTERS}{name}_total", {}).get(labels, 0.0)
            for labels, value in found.items()
        }

    drafts, accepted = (sum(change(name).values()) for name in ("drafts", "accepted_tokens"))
    if not drafts:
        raise ValueError(f"{url} has drafted nothing; serve the drafter with it: selfspec export prints the command")
    positions = dict[int, float]()
    for labels, value in change("accepted_tokens_per_pos").items():
        at = int(labels.partition('position="')[2].partition('"')[0])
        positions[at] = positions.get(at, 0.0) + value
    rates = [positions[at] / drafts for at in sorted(positions)]
    return {
        "questions": len(questions),
        "tokens": tokens,
        "drafts": drafts,
        "per_position": rates,
        "tau": 1 + accepted / drafts,
    }


def acceptance_lines(figures: Figures) -> list[str]:
    rates = [*figures["per_position"]]
    given = [mean(rate, before) for rate, before in zip(rates, [1.0, *rates], strict=False)]
    return [
        f"acceptance length {shown(figures['tau'])} over {figures['drafts']:.0f} drafts; "
        f"{figures['questions']} answers of {figures['tokens']} tokens",
        f"accepted by position {' '.join(shown(rate, 3) for rate in rates)}",
        f"given the one before {' '.join(shown(rate, 3) for rate in given)}",
    ]


def start(environment: dict[str, str], words: list[str]) -> None:
    """This process becomes the server. Raises ValueError where its Python has no vLLM."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([words[0], "-c", find], capture_output=True, check=False).returncode:
        raise ValueError(
            f"{words[0]} can not import vllm: name the environment that has it (export SELFSPEC_VLLM=/path/to/venv), "
            "or make one in a clone: make .venv-vllm/.ready"
        )
    os.execvpe(words[0], words, {**os.environ, **environment})
