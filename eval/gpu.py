"""What needs a GPU, in one process and five minutes: python eval/gpu.py

Parts run in the order of their worth. Each line is printed, and written into notebooks/results/gpu.md, as soon as it is
measured. The same command goes on with the parts that are missing. Without a GPU they run on the CPU at tiny sizes, and
nothing is written there.
"""

from __future__ import annotations

import datetime
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
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
from selfspec.evaluation.arms import Call, Prompt, drafted, of_transformers
from selfspec.evaluation.arms import plain as plain_arm
from selfspec.evaluation.limits import bandwidth, pass_seconds, random_model, weights_of
from selfspec.evaluation.measure import timed
from selfspec.evaluation.tables import markdown
from selfspec.training.draft_loss import DraftLoss
from selfspec.training.resources import relative_cost
from selfspec.utils.errors import one_line
from selfspec.utils.files import code_hash, parse_json, write_section, write_text
from selfspec.utils.machine import device_name

register()
ROOT = Path(__file__).parents[1]
SMOLLM2 = ("smollm2-eagle3+prompt_lookup", "smollm2-eagle3", "smollm2-medusa+prompt_lookup")
FAULTS = ("tiny-medusa", "tiny-early-exit", "tiny-eagle3", "tiny-medusa+prompt_lookup", "prompt_lookup", "lookahead")
Row = list[str]
Products = Callable[[], AbstractContextManager[None]]  # under which passes multiply


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


_MODELS = {"configs/models/llama_1b.json": 6, "configs/models/llama_8b.json": 24}
CUDA = Sizes("cuda", "smollm2", SMOLLM2, (1, 4, 16), 128, _MODELS, (1, 8, 16, 64), (1, 16), 40, 512, "compiled")
_TINY = {"selfspec/assets/tiny-target/config.json": 1}
CPU = Sizes("cpu", "tiny-target", ("tiny-medusa",), (1,), 8, _TINY, (1, 2), (1, 2), 2, 32, "eager")


def questions() -> list[list[dict[str, str]]]:
    """Four questions, as conversations."""
    lines = (ROOT / "eval" / "four_questions.jsonl").read_text().splitlines()
    return [[{"role": "user", "content": parse_json(line)["turns"][0]}] for line in lines]


def loaded(drafter: str, sizes: Sizes, dtype: str = "auto", target: str | None = None) -> Spec:
    return selfspec.load(drafter, target or sizes.target, dtype, sizes.device, sizes.engine)


def speeds(sizes: Sizes) -> Iterator[Row]:
    """Decoding with 8 nodes beside plain decoding and transformers' own, in bfloat16."""
    specs = {name: loaded(name, sizes, "bfloat16") for name in sizes.drafters}
    one = next(iter(specs.values()))
    for batch, temperature in itertools.product(sizes.batches, (0.0, 1.0)):
        ids = one.encode(list(itertools.islice(itertools.cycle(questions()), batch)))
        given = [Prompt(row, seed) for seed, row in enumerate(ids)], Sampling(temperature)
        plain, slow = None, 0.0
        for name, arm in _arms(specs, batch, sizes).items():
            arm(*given)  # warm-up
            result, seconds = timed(one, partial(arm, *given))
            rate = sum(map(len, result.token_ids)) / seconds
            plain, slow = (result, rate) if plain is None else (plain, slow)
            same = sum(a == b for a, b in zip(result.token_ids, plain.token_ids, strict=True))
            stats, step, tau = result.stats, "-", "-"
            if stats.seconds:
                step, tau = f"{1000 * (stats.seconds - stats.seconds_prefill) / stats.calls:.2f}", f"{stats.tau:.2f}"
            cells = [str(batch), f"{temperature:g}", name, f"{rate:.0f}", f"{rate / slow:.2f}x", tau, step]
            yield [*cells, f"{same} of {batch}"]


def _arms(specs: dict[str, Spec], batch: int, sizes: Sizes) -> dict[str, Call]:
    """Ways to continue so many prompts, plain decoding first."""
    one = next(iter(specs.values()))
    arms = {"plain": plain_arm(one, sizes.tokens)}
    arms |= {name: drafted(spec, sizes.tokens, 8) for name, spec in specs.items()}
    if batch > 1 or sizes.device == "cpu":
        return arms
    theirs = of_transformers(one, sizes.tokens)
    return arms | {name: theirs[name] for name in ("hf_generate", "hf_static")}


def passes(sizes: Sizes) -> Iterator[Row]:
    """Passes by nodes, of random weights in bfloat16, and the speedup that their costs allow a draft that is free."""
    for config, gib in sizes.llamas.items():
        free = torch.cuda.mem_get_info()[0] / 2**30 if sizes.device == "cuda" else float("inf")
        if free < gib:
            yield [Path(config).stem, f"not run: it needs {gib} GiB, {free:.0f} are free", *[""] * 5]
            continue
        target = Target(random_model(str(ROOT / config), torch.bfloat16, sizes.device))
        target.use_engine(sizes.engine)
        size = weights_of(target)[0]
        least = size / bandwidth(min(size, 2**30), target.device)
        for rows in sizes.rows:
            seconds = pass_seconds({"": target}, sizes.nodes, 5, rows)[""]
            costs = {n: took / seconds[1] for n, took in seconds.items()}
            shown = ", ".join(f"c({n}) {cost:.2f}" for n, cost in costs.items() if n > 1)
            times = f"{1000 * seconds[1]:.2f}", f"{1000 * least:.2f}", f"{seconds[1] / least:.2f}"
            middle = max(n for n in costs if n <= 16)
            at = [f"{tau / costs[middle]:.2f}x" for tau in (2, 3, 4)]
            yield [Path(config).stem, str(rows), *times, shown, " / ".join(at)]
        del target


@contextmanager
def whole_sums() -> Iterator[None]:
    """The library may not split the sums of products in bfloat16 (torch from 2.10 on). A row's bits might then not
    depend on the number of rows."""
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction
    products.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        products.allow_bf16_reduced_precision_reduction = before


def exactness(sizes: Sizes) -> Iterator[Row]:
    """Texts of trees of 16 nodes that are those of plain decoding."""
    ways: dict[str, Products] = {"float32": nullcontext, "bfloat16": nullcontext, "bfloat16, whole sums": whole_sums}
    for (way, products), temperature in itertools.product(ways.items(), (0.0, 1.0)):
        with products():
            spec = loaded(sizes.drafters[0], sizes, way.partition(",")[0])
            same, exact, rates = 0, "", list[float]()
            for seed, asked in zip(range(sizes.texts // 2), itertools.cycle(questions()), strict=False):
                text = f"{asked[0]['content']} Answer in {seed + 1} sentences."
                ids = spec.encode([[{"role": "user", "content": text}]])[0]
                given = [Prompt(ids, seed)], Sampling(temperature)
                plain, seconds = timed(spec, partial(plain_arm(spec, sizes.tokens), *given))
                result = drafted(spec, sizes.tokens, 16)(*given)
                same += result.token_ids == plain.token_ids
                exact, rates = result.stats.exact, [*rates, len(plain.token_ids[0]) / seconds]
        yield [way, f"{temperature:g}", f"{same} of {sizes.texts // 2}", exact, f"{statistics.median(rates):.0f}"]


def training(sizes: Sizes) -> Iterator[Row]:
    """A training step of EAGLE-3, in the time of the target's forward over the same batch."""
    target = loaded("prompt_lookup", sizes, "bfloat16").target
    drafter = Eagle3(target, Eagle3Config(draft_vocab=min(8192, target.vocab_size - 1)))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (8, sizes.length), generator=generator)
    batch = {"tokens": tokens, "mask": torch.ones_like(tokens, dtype=torch.bool)}
    precision = torch.autocast(sizes.device, torch.bfloat16)
    cost = relative_cost(DraftLoss(drafter, target), target, batch, precision, 4)
    rate = tokens.numel() / cost["seconds_step"]
    yield [f"{1000 * cost['seconds_step']:.0f}", f"{cost['step_over_forward']:.1f}", f"{rate:.0f}"]


def faults(sizes: Sizes) -> Iterator[Row]:
    """Every embedded drafter of the tiny target with every way to ask, in float32, against plain decoding."""
    count = wrong = 0
    for name in FAULTS if sizes.device == "cuda" else FAULTS[:1]:
        spec = loaded(name, sizes, "float32", "tiny-target")
        ids = spec.encode(["def main(", "import os\n\nclass A:", "x"])
        ways: dict[str, dict[str, Any]] = {"T=0": {}, "T=1": {"temperature": 1.0}, "top_p": {"temperature": 0.8}}
        ways["top_p"] |= {"top_p": 0.9, "top_k": 20}
        ways |= {"auto": {"nodes": "auto"}, "one node": {"nodes": 1}, "stop": {"stop": "("}, "trace": {"trace": True}}
        for way, asked in ways.items():
            count += 1
            try:
                plain = spec.autoregressive(ids, 24, **asked, seed=[1, 2, 3])
                same = spec.generate(ids, 24, **asked, seed=[1, 2, 3]).token_ids == plain.token_ids
                why = "" if same else "other tokens than plain decoding"
            except Exception as error:  # whatever it is, the others are tried too
                why = f"{type(error).__name__}: {one_line(error)}"
            if why:
                wrong += 1
                yield [name, way, why[:200]]
    yield ["all", f"{count} ways", f"{wrong} faults"]


PARTS: dict[str, tuple[Sequence[str], Callable[[Sizes], Iterator[Row]]]] = {
    "speeds": (("batch", "T", "arm", "tokens/s", "over plain", "τ", "ms a step", "identical"), speeds),
    "passes": (("model", "rows", "ms, 1 node", "its bytes, ms", "ratio", "nodes", "τ 2 / 3 / 4, 16 nodes"), passes),
    "exactness": (("dtype", "T", "texts", "stats.exact", "tokens/s plain"), exactness),
    "training": (("ms a step", "target forwards", "tokens/s"), training),
    "faults": (("drafter", "way", "what"), faults),
}


def run(name: str, sizes: Sizes, folder: Path, end: float) -> Iterator[tuple[list[Row], str]]:
    """A part's lines so far, and why others are missing, after each of them. What this code measured whole here is
    read."""
    path = folder / f"{name}.json"
    by = [code_hash("core", "engine", "drafters", "budget"), device_name(torch.device(sizes.device)), torch.__version__]
    if path.is_file() and (kept := json.loads(path.read_text()))["by"] == by:
        yield kept["rows"], ""
        return
    rows: list[Row] = []
    try:
        for row in PARTS[name][1](sizes):
            rows.append(row)
            print(f"{name}: " + " | ".join(row), flush=True)
            late = time.monotonic() > end
            yield rows, "stopped here, the minutes were over" if late else "unfinished"
            if late:
                return
    except Exception as error:  # of a driver, a library, memory: the other parts are worth their time all the same
        yield rows, f"failed: {type(error).__name__}: {one_line(error)}"
        return
    write_text(path, json.dumps({"by": by, "rows": rows}) + "\n")
    yield rows, ""


@hydra.main(config_path="../configs", config_name="gpu", version_base="1.3")
def main(config: DictConfig) -> None:
    with clear_errors():
        folder, gpu = Path(HydraConfig.get().runtime.output_dir), torch.cuda.is_available()
        wanted = list(PARTS) if config.parts is None else list(config.parts)
        if unknown := sorted(set(wanted) - set(PARTS)):
            raise ValueError(f"parts={unknown} are unknown; known are {', '.join(PARTS)}")
        title = torch.cuda.get_device_name() if gpu else "no GPU here: tiny sizes on the CPU, which measure nothing"
        print(title)
        end = time.monotonic() + 60 * config.minutes
        texts = {"": f"{datetime.date.today()}, {title}, torch {torch.__version__}, `python eval/gpu.py`"}
        for name in wanted:
            heads, what = PARTS[name]
            for rows, why in run(name, CUDA if gpu else CPU, folder, end):
                head = f"**{name}**: {(what.__doc__ or '').splitlines()[0]}" + (f" ({why})" if why else "")
                table = markdown(heads, [[*row, *[""] * (len(heads) - len(row))] for row in rows])
                texts[name] = f"{head}\n\n{table}"
                text = "\n\n".join(texts.values())
                write_text(folder / "gpu.md", text + "\n")
                if gpu and config.parts is None:  # some parts alone would take the place of all
                    write_section(Path(config.results), "gpu", text)
        print(f"\n{text}\n{folder}" + ("" if gpu else f"\n{title}"))
        if "(failed: " in text:
            sys.exit(1)


if __name__ == "__main__":
    main()
