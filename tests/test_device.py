"""What a decode step reads from the device and uploads to it: on a GPU the host waits for each."""

import time
from collections import Counter
from typing import Any

import pytest
import torch
from conftest import made, randomize, tiny_model
from families import build
from test_drafters import PROMPTS, TABLE
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from selfspec.core import generate, rows
from selfspec.core.contract import Accepted, Context
from selfspec.core.generate import Result, _steps, autoregressive, speculative, speculative_steps
from selfspec.core.options import Options
from selfspec.core.sampling import Noise, Sampling
from selfspec.core.target import Target
from selfspec.core.tree import ancestors, chain
from selfspec.core.verify import Kept, WalkNoise, read_walk, walk
from selfspec.engine.engine import Engine

READS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "equal", "nonzero", "cpu", "numpy"}
UPLOADS = {"tensor", "as_tensor"}
# Reads and uploads of a step in which no row ends. What mixes trees or looks texts up works on the host.
STEPS = {
    **dict.fromkeys(("medusa", "sequential", "early_exit", "feature", "eagle3", "mtp", "block", "mask"), (1, 0)),
    "prompt_lookup": (1, 1),
    "lookahead": (2, 1),
    "hybrid": (2, 1),
}


class Counting(TorchFunctionMode):
    """Counts functions that read tensors, and those that make them of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.uploads = Counter[str](), Counter[str]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in READS:
            self.reads[name] += 1
        if name in UPLOADS:
            self.uploads[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def static(monkeypatch) -> Target:
    """A target whose engine has the sizes and functions of a compiled one, which run as they are."""
    monkeypatch.setattr(Engine, "run", lambda self, function, *args, compiled=True: function(*args))
    return Target(tiny_model(), engine=Engine("eager", quiet=True))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [None, *STEPS])
def test_reads_and_uploads_of_a_step(static, kind, temperature, batch):
    """Of six steps behind the first four, in which prompts are read and drafters begin."""
    torch.manual_seed(0)
    drafter = TABLE[kind or "medusa"].build(static)
    if not str(kind).startswith("hybrid"):
        randomize(drafter)
    given = static, PROMPTS[:batch], Options(100, Sampling(temperature), 0, frozenset())
    if kind is None:
        steps = _steps(*given, None, 1, Result.of(batch))
    else:
        steps = speculative_steps(*given, drafter.eval(), 8, Result.of(batch))
    for _ in range(4):
        next(steps)
    with Counting() as counting:
        for _ in range(6):
            next(steps)
    reads, uploads = (1, 0) if kind is None else STEPS[kind]
    assert 6 <= counting.reads.total() <= 6 * reads  # a hybrid may leave its trained members alone
    assert counting.uploads.total() <= 6 * uploads


ALL = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05}


@pytest.mark.parametrize("limits", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, ALL])
def test_what_leaves_tokens_out_is_on_the_device(limits, monkeypatch):
    """On a GPU, whose walk with top-k, top-p and min-p is one read, and has the tokens that a CPU picks level by
    level."""
    target, options = Target(tiny_model()), Options(24, Sampling(**{"temperature": 1.0, **limits}), 3)
    drafter = made("medusa", target).eval()
    lazy = speculative(target, PROMPTS[:2], options, drafter, 8)
    monkeypatch.setattr(rows, "_LAZY", set())
    monkeypatch.setattr(rows, "verify", None)
    found = speculative(target, PROMPTS[:2], options, drafter, 8)
    assert found.token_ids == lazy.token_ids == autoregressive(target, PROMPTS[:2], options).token_ids
    assert found.token_ids != speculative(target, PROMPTS[:2], Options(24, Sampling(1.0), 3), drafter, 8).token_ids
    steps = speculative_steps(target, PROMPTS[:2], options, drafter, 8, Result.of(2))
    for _ in range(4):
        next(steps)
    with Counting() as counting:
        for _ in range(3):
            next(steps)
    assert counting.reads.total() == 3


def test_a_walk_that_leaves_tokens_out_is_traced_whole():
    generator = torch.Generator().manual_seed(0)
    logits, values = torch.randn(2, 4, 61, generator=generator), torch.randn(2, 5, 61, generator=generator).double()
    tokens, parents = torch.randint(61, (2, 4), generator=generator), torch.tensor([[-1, 0, 1, 0]]).expand(2, -1)
    noise = WalkNoise(values, torch.tensor(0.7, dtype=torch.float64), (9, 0.9, 0.05))
    given = logits, tokens, parents, ancestors(parents), noise
    assert torch.compile(walk, backend="eager", fullgraph=True)(*given).equal(walk(*given))


@pytest.mark.parametrize("family", ["Mamba", "Mamba2", "Qwen3.5"])
def test_layers_with_a_state_read_and_upload_nothing(monkeypatch, family):
    monkeypatch.setattr(Engine, "run", lambda self, function, *args, compiled=True: function(*args))
    target = Target(build(family), engine=Engine("eager", quiet=True))
    steps = speculative_steps(
        target, PROMPTS[:2], Options(60, Sampling(1.0), 0, frozenset()), made("medusa", target), 8, Result.of(2)
    )
    for _ in range(3):
        next(steps)
    with Counting() as counting:
        for _ in range(4):
            next(steps)
    assert (counting.reads.total(), counting.uploads.total()) == (4, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [kind for kind, counts in STEPS.items() if counts == (1, 0)])
def test_a_step_runs_where_nothing_can_be_read(kind, temperature, monkeypatch):
    """Tensors on the device `meta` have no values: reading one raises, and so does mixing them with a CPU's. Draft,
    pass, walk, commit and the drafter's state need none."""
    monkeypatch.setattr(Engine, "run", lambda self, function, *args, compiled=True: function(*args))
    with monkeypatch.context() as building:  # transformers reads positions of passes without masks
        building.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
        target = Target(tiny_model().to("meta"), returns=0, engine=Engine("eager", quiet=True))
        drafter = TABLE[kind].build(target).to("meta").eval()
        session = drafter.session(target, 2)
    with torch.inference_mode():
        cache, rows, device = target.cache(2, 256, 256), [0, 1], target.device
        out = target.forward(
            chain(torch.zeros(2, 5, dtype=torch.long, device=device)), cache, False, reads=drafter.reads, prompt=True
        )
        paths, tokens = [list(range(5))] * 2, [[0] * 6] * 2
        cache.commit(paths)
        session.observe(Accepted(out.hidden, out.features, rows, paths))
        roots, warmth = torch.zeros(2, dtype=torch.long, device=device), torch.ones((), device=device).double()
        noise = Noise([0, 0], [0, 1], target.vocab_size, device, target.engine) if temperature else None
        for path in ([0, 2], [0], [0, 1]):
            context = Context(roots, cache.lengths, tokens, 8, temperature, noise, target, cache)
            tree = target.shaped(session.propose(context).on(roots))
            depths = target.engine.size(tree.levels + 1)
            ahead = None if noise is None else noise.ahead([n + 1 for n in cache.lengths], depths, context.positions)
            over = WalkNoise() if ahead is None else WalkNoise(ahead.contiguous(), warmth, (50, 0.9, 0.05))
            runner, layers = tree.through or target, (tree.start, target.n_layers)
            out = runner.forward(tree, cache, True, layers, tree.hidden, drafter.reads, noise=over)
            kept = Kept(out.walked)
            cache.commit([path] * 2, kept)
            roots, tokens = kept.bonus, [[*row, *[0] * len(path)] for row in tokens]
            session.observe(Accepted(out.hidden, out.features, rows, [path] * 2, out.logits, kept))
    assert roots.is_meta


def test_nothing_but_the_walk_is_waited_for(static, monkeypatch):
    """Marks in a GPU's stream are read when it has passed them: behind the next read, but for the very last one."""
    reads, early = [0], [0]

    class Mark:
        def __init__(self, device: torch.device) -> None:
            self.seconds, self.reads = time.perf_counter(), reads[0]

        def synchronize(self) -> None:
            early[0] += self.reads == reads[0]

        def elapsed_time(self, last: "Mark") -> float:
            return 1000 * (last.seconds - self.seconds)

    def read(walked: torch.Tensor) -> Any:
        reads[0] += 1
        return read_walk(walked)

    monkeypatch.setattr(generate, "moment", Mark)
    monkeypatch.setattr(rows, "read_walk", read)
    drafter, start = TABLE["medusa"].build(static).eval(), time.perf_counter()
    stats = speculative(static, PROMPTS[:2], Options(20), drafter, 8).stats
    took = time.perf_counter() - start
    assert reads[0] == stats.calls > 5
    assert early[0] <= 1
    assert min(stats.seconds_prefill, stats.seconds_draft, stats.seconds_target, stats.seconds_other) > 0
    assert 0.5 * took < stats.seconds < took


def test_what_is_kept_is_the_same_on_host_and_device():
    logits = torch.randn(3, 6, 9, generator=torch.Generator().manual_seed(0))
    parents = torch.tensor([[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, -1, 2]])
    tokens = logits.argmax(-1).gather(1, parents.clamp(min=0))  # every child is right
    walked = walk(logits, tokens, parents, ancestors(parents), WalkNoise())
    paths, emitted = read_walk(walked)
    assert max(map(len, paths)) == 6
    kept, uploaded = Kept(walked), Kept.of(paths, emitted, torch.device("cpu"))
    assert kept.walked.tolist() == uploaded.walked.tolist()
    assert kept.path.tolist() == [path + list(range(len(path), 6)) for path in paths]
    assert kept.tokens.tolist() == [row + [0] * (6 - len(row)) for row in emitted]
    assert kept.lengths.tolist() == [*map(len, paths)]
    assert kept.leaf.tolist() == [path[-1] for path in paths]
    assert kept.bonus.tolist() == [row[-1] for row in emitted]
