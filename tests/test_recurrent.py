"""Layers that keep a state: trees over them against transformers' own steps, and what drafts on them."""

import copy
import inspect
import random
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from conftest import TORCH_ROUNDS, RandomTrees, made, random_drafter, randomize, refused
from families import FAMILIES, RECURRENT, VOCAB, build
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from selfspec.core import support
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options, Seen
from selfspec.core.recurrent import mamba1, mixers
from selfspec.core.sampling import Sampling
from selfspec.core.support import cache_name
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.drafters.base import Drafter
from selfspec.drafters.hybrid import Hybrid
from selfspec.engine.engine import Engine

KINDS = ["Qwen3.5", "Kimi Linear (MLA)", "Falcon-H1", "LFM2", "Jamba"]  # one of each mixer
BOUND = {"Bailing-hybrid": 1e-6, "Lara-mini": 1e-5}  # their gates compute in float32
PROMPTS = [[5, 9, 2, 7, 7, 1, 12, 40, 8], [8, 1, 30, 4, 17], [3], [11, 12, 13, 11, 12, 13, 11]]
_KERNELS = ("chunk", "recurrent", "scan", "selective", "conv1d", "delta")


@pytest.fixture
def judge() -> Iterator[Any]:
    """Builds a model whose module computes its recurrences in float64: transformers casts them to float32."""
    with pytest.MonkeyPatch.context() as patch:
        mixers._over_trees.cache_clear()  # what is bound anew is the judged code
        mixers._forward.cache_clear()

        def exact(name: str, scale: float) -> PreTrainedModel:
            # A router of experts computes in float32, in which two equal numbers may round apart.
            dense = (
                {"mlp_layer_types": ["dense", "dense"]}
                if FAMILIES[name][0] in ("kimi_linear", "bailing_hybrid")
                else {}
            )
            model = build(name, max_position_embeddings=2048, **dense)
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if "A_log" in key:
                        parameter += scale  # states that decay fast
            module = sys.modules[type(model).__module__]
            for key, found in list(vars(module).items()):
                plain = inspect.unwrap(found) if inspect.isfunction(found) else None
                if plain is None or plain.__module__ != module.__name__ or key.startswith("create"):
                    continue
                if any(part in key for part in _KERNELS):
                    source = inspect.getsource(plain)
                    source = source[source.index("def ") :].replace("torch.float32", "torch.float64")
                    scope = dict(vars(module))
                    exec(source.replace(".float()", ".double()"), scope)
                    patch.setattr(module, key, scope[plain.__name__])
            for kind in {type(part) for part in model.modules()}:
                plain = inspect.unwrap(kind.forward)
                if "update_recurrent_state" in getattr(getattr(plain, "__code__", None), "co_names", ()):
                    source = textwrap.dedent(inspect.getsource(plain))
                    scope = vars(module)
                    made: dict[str, Any] = {}
                    exec(source[source.index("def ") :].replace("torch.float32", "torch.float64"), scope, made)
                    patch.setattr(kind, "forward", made["forward"])
            return model

        yield exact
    mixers._over_trees.cache_clear()
    mixers._forward.cache_clear()


class Stepped:
    """A text by transformers alone, one token a pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.cache, self.count = model, DynamicCache(config=model.config), 0
        self.takes = "position_ids" in inspect.signature(model.get_decoder().forward).parameters

    def read(self, tokens: list[int]) -> Tensor:
        """Logits [V] behind the last of these tokens, which the text goes on with."""
        logits = torch.empty(0)
        for token in tokens:
            positions = {"position_ids": torch.tensor([[self.count]])} if self.takes else {}
            cache = {cache_name(self.model): self.cache}
            ids, self.count = torch.tensor([[token]]), self.count + 1
            logits = self.model(input_ids=ids, use_cache=True, **cache, **positions).logits[0, -1]
        return logits

    def beyond(self, tokens: list[int]) -> Tensor:
        """The same, but the text stays as it is."""
        ahead = Stepped(self.model)
        ahead.cache, ahead.count = copy.deepcopy(self.cache), self.count
        return ahead.read(tokens)


@torch.inference_mode()
def compare(model: PreTrainedModel, trees: int, checked: int, commits: int = 0) -> float:
    """The largest difference of a node's logits from step-by-step decoding along its path, over random trees that
    each go on from an accepted path."""
    target, rng, own = Target(model), random.Random(0), Stepped(model)
    text = [rng.randrange(VOCAB) for _ in range(9)]
    own.read(text)
    cache, worst = target.cache(1, 64), 0.0
    target.forward(chain(torch.tensor([text])), cache, False, prompt=True)
    cache.commit([list(range(len(text)))])
    for each in range(commits + trees):
        nodes = rng.choice([1, 2, 5, 12, 20])
        parents = [-1, *(rng.randrange(max(0, i - 5), i) for i in range(1, nodes))]
        tree = DraftTree(torch.tensor([[rng.randrange(VOCAB) for _ in range(nodes)]]), torch.tensor([parents]))
        logits = target.forward(tree, cache).logits
        picked = [0, *rng.sample(range(1, nodes), min(checked, nodes - 1))]
        paths = {node: tree.mask[0, node].nonzero()[:, 0].tolist() for node in picked}
        if each >= commits:
            for node, path in paths.items():
                wanted = own.beyond(tree.tokens[0, path].tolist())
                worst = max(worst, float((wanted - logits[0, node]).abs().max()))
        taken = max(paths.values(), key=len)
        cache.commit([taken])
        own.read(tree.tokens[0, taken].tolist())
    return worst


@pytest.mark.parametrize(("name", "scale"), [*((name, 0.0) for name in RECURRENT), *((name, 3.0) for name in KINDS)])
def test_nodes_are_step_by_step_decoding(name, scale, judge):
    """The larger scale is a fast decay."""
    assert compare(judge(name, scale), trees=3, checked=2) < BOUND.get(name, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_nodes_of_many_trees_and_after_many_commits(name, judge):
    assert compare(judge(name, 0.0), trees=50, checked=30, commits=200) < BOUND.get(name, 1e-9)


def drafters(target: Target) -> dict[str, Any]:
    """One drafter of every kind, random."""
    kinds: dict[str, Drafter] = {
        "medusa": made("medusa", target, heads=3, rank=4),
        "sequential": made("sequential", target, heads=2, rank=2),
        "early_exit": made("early_exit", target, exit=1, rank=2, min_prob=0.0),
        "feature": made("feature", target, train="lora", rank=2, depth=3, unroll=2, min_prob=0.0),
        "eagle3": made("eagle3", target, depth=3, unroll=2, min_prob=0.0),
        "mask": made("mask", target, masks=2, rank=2),
    }
    for drafter in kinds.values():
        randomize(drafter)
        drafter.eval()
    free = {"prompt_lookup": made("prompt_lookup", target), "lookahead": made("lookahead", target)}
    mixed = Hybrid(target, {"medusa": kinds["medusa"], "prompt_lookup": free["prompt_lookup"]})
    masked = Hybrid(target, {"mask": kinds["mask"], "prompt_lookup": free["prompt_lookup"]})
    return {**kinds, **free, "mixed": mixed, "masked": masked}


@pytest.mark.parametrize(("rows", "temperatures"), [(1, (0.0,)), (4, (1.0,))])
@pytest.mark.parametrize("name", KINDS)
def test_every_drafter_gives_plain_text(name, rows, temperatures):
    target = Target(build(name, num_hidden_layers=4, **({} if "Falcon" in name else deeper(name))))
    kinds = drafters(target)
    for temperature in temperatures:
        options = Options(12, Sampling(temperature), seed=5)
        plain = autoregressive(target, PROMPTS[:rows], options)
        for kind, drafter in kinds.items():
            fast = speculative(target, PROMPTS[:rows], options, drafter, 12)
            assert fast.token_ids == plain.token_ids, kind
        oracle = RandomTrees([p + t for p, t in zip(PROMPTS[:rows], plain.token_ids, strict=True)])
        fast = speculative(target, PROMPTS[:rows], options, oracle, 12)
        assert fast.token_ids == plain.token_ids
        assert fast.stats.passes < plain.stats.passes


def deeper(name: str) -> dict[str, Any]:
    kinds = FAMILIES[name][1].get("layer_types")
    return {"layer_types": kinds * 2} if kinds else {}


@pytest.mark.parametrize("name", KINDS)
def test_documents_of_a_row_are_as_if_alone(name):
    """Several documents in one row of training: none sees the state of the one before."""
    target = Target(build(name))
    parts = [torch.randint(1, VOCAB, (1, n), generator=torch.Generator().manual_seed(n)) for n in (7, 90, 5)]
    documents = torch.cat([torch.full_like(part, i) for i, part in enumerate(parts)], 1)
    whole = target.text(torch.cat(parts, 1), documents=documents).logits
    alone = torch.cat([target.text(part).logits for part in parts], 1)
    torch.testing.assert_close(whole, alone, atol=2e-4, rtol=0.05)  # transformers computes in float32


@pytest.mark.parametrize("name", KINDS)
def test_prompts_longer_than_a_piece_are_one_text(name):
    target = Target(build(name, max_position_embeddings=512))
    text = torch.randint(1, VOCAB, (2, 200), generator=torch.Generator().manual_seed(0))
    cache = target.cache(2, 64)
    for start in (0, 150):  # rows of two lengths: the second keeps less of the first piece
        target.forward(chain(text[:, start : start + 150]), cache, False, prompt=True)
        cache.commit([list(range(len(text[0, start : start + 150])))] * 2)
    logits = target.forward(chain(text[:, :1]), cache).logits
    wanted = target.text(torch.cat([text, text[:, :1]], 1)).logits
    torch.testing.assert_close(logits[:, 0], wanted[:, -1], atol=2e-4, rtol=0.05)


@pytest.mark.parametrize(
    "backend", [pytest.param("aot_eager", marks=TORCH_ROUNDS), pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["Qwen3.5", *(pytest.param(k, marks=pytest.mark.slow) for k in ("Falcon-H1", "LFM2"))])
@pytest.mark.parametrize("drafts", ["exits", pytest.param("heads", marks=pytest.mark.slow)])
def test_compiled_text_is_eager_text(name, backend, drafts):
    target = Target(build(name, dtype=torch.float32))
    options, prompts = Options(12, Sampling(1.0), seed=5), PROMPTS[: 2 if drafts == "heads" else 1]
    plain = autoregressive(target, prompts, options).token_ids
    target.engine = Engine(backend, quiet=True)
    if drafts == "heads":
        drafter = made("medusa", target, heads=2, rank=2)
    else:
        drafter = made("early_exit", target, exit=1, rank=2, min_prob=0.0)
    randomize(drafter)
    nodes = 2 if backend == "aot_eager" else 4  # every depth is compiled
    result = speculative(target, prompts, options, drafter.eval(), nodes)
    assert result.token_ids == plain
    assert not target.engine.failed
    assert result.stats.exact == "in every test"


def test_a_scan_is_traced_whole():
    target = Target(build("Mamba", dtype=torch.float32))
    plain = autoregressive(target, PROMPTS[:1], Options(3)).token_ids
    target.engine = Engine("eager", quiet=True)
    assert autoregressive(target, PROMPTS[:1], Options(3)).token_ids == plain
    assert not target.engine.failed
    assert getattr(mamba1.pending, "scans", None) is None  # it holds the call's cache


def test_rows_end_and_move():
    """Rows that end at different times leave the states of the others as they are."""
    target = Target(build("Qwen3.5"))
    options = Options(30, Sampling(1.0), seed=2, eos=frozenset(range(0, 61, 9)))
    plain = [autoregressive(target, [p], Options(30, Sampling(1.0), seed=[2], eos=options.eos)) for p in PROMPTS]
    oracle = RandomTrees([p + t.token_ids[0] for p, t in zip(PROMPTS, plain, strict=True)])
    rows = speculative(target, PROMPTS, Options(30, Sampling(1.0), seed=[2] * 4, eos=options.eos), oracle, 8)
    assert rows.token_ids == [t.token_ids[0] for t in plain]
    assert len({len(row) for row in rows.token_ids}) > 2


@pytest.mark.parametrize("name", ["Qwen3.5", "Falcon-H1", "Jamba"])
def test_documents_under_autocast(name):
    """Training runs the target under autocast; sums of decays must not be rounded to bfloat16."""
    target = Target(build(name, dtype=torch.float32, max_position_embeddings=512))
    tokens = torch.randint(1, VOCAB, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        plain = target.text(tokens).logits
        packed = target.text(tokens, documents=torch.zeros_like(tokens)).logits
    assert float((plain - packed).norm() / (plain - plain.mean()).norm()) < 0.05


def test_a_draft_layer_with_a_state_moves_on():
    """The feature head's own layer is Mamba2's: its state follows what was accepted, as its training expects."""
    target = Target(build("Mamba2"))
    head = random_drafter("feature", target, train="lora", rank=2, depth=3, unroll=2, min_prob=0.0)
    head.eval()
    first = PROMPTS[0] + autoregressive(target, PROMPTS[:1], Options(20, Sampling(0.0))).token_ids[0]
    drafts: list[list[int]] = []
    for prompt in (PROMPTS[0], first[: len(PROMPTS[0]) + 8]):  # the second call reads the same text at once
        seen: list[Seen] = []
        options = Options(len(first) - len(prompt), Sampling(0.0), watch=seen.append)
        speculative(target, [prompt], options, head, 6)
        drafts.append([*seen[-1].tree.tokens[0].tolist(), *seen[-1].positions])
    assert drafts[0] == drafts[1]


def test_older_transformers_are_named(monkeypatch):
    monkeypatch.setattr(support, "_VERSION", "5.16.1")
    refused(r"keep a state: they need transformers 5\.21, here is 5\.16\.1", Target, build(next(iter(RECURRENT))))


def test_a_forward_put_onto_a_layer_with_a_state_is_refused():
    """Trees run its mixers by other functions; in every later call, too."""
    target = Target(build("LFM2"))
    autoregressive(target, [[5, 9, 2]], Options(2))
    target.layers[0].forward = partial(target.layers[0].forward)
    for _ in range(2):
        refused("a state whose forward was replaced", autoregressive, target, [[5, 9, 2]], Options(2))
    refused("a state whose forward was replaced", Target, target.model)  # served by chains then


def test_a_class_of_layers_with_a_state_that_was_patched_is_refused(monkeypatch):
    target = Target(build("LFM2"))
    autoregressive(target, [[5, 9, 2]], Options(2))
    kind = type(next(mixers.mixers(target.model)))
    monkeypatch.setattr(kind, "forward", lambda self, *args, **given: None)
    refused("a state whose forward was replaced", autoregressive, target, [[5, 9, 2]], Options(2))
