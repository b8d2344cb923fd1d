"""What needs a GPU, in one process and so many minutes: python eval/gpu.py minutes=5

The parts take turns, each with its next piece, in the order of the pieces' worth. Each line is printed, and written
into notebooks/results/gpu.md, as soon as it is measured. The same command goes on with the pieces that are missing.
Without a GPU they run on the CPU at tiny sizes, and nothing is written there.
"""

from __future__ import annotations

import datetime
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import selfspec
from selfspec.api import Spec
from selfspec.cli.config import register
from selfspec.cli.errors import clear_errors
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.drafters.eagle3 import Eagle3, Eagle3Config
from selfspec.evaluation.arms import Prompt, decoded, of_transformers
from selfspec.evaluation.limits import bandwidth, pass_seconds, random_model, weights_of
from selfspec.evaluation.measure import timed
from selfspec.evaluation.tables import markdown
from selfspec.output import Generated
from selfspec.training.draft_loss import DraftLoss
from selfspec.training.resources import relative_cost
from selfspec.utils.errors import one_line
from selfspec.utils.files import code_hash, parse_json, section, write_section, write_text
from selfspec.utils.machine import device_name

register()
ROOT = Path(__file__).parents[1]
SMOLLM2 = ("smollm2-eagle3+prompt_lookup", "smollm2-eagle3", "smollm2-medusa+prompt_lookup")
FAULTS = ("tiny-medusa", "tiny-early-exit", "tiny-eagle3", "tiny-medusa+prompt_lookup", "prompt_lookup", "lookahead")
Row = list[str]


@dataclass(frozen=True)
class Sizes:
    """What is measured. target, drafters: of the speeds; batches; tokens: of an answer; llamas: configs of random
    weights, with the GiB that they need; nodes, rows: of their passes; texts: that are compared; length: of a training
    row; engine."""

    device: str
    target: str
    drafters: tuple[str, ...]
    batches: tuple[int, ...]
    tokens: int
    llamas: dict[str, int]
    nodes: tuple[int, ...]
    rows: tuple[int, ...]
    texts: int
    length: int
    engine: str


_MODELS = {"configs/models/llama_8b.json": 24, "configs/models/llama_1b.json": 6}
CUDA = Sizes("cuda", "smollm2", SMOLLM2, (1, 4, 16), 128, _MODELS, (1, 8, 16, 64), (1, 16), 40, 512, "compiled")
_TINY = {"selfspec/assets/tiny-target/config.json": 1}
CPU = Sizes("cpu", "tiny-target", ("tiny-medusa",), (1,), 8, _TINY, (1, 2), (1, 2), 2, 32, "eager")
Piece = tuple[str, Callable[[], list[Row]]]  # a name, and what measures its lines


def questions() -> list[list[dict[str, str]]]:
    """Four questions, as conversations."""
    lines = (ROOT / "eval" / "four_questions.jsonl").read_text().splitlines()
    return [[{"role": "user", "content": parse_json(line)["turns"][0]}] for line in lines]


def loaded(drafter: str, sizes: Sizes, dtype: str = "auto", width: int | None = None) -> Spec:
    return selfspec.load(drafter, sizes.target, dtype, sizes.device, sizes.engine, width=width)


def speeds(sizes: Sizes) -> Iterator[Piece]:
    """Decoding with 8 nodes beside plain decoding and transformers' own, in bfloat16."""
    spec_of = cache(lambda name: loaded(name, sizes, "bfloat16"))

    def given(batch: int, temperature: float) -> tuple[list[Prompt], Sampling]:
        ids = spec_of(sizes.drafters[0]).encode(list(itertools.islice(itertools.cycle(questions()), batch)))
        return [Prompt(row, seed) for seed, row in enumerate(ids)], Sampling(temperature)

    @cache
    def measured(arm: str, batch: int, temperature: float) -> tuple[Generated, float]:
        one, theirs = spec_of(sizes.drafters[0]), ("hf_generate", "hf_static")
        call = decoded(one, sizes.tokens) if arm == "plain" else None
        call = call or (of_transformers(one, sizes.tokens)[arm] if arm in theirs else None)
        call = call or decoded(spec_of(arm), sizes.tokens, 8)
        call(*given(batch, temperature))  # warm-up
        return timed(one, partial(call, *given(batch, temperature)))

    def row(arm: str, batch: int, temperature: float) -> list[Row]:
        (plain, slow), (result, seconds) = (measured(name, batch, temperature) for name in ("plain", arm))
        ratio = sum(map(len, result.token_ids)) / seconds * slow / sum(map(len, plain.token_ids))
        same = sum(a == b for a, b in zip(result.token_ids, plain.token_ids, strict=True))
        stats, step, tau = result.stats, "-", "-"
        if stats.seconds:
            step, tau = f"{1000 * (stats.seconds - stats.seconds_prefill) / stats.calls:.2f}", f"{stats.tau:.2f}"
        cells = [str(batch), f"{temperature:g}", arm, f"{sum(map(len, result.token_ids)) / seconds:.0f}"]
        return [[*cells, f"{ratio:.2f}x", tau, step, f"{same} of {batch}"]]

    for batch, temperature in itertools.product(sizes.batches, (0.0, 1.0)):
        theirs = ["hf_generate", "hf_static"] if batch == 1 and sizes.device == "cuda" else []
        for arm in (*sizes.drafters, "plain", *theirs):
            yield f"{batch} {temperature:g} {arm}", partial(row, arm, batch, temperature)


def passes(sizes: Sizes) -> Iterator[Piece]:
    """Passes by nodes, of random weights in bfloat16, and the speedup that their costs allow a draft that is free."""

    @lru_cache(1)
    def target_of(config: str) -> Target:
        target = Target(random_model(str(ROOT / config), torch.bfloat16, sizes.device))
        target.use_engine(sizes.engine)
        return target

    def row(config: str, gib: int, rows: int) -> list[Row]:
        free = torch.cuda.mem_get_info()[0] / 2**30 if sizes.device == "cuda" else float("inf")
        if free < gib:
            return [[Path(config).stem, f"not run: it needs {gib} GiB, {free:.0f} are free"]]
        target = target_of(config)
        size = weights_of(target)[0]
        least = size / bandwidth(min(size, 2**30), target.device)
        seconds = pass_seconds({"": target}, sizes.nodes, 5, rows)[""]
        costs = {n: took / seconds[1] for n, took in seconds.items()}
        shown = ", ".join(f"c({n}) {cost:.2f}" for n, cost in costs.items() if n > 1)
        times = f"{1000 * seconds[1]:.2f}", f"{1000 * least:.2f}", f"{seconds[1] / least:.2f}"
        at = [f"{tau / costs[max(n for n in costs if n <= 16)]:.2f}x" for tau in (2, 3, 4)]
        return [[Path(config).stem, str(rows), *times, shown, " / ".join(at)]]

    for (config, gib), rows in itertools.product(sizes.llamas.items(), sizes.rows):
        yield f"{Path(config).stem} {rows}", partial(row, config, gib, rows)


@contextmanager
def products(library: str, whole_sums: bool) -> Iterator[None]:
    """The BLAS library that multiplies, and whether it may not split the sums of products in bfloat16 (torch from 2.10
    on, with cuBLASLt alone). A row's bits might then not depend on the number of rows."""
    blas, settings = torch.backends.cuda.preferred_blas_library(), torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.preferred_blas_library(library)
    if whole_sums:
        settings.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = before
        torch.backends.cuda.preferred_blas_library(blas)


def exactness(sizes: Sizes) -> Iterator[Piece]:
    """Texts of trees of 16 nodes that are those of plain decoding."""

    def row(way: str, temperature: float) -> list[Row]:
        library = "cublaslt" if "cuBLASLt" in way else "default"
        with products(library, "whole sums" in way) if sizes.device == "cuda" else nullcontext():
            spec = loaded(sizes.drafters[0], sizes, way.partition(",")[0], 16 if "width" in way else None)
            same, exact, rates = 0, "", list[float]()
            for seed, asked in zip(range(sizes.texts // 2), itertools.cycle(questions()), strict=False):
                text = f"{asked[0]['content']} Answer in {seed + 1} sentences."
                ids = spec.encode([[{"role": "user", "content": text}]])[0]
                given = [Prompt(ids, seed)], Sampling(temperature)
                plain, seconds = timed(spec, partial(decoded(spec, sizes.tokens), *given))
                result = decoded(spec, sizes.tokens, 16)(*given)
                same += result.token_ids == plain.token_ids
                exact, rates = result.stats.exact, [*rates, len(plain.token_ids[0]) / seconds]
        return [[way, f"{temperature:g}", f"{same} of {sizes.texts // 2}", exact, f"{statistics.median(rates):.0f}"]]

    ways = ("bfloat16", "bfloat16, width 16", "bfloat16, cuBLASLt", "bfloat16, cuBLASLt, whole sums", "float32")
    for temperature, way in itertools.product((0.0, 1.0), ways):
        yield f"{way} {temperature:g}", partial(row, way, temperature)


def training(sizes: Sizes) -> Iterator[Piece]:
    """A training step of EAGLE-3, in the time of the target's forward over the same batch."""

    def row() -> list[Row]:
        target = loaded("prompt_lookup", sizes, "bfloat16").target
        drafter = Eagle3(target, Eagle3Config(draft_vocab=min(8192, target.vocab_size - 1)))
        tokens = torch.randint(target.vocab_size, (8, sizes.length), generator=torch.Generator().manual_seed(0))
        batch = {"tokens": tokens, "mask": torch.ones_like(tokens, dtype=torch.bool)}
        precision = torch.autocast(sizes.device, torch.bfloat16)
        cost = relative_cost(DraftLoss(drafter, target), target, batch, precision, 4)
        seconds = cost["seconds_step"]
        return [[f"{1000 * seconds:.0f}", f"{cost['step_over_forward']:.1f}", f"{tokens.numel() / seconds:.0f}"]]

    yield "eagle3", row


def faults(sizes: Sizes) -> Iterator[Piece]:
    """Every embedded drafter of the tiny target with every way to ask, in float32, against plain decoding."""

    def row(name: str, engine: str) -> list[Row]:
        spec = selfspec.load(name, "tiny-target", "float32", sizes.device, engine)
        ids, rows = spec.encode(["def main(", "import os\n\nclass A:", "x"]), list[Row]()
        ways: dict[str, dict[str, Any]] = {"T=0": {}, "T=1": {"temperature": 1.0}, "top_p": {"temperature": 0.8}}
        ways["top_p"] |= {"top_p": 0.9, "top_k": 20}
        ways |= {"auto": {"nodes": "auto"}, "one node": {"nodes": 1}, "stop": {"stop": "("}, "trace": {"trace": True}}
        for way, asked in ways.items():
            try:
                plain = spec.autoregressive(ids, 24, **asked, seed=[1, 2, 3])
                same = spec.generate(ids, 24, **asked, seed=[1, 2, 3]).token_ids == plain.token_ids
                why = "" if same else "other tokens than plain decoding"
            except Exception as error:  # whatever it is, the others are tried too
                why = f"{type(error).__name__}: {one_line(error)}"
            rows += [[name, engine, f"{way}: {why[:200]}"]] if why else []
        return [*rows, [name, engine, f"{len(rows)} faults of {len(ways)}"]]

    cuda = sizes.device == "cuda"
    for engine, name in itertools.product(
        ("eager", "compiled") if cuda else ("eager",), FAULTS if cuda else FAULTS[:1]
    ):
        yield f"{name} {engine}", partial(row, name, engine)


PARTS: dict[str, tuple[Sequence[str], Callable[[Sizes], Iterator[Piece]]]] = {
    "training": (("ms a step", "target forwards", "tokens/s"), training),
    "speeds": (("batch", "T", "arm", "tokens/s", "over plain", "τ", "ms a step", "identical"), speeds),
    "passes": (("model", "rows", "ms, 1 node", "its bytes, ms", "ratio", "nodes", "τ 2 / 3 / 4, 16 nodes"), passes),
    "exactness": (("dtype", "T", "texts", "stats.exact", "tokens/s plain"), exactness),
    "faults": (("drafter", "engine", "what"), faults),
}


def run(wanted: Sequence[str], sizes: Sizes, folder: Path, end: float) -> Iterator[dict[str, tuple[list[Row], str]]]:
    """Each part's lines so far, and why others are missing, after each piece. What this code measured here before is
    read."""
    by = [code_hash("core", "engine", "drafters", "budget"), device_name(torch.device(sizes.device)), torch.__version__]
    kept, missing = {name: _kept(folder / f"{name}.json", by) for name in wanted}, dict.fromkeys(wanted, "")
    turns = itertools.zip_longest(*([(name, *piece) for piece in PARTS[name][1](sizes)] for name in wanted))
    for name, key, measure in (piece for turn in turns for piece in turn if piece is not None):
        if key in kept[name]:
            continue
        if time.monotonic() > end:
            missing[name] = missing[name] or f"without {key} and what is behind it: the minutes were over"
            continue
        try:
            kept[name][key] = measure()
        except Exception as error:  # of a driver, a library, memory: the other pieces are worth their time all the same
            missing[name] = f"failed at {key}: {type(error).__name__}: {one_line(error)}"
            continue
        write_text(folder / f"{name}.json", json.dumps({"by": by, "rows": kept[name]}) + "\n")
        for row in kept[name][key]:
            print(f"{name}: " + " | ".join(row), flush=True)
        yield {part: (_rows(kept[part]), missing[part]) for part in wanted}
    yield {part: (_rows(kept[part]), missing[part]) for part in wanted}


def _kept(path: Path, by: list[str]) -> dict[str, list[Row]]:
    """The pieces of a file; none of one that is missing, damaged or of other code."""
    try:
        before = json.loads(path.read_text())
        return {key: [list(row) for row in rows] for key, rows in before["rows"].items()} if before["by"] == by else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _rows(pieces: dict[str, list[Row]]) -> list[Row]:
    return [row for rows in pieces.values() for row in rows]


@hydra.main(config_path="../configs", config_name="gpu", version_base="1.3")
def main(config: DictConfig) -> None:
    with clear_errors():
        folder, gpu = Path(HydraConfig.get().runtime.output_dir), torch.cuda.is_available()
        asked = PARTS if config.parts is None else config.parts
        wanted = [asked] if isinstance(asked, str) else list(asked)
        if type(config.minutes) not in (int, float) or not 0 < config.minutes < float("inf"):
            raise ValueError(f"minutes={config.minutes!r} must be a number above 0")
        if not wanted or not set(wanted) <= set(PARTS):
            raise ValueError(f"parts={wanted} must name some of {', '.join(PARTS)}")
        if gpu and config.parts is None:
            section(Path(config.results), "gpu")  # refused before anything is measured
        title = torch.cuda.get_device_name() if gpu else "no GPU here: tiny sizes on the CPU, which measure nothing"
        print(title)
        first = f"{datetime.date.today()}, {title}, torch {torch.__version__}, `python eval/gpu.py`"
        for parts in run(wanted, CUDA if gpu else CPU, folder, time.monotonic() + 60 * config.minutes):
            texts = [first]
            for name, (rows, why) in parts.items():
                heads, what = PARTS[name]
                head = f"**{name}**: {(what.__doc__ or '').splitlines()[0]}" + (f" ({why})" if why else "")
                table = markdown(heads, [[*row, *[""] * (len(heads) - len(row))] for row in rows])
                texts.append(f"{head}\n\n{table}" if rows or why else f"{head} (not begun)")
            text = "\n\n".join(texts)
            write_text(folder / "gpu.md", text + "\n")
            if gpu and config.parts is None:  # some parts alone would take the place of all
                write_section(Path(config.results), "gpu", text)
        print(f"\n{text}\n{folder}" + ("" if gpu else f"\n{title}"))
        if "(failed at " in text:
            sys.exit(1)


if __name__ == "__main__":
    with clear_errors():
        main()
