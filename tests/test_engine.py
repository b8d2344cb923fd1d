"""The compiled engine: passes over buffers of fixed size, the walk as tensors, compiled code that is never stale."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, RandomTrees, compose_config, made, refused, tiny_model
from families import FAMILIES, build
from test_drafters import PROMPTS, Row, built, of
from test_drafters import row as row  # a fixture: every drafter of the contract
from torch import Tensor, nn

import selfspec
import selfspec.engine.keys as fit
from selfspec.cli import terminal
from selfspec.cli.config import EvalRun
from selfspec.cli.evaluation_runs import _loaded
from selfspec.cli.run_folders import typed
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.quantized import Int8Linear
from selfspec.core.sampling import Noise, Sampling, pick
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, ancestors, chain
from selfspec.core.verify import WalkNoise, largest, read_walk, verify, walk
from selfspec.drafters.early_exit import EarlyExit
from selfspec.drafters.feature import Feature
from selfspec.drafters.mask import Mask
from selfspec.drafters.medusa import Medusa
from selfspec.drafters.sequential import SequentialHeads
from selfspec.engine import choose, disk
from selfspec.engine.choose import LATER, engine_for
from selfspec.engine.engine import Engine
from selfspec.engine.kernels import native
from selfspec.engine.kernels.native import has_compiler
from selfspec.engine.keys import bucket, structure
from selfspec.engine.layers import compiled_once
from selfspec.utils.exactness import EXACT, ROUNDED, TESTED

TREES = DraftTree(
    torch.randint(VOCAB, (3, 6), generator=torch.Generator().manual_seed(0)),
    torch.tensor([[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, -1, 2]]),
)


def buffered(model: Any, backend: str | None = None, folder: Path | None = None) -> Target:
    """A target whose passes run over buffers; without a backend they are not compiled."""
    return Target(model, engine=Engine(backend, folder, quiet=True))


def close(found: Tensor | None, wanted: Tensor | None) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_a_pass_of_compiled_sizes_is_the_eager_pass(window):
    """Rows of different lengths, chosen outputs, layer ranges, nodes that ran before, rows that leave."""
    changes = {} if window is None else {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 1}
    model = tiny_model("llama" if window is None else "qwen3", **changes)
    both = [Target(model), buffered(model, "eager")]
    caches = [target.cache(3, 20) for target in both]
    prompts = torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    for target, cache in zip(both, caches, strict=True):
        target.forward(chain(prompts), cache, logits=False)
        cache.commit([list(range(n)) for n in (40, 11, 23)])
    for _ in range(3):
        a, b = (t.forward(TREES, c, reads=(1,)) for t, c in zip(both, caches, strict=True))
        close(b.logits, a.logits)
        close(b.hidden, a.hidden)
        close(b.features[1], a.features[1])
        for cache in caches:
            cache.commit([[0, 1, 3, 5], [0, 1], [0, 2, 5]])
    outs = []
    for target, cache in zip(both, caches, strict=True):
        first = target.forward(TREES, cache, False, (0, 2)).hidden
        outs.append(target.forward(TREES, cache, True, (2, 3), first, reads=(1,)))
        cache.commit([[0, 2], [0, 1, 2], [0]])
        cache.select([0, 2])
    close(outs[1].logits, outs[0].logits)
    close(outs[1].features[1], outs[0].features[1])
    left = DraftTree(TREES.tokens[[0, 2]], TREES.parents[[0, 2]])
    close(*(t.forward(left, c).logits for t, c in zip(both, caches, strict=True)))


def test_buffers_grow_by_doubling_and_keep_what_they_hold():
    model = tiny_model(max_position_embeddings=1024)
    text = torch.randint(VOCAB, (1, 700), generator=torch.Generator().manual_seed(0))
    target = buffered(model)
    cache, sizes = target.cache(1, 16), []
    for start in range(0, 700, 100):
        out = target.forward(chain(text[:, start : start + 100]), cache)
        cache.commit([list(range(100))])
        sizes.append(cache.capacity)
    assert sizes == [256, 256, 512, 512, 512, 1024, 1024]
    close(out.logits, Target(model).text(text).logits[:, -100:])


def _slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
    "kind", ["medusa", *_slow("mask", "sequential_markov", "feature", "early_exit", "early_exit_free")]
)
def test_drafters_are_traced_whole(kind):
    """By torch.compile's own interpreter of graphs, which builds no code."""
    target, options = buffered(tiny_model(num_hidden_layers=2), "eager"), Options(12, Sampling(0.7), 5)
    row = of_two_layers(kind)
    plain, drafter = autoregressive(target, PROMPTS[2:], options), built(row, target)
    for compiled in (True, False):
        fast = speculative(target, PROMPTS[2:], options, drafter, 7)
        assert fast.token_ids == plain.token_ids
        assert (fast.stats.compiled > 0) == compiled
    assert not target.engine.failed


@pytest.mark.parametrize("kind", ["medusa", *_slow("sequential_markov", "feature")])
def test_what_is_trained_after_compiling_is_seen(kind):
    """Decoding, training, decoding: drafts are those of the weights as they are."""
    model, options = tiny_model(num_hidden_layers=2), Options(20, Sampling(0.7), 5)
    traced, plain = buffered(model, "eager"), buffered(model, "eager")
    drafters = [built(of_two_layers(kind), target) for target in (traced, plain)]
    seen, compiled = [], []
    for step in range(2):
        for drafter in drafters:
            drafter.train()
            torch.manual_seed(step)
            with torch.no_grad():
                for parameter in drafter.trained().values():
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
            drafter.eval()
        plain.engine.compiled.clear()  # this one compiles what it finds
        found = [speculative(t, PROMPTS[:1], options, d, 7) for t, d in zip((traced, plain), drafters, strict=True)]
        assert found[0].token_ids == found[1].token_ids
        assert found[0].from_draft == found[1].from_draft
        seen.append(found[0].from_draft)
        compiled.append(found[0].stats.compiled)
    assert compiled[0] > 0
    assert len({str(drafts) for drafts in seen}) > 1


@pytest.mark.slow
def test_threads_and_dtypes_at_once():
    """Threads over two targets of two dtypes, each compiled by its own engine: every call gives its own tokens."""
    options = Options(20, Sampling(0.7), 5)
    targets = [buffered(tiny_model(num_hidden_layers=2, dtype=d), "eager") for d in (torch.float64, torch.float32)]
    jobs = [(target, built(of_two_layers("medusa"), target), [prompt]) for target in targets for prompt in PROMPTS[:3]]
    alone = [autoregressive(Target(target.model), prompts, options).token_ids for target, _, prompts in jobs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda job: speculative(job[0], job[2], options, job[1], 7).token_ids, jobs * 2))
    assert found == alone * 2


def of_two_layers(kind: str) -> Row:
    made_of = {
        "medusa": of(Medusa, heads=3, rank=4),
        "sequential_markov": of(SequentialHeads, heads=3, form="markov", rank=4, correction=8, prefix=False),
        "feature": of(Feature, layers=[0, 1], depth=3, width=2, unroll=1),
        "early_exit": of(EarlyExit, exit=1, rank=4, width=2, depth=2),
        "mask": of(Mask, masks=3, rank=4, correction=8, width=2),
        "early_exit_free": of(EarlyExit, exit=1, rank=0, width=2, depth=2),
    }
    return made_of[kind]


def random_trees(seed: int) -> tuple[DraftTree, Tensor]:
    """Trees of few tokens, so that siblings are often alike, and logits that often pick them."""
    g = torch.Generator().manual_seed(seed)
    nodes = int(torch.randint(1, 18, (1,), generator=g))
    parents = torch.stack([torch.randint(-1, max(1, n), (3,), generator=g) for n in range(nodes)], 1)
    parents[:, 0] = -1
    return DraftTree(torch.randint(4, (3, nodes), generator=g), parents), torch.randn(3, nodes, 5, generator=g)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_the_walk_is_verify(temperature):
    lengths = set()
    for seed in range(60):
        tree, logits = random_trees(seed)
        torch.testing.assert_close(ancestors(tree.parents), tree.mask)
        assert tree.levels == int(tree.depth.max())
        noise = torch.rand(3, 32, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).log_()

        def picker(level: Tensor, rows: list[int], ahead: list[list[int]]) -> tuple[Tensor, Tensor]:
            scores = level if temperature == 0 else level / temperature
            own = noise[rows, [len(new) for new in ahead]]  # noqa: B023
            return pick(scores, None if temperature == 0 else own), scores

        given = WalkNoise() if temperature == 0 else WalkNoise(noise, torch.tensor(temperature, dtype=torch.float64))
        found = read_walk(walk(logits, tree.tokens, tree.parents, tree.mask, given))
        assert found == verify(tree, logits, picker)[:2]
        lengths |= set(map(len, found[0]))
    assert lengths >= {1, 2, 3}


def test_the_walk_refuses_damaged_logits_where_it_goes_alone():
    tree = chain(torch.tensor([[1, 2, 3]]))
    logits = torch.zeros(1, 3, 5)
    logits[0, 0, 4] = 1  # leaves at the root
    logits[0, 2] = torch.nan
    assert read_walk(walk(logits, tree.tokens, tree.parents, tree.mask, WalkNoise())) == ([[0]], [[4]])
    logits[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="logits are NaN"):
        read_walk(walk(logits, tree.tokens, tree.parents, tree.mask, WalkNoise()))


def test_the_largest_score_is_the_first_of_equal_ones():
    best, places = largest(torch.tensor([[1.0, 4.0, 4.0], [float("nan"), 2.0, 3.0], [-torch.inf] * 3]))
    assert places.tolist() == [1, 3, 0]
    assert best[0] == 4
    assert not best[1:].isfinite().any()


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (16, 16), (17, 32)])
def test_buckets_are_powers_of_two(count, size):
    assert bucket(count) == size
    assert bucket(count * 256, 256) == size * 256


# -- compiled

_ROUTED = "how many tokens an expert gets is known only while it runs"
_MIXTURES = (
    *("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE", "GraniteMoE"),
    *("DeepSeek-V2 (MLA)", "DeepSeek-V3 (MLA)", "gpt-oss (attention sinks)"),
)
NOT_COMPILED = dict.fromkeys(_MIXTURES, _ROUTED)  # families, and what stands against it


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def small() -> Any:
    return tiny_model(num_hidden_layers=1, dtype=torch.float32)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
def test_compiled_is_lossless_and_compiles_nothing_twice(small, folder, temperature):
    target = buffered(small, "inductor", folder)
    drafter = made("medusa", target, heads=3, rank=4).eval()
    options = Options(60, Sampling(temperature), 5)
    counts = []
    for _ in range(2):
        plain = autoregressive(target, PROMPTS[2:3], options)
        fast = speculative(target, PROMPTS[2:3], options, drafter, 8)
        assert fast.token_ids == plain.token_ids
        assert fast.stats.passes < plain.stats.passes or temperature > 0
        engine = target.engine
        assert not engine.failed
        counts.append(len(engine.compiled))
    assert counts[0] == counts[1] >= 3
    assert plain.token_ids == autoregressive(Target(small), PROMPTS[2:3], options).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_drafter_compiled(row, tmp_path, temperature):
    """200 tokens of every drafter: those of plain decoding, and nothing is compiled in the second call."""
    target = buffered(tiny_model(num_hidden_layers=3, dtype=torch.float32), "inductor", tmp_path)
    drafter, options = built(row, target), Options(200, Sampling(temperature), 5)
    plain = autoregressive(target, PROMPTS[:2], options)
    for compiled in (True, False):
        fast = speculative(target, PROMPTS[:2], options, drafter, 8)
        assert fast.token_ids == plain.token_ids
        assert (fast.stats.compiled > 0) == compiled
    assert not target.engine.failed


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_family_compiled(name):
    """Every family is compiled whole, or a reason is told and it runs as it is; its tokens are plain decoding's."""
    target, options = buffered(build(name), "inductor"), Options(12, Sampling(1.0), seed=3)
    prompts = [[5, 9, 2, 7, 7, 1, 12, 40, 8], [8, 1, 30, 4, 17]]
    plain = autoregressive(target, prompts, options)
    drafter = RandomTrees([p + t for p, t in zip(prompts, plain.token_ids, strict=True)])
    assert speculative(target, prompts, options, drafter, 7).token_ids == plain.token_ids
    assert bool(target.engine.failed) == (name in NOT_COMPILED)


def test_another_process_reads_what_was_compiled(small, folder, capsys):
    """Another engine stands for it; a damaged file is compiled anew, an unwritable folder is told of once."""
    options = Options(5)
    wanted = autoregressive(buffered(small, "inductor", folder), PROMPTS[2:3], options).token_ids
    capsys.readouterr()
    again = Target(small, engine=Engine("inductor", folder))
    assert autoregressive(again, PROMPTS[2:3], options).token_ids == wanted
    assert again.engine.made
    assert {how for _, _, how in again.engine.made} == {"read"}
    assert not capsys.readouterr().err


def test_a_damaged_file_is_compiled_anew(folder, tmp_path, capsys):
    x = torch.arange(6.0).reshape(2, 3)
    assert Engine("inductor", tmp_path).run(_twice, x).tolist() == (x * 2).tolist()
    (file,) = tmp_path.glob("*.bin")
    file.write_bytes(b"no code")
    capsys.readouterr()
    assert Engine("inductor", tmp_path).run(_twice, x).tolist() == (x * 2).tolist()
    assert f"compiled anew, since {file} can not be read" in capsys.readouterr().err
    blocked = tmp_path / "file"
    blocked.write_text("")
    engine = Engine("inductor", blocked / "below")
    assert engine.run(_twice, x).tolist() == (x * 2).tolist()
    assert engine.run(_twice, x[:1]).tolist() == (x[:1] * 2).tolist()
    assert capsys.readouterr().err.count("compiled code is not kept") == 1


def test_names_of_compiled_code_are_the_same_in_every_process(small):
    """Of functions, modules and tensors; and others where the attention runs another kernel."""
    other = tiny_model(num_hidden_layers=1, dtype=torch.float32)
    other.config._attn_implementation = "eager"
    assert structure(other) != structure(small)
    program = """
import torch, functools
from selfspec.engine.keys import file_name
from selfspec.drafters.parts.unrolled import layers_tree
args = layers_tree, torch.nn.Linear(2, 2), [torch.ones(3)], {"x": (1, None)}, functools.partial(max, 1)
name = file_name(layers_tree, args, "inductor")
"""
    here: dict[str, Any] = {}
    exec(program, here)
    there = subprocess.run(
        [sys.executable, "-c", f"{program}\nprint(name)"], capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == str(here["name"])
    refused("can not be found again on disk", fit._described, object(), error=TypeError)


def test_compiled_functions_of_gone_modules_are_dropped():
    engine, x = Engine("eager", quiet=True), torch.ones(1, 4)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    for module in (first, second):
        engine.run(_applied, module, x)
    engine.forget([first])
    assert len(engine.compiled) == 1
    engine.run(_applied, second, x)
    assert len(engine.made) == 2


def test_a_cast_after_compiling_is_refused_or_seen():
    """A layer cast in place keeps its parameters, but not what was compiled for them."""
    target = buffered(tiny_model(num_hidden_layers=2, dtype=torch.float32), "eager")
    autoregressive(target, PROMPTS[:1], Options(4))
    target.model.model.norm.bfloat16()
    found = autoregressive(target, PROMPTS[:1], Options(12)).token_ids
    assert found == autoregressive(Target(target.model), PROMPTS[:1], Options(12)).token_ids


def test_a_failure_without_a_text_is_told(monkeypatch):
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(torch, "compile", broken)
    engine = Engine("inductor", quiet=True)
    assert engine.run(_twice, torch.ones(1)).tolist() == [2.0]
    assert list(engine.failed.values()) == ["AssertionError: AssertionError()"]


def test_a_torch_whose_inductor_has_other_names_compiles_nothing(monkeypatch, tmp_path, capsys):
    for name in ("lowering", "graph_pass"):
        monkeypatch.setitem(sys.modules, f"selfspec.engine.kernels.{name}", None)
        monkeypatch.delattr(selfspec.engine.kernels, name, raising=False)
    fit._machine.cache_clear()
    engine = Engine("inductor", tmp_path)
    assert engine.run(_twice, torch.ones(1)).tolist() == [2.0]
    assert [reason.partition(":")[0] for reason in engine.failed.values()] == ["ModuleNotFoundError"]
    assert not engine.row_invariant("_twice")
    assert "compiled code is not kept" in capsys.readouterr().err


def test_code_of_another_torch_has_another_name(tmp_path, monkeypatch):
    fit._machine.cache_clear()
    Engine("inductor", tmp_path, quiet=True).run(_twice, torch.ones(1))
    monkeypatch.setattr(torch, "__version__", "9.9")
    fit._machine.cache_clear()
    Engine("inductor", tmp_path, quiet=True).run(_twice, torch.ones(1))
    fit._machine.cache_clear()
    assert len(list(tmp_path.glob("*.bin"))) == 2


def test_what_was_not_used_for_longest_makes_room(tmp_path, monkeypatch):
    for age, name in enumerate("abc"):
        (tmp_path / f"{name}.bin").write_bytes(bytes(100))
        os.utime(tmp_path / f"{name}.bin", (1000 - age, 1000 - age))
    Engine("inductor", tmp_path, quiet=True).run(_twice, torch.ones(1))
    size = sum(p.stat().st_size for p in tmp_path.glob("*.bin")) - 300
    monkeypatch.setattr(disk, "DISK", size + 250)
    disk._trim(tmp_path)
    assert {p.stem for p in tmp_path.glob("?.bin")} == {"a", "b"}


def _twice(x: Tensor) -> Tensor:
    return x * 2


def _applied(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = module(x)
    return result


def test_weights_are_inputs_of_compiled_code():
    engine, x = Engine("inductor", quiet=True), torch.randn(2, 4)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        for module in (first, second):
            torch.testing.assert_close(engine.run(_applied, module, x), module(x))
        first.weight.mul_(3)
        torch.testing.assert_close(engine.run(_applied, first, x), first(x))
        first.weight = nn.Parameter(torch.randn(4, 4))
        torch.testing.assert_close(engine.run(_applied, first, x), first(x))
    assert len(engine.compiled) == 2


@pytest.mark.slow
def test_compiled_noise_is_the_noise():
    rows = [3, 3, 2**63 + 5], [0, 1, 2], 500, torch.device("cpu")
    noise, fast = Noise(*rows), Noise(*rows, Engine("inductor", quiet=True))
    for positions, count in (([7, 9, 1], 4), ([9, 9, 2], 3)):
        torch.testing.assert_close(fast.ahead(positions, count), noise.ahead(positions, count), rtol=1e-13, atol=1e-13)
    for each in (noise, fast):
        each.select([2])
    torch.testing.assert_close(fast.ahead([40], 2), noise.ahead([40], 2), rtol=1e-13, atol=1e-13)


def test_what_can_not_be_compiled_runs_as_it_is_and_says_so(capsys):
    def forked(x: Tensor) -> Tensor:
        return x + 1 if float(x.sum()) > 0 else x - 1

    engine = Engine("inductor")
    assert engine.run(forked, torch.ones(2)).tolist() == [2.0, 2.0]
    assert engine.run(forked, -torch.ones(2)).tolist() == [-2.0, -2.0]
    (reason,) = engine.failed.values()
    assert "not compiled, runs as it is: forked [2]" in capsys.readouterr().err
    assert reason


def test_code_is_told_apart_by_what_its_modules_run(monkeypatch):
    """A class may run another function than its source says; attributes of any kind take part."""
    model = tiny_model()
    before, mlp = structure(model), model.model.layers[0].mlp
    for held in (None, torch.relu, torch.neg, lambda x: x + 1, lambda x: x + 2, {"a": 1}, {"a": 2}, torch.ones(2)):
        mlp.held = held
        assert structure(model) != before
        before = structure(model)
    before = structure(model)
    monkeypatch.setattr(type(mlp), "forward", lambda self, x: self.down_proj(x))
    assert structure(model) != before


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_what_follows_its_user_is_not_compiled(how, capsys):
    """A hook may do another thing in every call, and compiled code would repeat the first."""
    model, calls = tiny_model(num_hidden_layers=2), list[int]()
    target, mlp = buffered(model, "inductor"), model.model.layers[0].mlp
    if how == "hook":
        mlp.register_forward_hook(lambda *_: calls.append(1))
    else:
        stock = mlp.forward
        mlp.forward = lambda x: calls.append(1) or stock(x)
    autoregressive(target, PROMPTS[:1], Options(6))
    calls.clear()
    autoregressive(target, PROMPTS[:1], Options(6))
    assert len(calls) == 7  # the prompt's pass too
    assert "LlamaMLP has a hook or a forward of its own" in capsys.readouterr().err
    assert not target.engine.row_invariant("tree_pass_alone")


def test_what_a_killed_process_left_in_torchs_cache_is_removed(tmp_path, monkeypatch):
    """Every later process would run that function as it is."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    for place, gone in (("torch", True), ("elsewhere", False)):
        path = tmp_path / place / "x.main.so"
        path.parent.mkdir(exist_ok=True)
        path.touch()
        with pytest.raises(ImportError) as error:
            load_module(path)
        assert disk.mended(RuntimeError(f"ImportError: {error.value}")) == gone
        assert path.exists() != gone
    assert not disk.mended(RuntimeError("ImportError: no such file"))


def load_module(path: Path) -> None:
    """What loading a module from such a file raises."""
    loader = ExtensionFileLoader("x", str(path))
    module_from_spec(spec_from_loader("x", loader))  # type: ignore[arg-type]


def test_structure_tells_modules_apart():
    a, b = tiny_model(), tiny_model()
    assert structure(a) == structure(b)
    small = [Int8Linear(nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)) for _ in range(2)]
    assert structure(small[0]) == structure(small[1])  # wherever they lie
    masks = [made("mask", Target(model), masks=2, rank=2).eval() for model in (a, b)]
    for drafter in masks:
        drafter.gated.behind(1, [0, 1])
    assert structure(masks[0]) == structure(masks[1])
    assert structure(tiny_model(rms_norm_eps=1e-3)) != structure(a)
    assert structure(tiny_model(num_hidden_layers=2)) != structure(a)
    target = Target(a)
    assert structure(target.part(0, 3, (1,)).module) != structure(target.part(0, 3, (0,)).module)


@pytest.mark.parametrize("name", ["fast", "", None])
def test_unknown_engines_are_named(name):
    refused("must be one of auto, eager, compiled", engine_for, name, torch.device("cpu"))


def test_threads_that_sleep_are_named(monkeypatch, capsys):
    for policy, threads, said in (("active", 2, 0), ("passive", 1, 0), ("PASSIVE", 2, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        choose._say_sleeping.cache_clear()
        for _ in range(2):
            engine_for("compiled", torch.device("cpu"))
        assert capsys.readouterr().err.count("threads sleep") == said, policy
    choose._say_sleeping.cache_clear()


def test_without_a_compiler_the_package_to_install_is_named(monkeypatch, request, capsys):
    from torch._inductor import config as inductor_config
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    has_compiler.cache_clear()
    request.addfinalizer(has_compiler.cache_clear)
    refused(r"needs a C\+\+ compiler.*g\+\+.*engine=eager", engine_for, "compiled", torch.device("cpu"))
    refused("serves CPUs and CUDA devices", engine_for, "compiled", torch.device("meta"))
    monkeypatch.delenv("SELFSPEC_ENGINE")
    assert engine_for("auto", torch.device("cpu")).name == "eager"
    assert "passes run eagerly: engine=compiled needs a C++ compiler" in capsys.readouterr().err
    # Nothing else asks torch for vectors or tiles, which would end a pass on a GPU, or loading, with its error
    monkeypatch.setattr(native, "has_avx512", lambda: True)
    monkeypatch.setattr(native, "_kernel_path", lambda source: Path("none"))
    for name in ("_is_amx_tile_supported", "_init_amx"):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    assert not native.has_tiles.__wrapped__()
    with inductor_config.patch({"cpp.vec_isa_ok": None}):
        native.trust_known_vectors.__wrapped__()


def test_auto_compiles_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.setattr(choose, "_check_compiling", lambda device: None)
    assert engine_for("auto", torch.device("cpu")).name == "eager"  # the environment of these tests says so
    monkeypatch.delenv("SELFSPEC_ENGINE")
    auto, asked = (engine_for(name, torch.device("cpu")) for name in ("auto", "compiled"))
    assert (auto.name, auto.later, asked.later) == ("compiled", LATER, 0)  # who asks gets it at once
    monkeypatch.setenv("SELFSPEC_ENGINE", "compiled")
    assert engine_for("auto", torch.device("cpu")).later == 0
    monkeypatch.setenv("SELFSPEC_ENGINE", "fast")
    refused("SELFSPEC_ENGINE='fast' in the environment must be one of", engine_for, "auto", torch.device("cpu"))
    monkeypatch.setenv("SELFSPEC_ENGINE", "")
    assert engine_for("auto", torch.device("cpu")).name == "compiled"


def test_a_run_keeps_the_name_of_the_engine_that_it_had():
    config = compose_config("eval", "drafter=prompt_lookup", "target=tiny-target")
    assert config.engine == "auto"
    _loaded(typed(EvalRun, config), config)
    assert config.engine == "eager"


class Doubling(nn.Module):
    """A layer that can be compiled once for all, or, where it notes what it does, can not."""

    def __init__(self, notes: list[int] | None) -> None:
        super().__init__()
        self.weight, self.notes = nn.Parameter(torch.randn(8, 8)), notes

    def forward(self, x: Tensor) -> Tensor:
        if self.notes is not None:
            self.notes.append(1)
        return torch.tanh(x @ self.weight)


def _through(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("noting", [False, True])
def test_layers_of_one_class_are_compiled_once_and_as_they_are_where_they_can_not(noting):
    """Each with its own weights; nothing is left behind on the layers."""
    notes: list[int] | None = [] if noting else None
    layers = nn.ModuleList([Doubling(notes) for _ in range(5)])
    engine, x = Engine("inductor", quiet=True), torch.randn(3, 8)
    with torch.no_grad():
        found = engine.run(_through, layers, x)
        torch.testing.assert_close(found, _through(layers, x))
    assert not engine.failed
    assert all("forward" not in vars(layer) for layer in layers)
    with compiled_once([layers]) as nested:
        assert nested
        assert all("forward" in vars(layer) for layer in layers)
    with compiled_once([layers[:3]]) as nested:
        assert not nested


@pytest.mark.slow
def test_compile_prepares_what_decoding_needs(heads_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    terminal.compile(["--drafter", str(heads_folder), "--nodes", "4", "--temperatures", "0"])
    assert "kept in" in capsys.readouterr().out
    spec = selfspec.load(str(heads_folder), engine="compiled")
    spec.generate([[5, 6, 7, 8]], 12, nodes=4)
    assert {how for _, _, how in spec.target.engine.made} == {"read"}


def test_calls_run_uncompiled_while_a_thread_compiles(monkeypatch):
    """The first texts come at once, and are those of compiled passes; what is compiled does not see later changes."""
    go, begun, compile_now = threading.Event(), threading.Event(), Engine._compile

    def slow(self: Engine, *args: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return compile_now(self, *args)

    monkeypatch.setattr(Engine, "_compile", slow)
    engine, x, lists = Engine("eager", quiet=True, later=1e-9), torch.ones(2), [torch.ones(2)]

    def added(x: Tensor, lists: list[Tensor]) -> Tensor:
        return x + lists[0]

    with torch.inference_mode():
        for _ in range(3):
            assert engine.run(added, x, lists).tolist() == [2, 2]
        assert begun.wait(60)
        assert (engine.waited, engine.made) == (3, [])
        monkeypatch.setattr(Engine, "_on_disk", lambda *_: True)  # to be read by who has the lock, which the thread has
        assert engine.run(added, torch.ones(3), [torch.ones(3)]).tolist() == [2, 2, 2]
        lists[0] = torch.ones(3)  # of another shape, as a cache that grew
        go.set()
        engine._worker.join(60)
        assert engine.run(added, x, [torch.ones(2)]).tolist() == [2, 2]
    assert ([how for _, _, how in engine.made], engine.waited, engine.failed) == (["compiled"], 4, {})
    with engine.at_once():  # what is timed is compiled
        engine.run(added, torch.ones(5), [torch.ones(5)])
    assert (len(engine.made), engine.waited, engine.later) == (2, 4, 1e-9)


def test_a_text_that_began_before_its_passes_were_compiled_is_exact_up_to_rounding():
    """In bfloat16 compiled passes have other bits than those that ran before, so the plain text of a later call may
    differ; once all passes of a call are compiled, it is exact by construction again."""
    target = Target(tiny_model(dtype=torch.bfloat16), engine=Engine("eager", quiet=True, later=1e9))
    assert autoregressive(target, [[5, 6, 7]], Options(4)).stats.exact == ROUNDED
    assert target.exact == ROUNDED
    kernels = not target.engine.varying  # where there are any, it is compiling alone that is waited for
    assert ("until passes are compiled (engine=eager: by construction)" in target.exactness) == kernels
    target.engine.made.append(("tree_pass_alone", 1.0, "compiled"))
    target.engine.varying.clear()
    assert target.exact == EXACT
    assert autoregressive(target, [[5, 6, 7]], Options(4)).stats.exact == ROUNDED  # its passes still wait
    exact = Target(tiny_model(dtype=torch.float32), engine=Engine("eager", quiet=True, later=1e9))
    assert autoregressive(exact, [[5, 6, 7]], Options(4)).stats.exact == TESTED


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_that_was_forked_while_a_thread_compiled_ends():
    """Its parent's thread is not there, and holds no lock."""
    engine = Engine("eager", quiet=True, later=1e-9)
    with engine._lock, engine._starting:
        engine._worker = threading.current_thread()
        pid = os.fork()
        if not pid:
            free = engine._lock.acquire(timeout=1) and engine._starting.acquire(timeout=1)
            os._exit(0 if free and engine._worker is None else 1)
    engine._worker = None
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_draft_that_ran_uncompiled_below_a_pass_is_not_exact_by_construction(monkeypatch):
    target = Target(tiny_model(dtype=torch.bfloat16), engine=Engine("eager", quiet=True))
    drafter, options = made("early_exit", target, rank=0).eval(), Options(6)
    speculative(target, PROMPTS[:1], options, drafter, 2)
    monkeypatch.setattr(type(target.engine), "row_invariant", lambda self, function: True)
    assert speculative(target, PROMPTS[:1], options, drafter, 2).stats.exact == EXACT
    monkeypatch.setattr(type(target.engine), "row_invariant", lambda self, function: function != "_grown")
    assert speculative(target, PROMPTS[:1], options, drafter, 2).stats.exact == ROUNDED
    assert autoregressive(target, PROMPTS[:1], options).stats.exact == EXACT


def test_what_a_thread_can_not_compile_runs_as_it_is(monkeypatch):
    def broken(*_: Any) -> Any:
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(Engine, "_make", broken)
    engine = Engine("eager", quiet=True, later=1e-9)
    for _ in range(2):
        engine.run(_twice, torch.ones(1))
    engine._worker.join(60)
    assert engine.run(_twice, torch.ones(1)).tolist() == [2]
    assert engine.failed == {"_twice": "RuntimeError: the disk is gone"}
