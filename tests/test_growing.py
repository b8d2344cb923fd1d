"""Drafters that grow their trees from conditional scores: growth itself, and what each of them promises."""

import itertools
import json
import re
from typing import Any

import pytest
import torch
import yaml
from conftest import HIDDEN, VOCAB, Watch, made, random_drafter, refused, save_tiny, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, OlmoConfig

from selfspec.checkpoints.drafter_folder import adapters, load_drafter, save_drafter
from selfspec.checkpoints.load_target import load_target
from selfspec.checkpoints.weights_hash import weights_hash
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling, gumbel, noise_bits
from selfspec.core.target import Target
from selfspec.core.tree import chain
from selfspec.drafters import sequential as sequential_module
from selfspec.drafters.base import Drafter, Sample
from selfspec.drafters.eagle3 import Eagle3
from selfspec.drafters.early_exit import EarlyExit
from selfspec.drafters.feature import Feature
from selfspec.drafters.medusa import Medusa
from selfspec.drafters.mtp import Mtp
from selfspec.drafters.parts import expansion as growth_module
from selfspec.drafters.parts import static_tree as plan_module
from selfspec.drafters.parts.draft_layers import read as reading
from selfspec.drafters.parts.expansion import Growth, top
from selfspec.drafters.parts.static_tree import static_tree
from selfspec.drafters.parts.tree_function import expanded
from selfspec.drafters.parts.views import Tail
from selfspec.drafters.sequential import SequentialHeads
from selfspec.training.calibrate import _FACTORS, log_sums, measure_along

PROMPT = [5, 9, 2, 7, 7, 1, 4, 4]


# -- growth


@pytest.mark.parametrize("nodes", [2, 5, 9, 40])
def test_growth_finds_the_best_tree(nodes):
    g = torch.Generator().manual_seed(nodes)
    tables = [torch.randn(2, 4, generator=g) * 2 for _ in range(3)]  # the same below every parent
    growth = Growth(torch.tensor([11, 12]), nodes, width=10**6)
    for table in tables:
        growth.extend(table[:, None].expand(-1, growth.frontier.shape[1], -1))
    tree = growth.tree()
    assert tree.tokens[:, 0].tolist() == [11, 12]
    for row in range(2):
        chances = [table[row].softmax(-1) for table in tables]
        paths = [
            (float(torch.stack([chances[d][t] for d, t in enumerate(path)]).prod()), path)
            for depth in (1, 2, 3)
            for path in itertools.product(range(4), repeat=depth)
        ]
        best = sorted(paths, reverse=True)[: nodes - 1]
        found = set()
        for node in range(1, tree.tokens.shape[1]):
            path, at = [], node
            while at:
                path.append(int(tree.tokens[row, at]))
                at = int(tree.parents[row, at])
            found.add(tuple(path[::-1]))
        assert found == {path for _, path in best}
        assert float(tree.scores[row, 1:].sum()) == pytest.approx(sum(chance for chance, _ in best), rel=1e-3)


@pytest.mark.parametrize("size", [100, 1 << 13, 50_001])
@pytest.mark.parametrize("k", [1, 15, 64])
def test_the_largest_of_many_scores_are_those_of_topk(size, k):
    scores = torch.rand(2, 3, size, generator=torch.Generator().manual_seed(0))
    scores[0, 0, 7:] = -torch.inf  # fewer than k that are finite
    values, places = top(scores, k)
    expected = scores.topk(k, -1)
    assert int(places.max()) < size
    assert torch.equal(values, expected.values)
    assert torch.equal(scores.gather(-1, places), expected.values)
    assert torch.equal(places[1], expected.indices[1])


def test_reserved_nodes_stay_in_the_order_of_their_expansion():
    growth = Growth(torch.tensor([3]), 9, width=2, reserve=True)
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        growth.extend(torch.randn(1, growth.frontier.shape[1], 20, generator=g) * 3)
        if not growth.frontier.shape[1]:
            break
        stem = growth.stem()
    tree = growth.tree()
    expanded = growth.expanded.shape[1]
    assert tree.tokens.shape[1] == 9
    assert expanded > 2
    assert tree.tokens[0, :expanded].tolist() == stem.tokens[0, :expanded].tolist()
    assert tree.parents[0, :expanded].tolist() == stem.parents[0, :expanded].tolist()


@pytest.mark.parametrize("reserve", [False, True])
def test_a_budget_of_one_node_is_the_root_alone(reserve):
    tree = Growth(torch.tensor([5, 6]), nodes=1, width=4, reserve=reserve).tree()
    assert tree.tokens.tolist() == [[5], [6]]
    assert tree.parents.tolist() == [[-1], [-1]]


def test_a_certain_child_never_stands_without_its_parent():
    growth = Growth(torch.tensor([0]), 4, width=3)
    sure = torch.full((1, 1, 5), -1e4)
    sure[..., 2] = 0
    for _ in range(6):
        growth.extend(sure.expand(-1, growth.frontier.shape[1], -1))
    assert growth.tree().parents.tolist() == [[-1, 0, 1, 2]]


@pytest.mark.parametrize(("factor", "vocab"), [(0.5, 12), (1.0, 12), (2.0, 12), (1.0, 2000)])
def test_the_inverse_temperature_is_found_again(factor, vocab):
    """Where the text is a draw from softmax(factor * scores), that factor is what is measured; most draws may lie
    beyond the choices that are counted."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 3000, vocab, generator=g) * 2
    tokens = torch.zeros(3002, dtype=torch.long)
    tokens[2:] = torch.multinomial((factor * logits[0]).softmax(-1), 1, generator=g)[:, 0]
    sample = Sample(tokens, 2, torch.zeros(3002, 1), {}, 0.0, None)
    found, figures = measure_along([sample], 1, lambda _, at: logits[:, at])
    assert found.inverse_temperature[0] == pytest.approx(factor, rel=0.2)
    assert figures["top1"][0] == pytest.approx(found.acceptance[0][0])
    assert vocab > 12 or sum(found.acceptance[0]) == pytest.approx(1)


def test_sums_by_bins_are_those_of_all_scores():
    scores = 3 * torch.randn(5, 3000, generator=torch.Generator().manual_seed(0))
    scores[1, 20:], scores[2, 1] = -torch.inf, 40.0  # of a small draft vocabulary; a certain token
    exact = torch.stack([(scores * factor).logsumexp(1) for factor in _FACTORS], 1)
    torch.testing.assert_close(log_sums(scores), exact, atol=0.01, rtol=0)


def test_behind_a_prompt_of_one_token_nothing_is_measured_before_it():
    seen: list[int] = []
    sample = Sample(torch.arange(9), 1, torch.zeros(9, 1), {}, 0.0, None)
    measure_along([sample], 2, lambda _, at: (seen.extend(at.tolist()), torch.zeros(2, len(at), 10))[1])
    assert seen == [0, 1, 2, 3, 4, 5]


def test_scores_that_are_all_alike_are_right_for_one_token_alone():
    tokens = torch.arange(30) % 10
    sample = Sample(tokens, 2, torch.zeros(30, 1), {}, 0.0, None)
    _, figures = measure_along([sample], 1, lambda _, at: torch.zeros(1, len(at), 10))
    assert figures["top1"][0] == pytest.approx(0.1, abs=0.05)
    assert figures["tau"]["8"] < 2


# -- what is drafted in decoding is what was trained


@pytest.mark.parametrize("form", ["hydra", "markov"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sequential_scores_in_decoding_are_those_of_training(form, family):
    target = Target(tiny_model(family))
    drafter = random_drafter(SequentialHeads, target, heads=4, form=form, rank=4, correction=8).eval()
    tokens, hidden = torch.randint(VOCAB, (3, 4)), torch.randn(3, HIDDEN, dtype=torch.float64)
    ids = torch.stack([torch.randperm(VOCAB)[:9] for _ in range(3)])
    embedded = drafter.embed(tokens)
    with torch.no_grad():
        whole = drafter.train().along(hidden, embedded)
        drafter.eval()
        first, base = drafter(hidden, embedded[:, 0])
        torch.testing.assert_close(base[0], whole[0])
        for k in range(1, 4):
            path = embedded[:, None, 1 : k + 1].expand(-1, 2, -1, -1)
            (short,) = drafter(hidden, first, path, ids)
            torch.testing.assert_close(short, whole[k].gather(1, ids)[:, None].expand(-1, 2, -1))


def test_prefix_layer_in_decoding_is_that_of_training(llama, monkeypatch):
    """What the heads read at every root, against one pass over the text so far."""
    drafter = random_drafter(SequentialHeads, llama, heads=3, rank=4).eval()
    read = []

    def spied(*given: Any) -> Any:
        (root,) = reading(*given)
        read.append(root.hidden[:, 0].clone())
        return [root]

    monkeypatch.setattr(sequential_module, "read", spied)
    watch = Watch(drafter)
    speculative(llama, [PROMPT, PROMPT[:3]], Options(12), watch, 9)
    assert len(read) > 5
    for (texts, _), hidden in zip(watch.seen, read, strict=True):
        for row, text in enumerate(texts):
            tokens = torch.tensor([text])
            with torch.no_grad():
                seen = llama.text(tokens, reads=drafter.reads)
                wanted = drafter.read(tokens, seen.hidden, seen.features)[0, -1]
            torch.testing.assert_close(hidden[row], wanted)


def test_markov_reads_the_parent_alone_and_hydra_the_whole_path(llama):
    hidden, tokens = torch.randn(1, HIDDEN, dtype=torch.float64), torch.tensor([[3, 5, 7]])
    for form, reads in (("markov", [False, False, True]), ("hydra", [True, True, True])):
        drafter = random_drafter(SequentialHeads, llama, heads=3, form=form, rank=4, correction=8).eval()
        for place in range(3):
            other = tokens.clone()
            other[0, place] = 11
            last = drafter.along(hidden, drafter.embed(tokens))[2]
            assert torch.equal(drafter.along(hidden, drafter.embed(other))[2], last) != reads[place]


UNROLLED: dict[str, tuple[str, type[Drafter], dict[str, Any]]] = {
    "llama": ("llama", Feature, {"train": "full"}),
    "gpt2": ("gpt2", Feature, {"train": "full"}),
    "lora": ("qwen3", Feature, {"train": "lora", "rank": 4}),
    "modules_2": ("llama", Mtp, {"modules": 2, "unroll": 2}),
    "modules_3": ("qwen3", Mtp, {"modules": 3, "recycled": "pre"}),
}


@pytest.mark.parametrize("name", UNROLLED)
def test_scores_in_decoding_are_those_of_training(name, monkeypatch):
    """Every conditional score that grew a tree, against the unrolled pass over the same path as plain text."""
    family, kind, settings = UNROLLED[name]
    target = Target(tiny_model(family))
    drafter = random_drafter(kind, target, depth=4, width=2, min_prob=0.0, **settings).eval()
    watch, levels = Watch(drafter), []
    extend = Growth.extend

    def spy(growth: Growth, scores: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        levels.append((len(watch.seen), scores.clone(), growth.frontier, growth))
        extend(growth, scores, ids)

    monkeypatch.setattr(Growth, "extend", spy)
    speculative(target, [PROMPT[:2]], Options(14), watch, 9)  # shorter than there are modules
    assert len(levels) > 20
    for number, scores, frontier, growth in levels:
        text = watch.seen[number][0][0]
        depth = next(i for i, (_, s, *_) in enumerate(x for x in levels if x[0] == number) if s is scores)
        for m, node in enumerate(frontier[0].tolist()):
            path = []
            while node:
                path.append(int(growth.tokens[0, node]))
                node = int(growth.parents[0, node])
            tokens = torch.tensor([text + path[::-1] + [0]])
            with torch.no_grad():
                features = target.text(tokens, reads=drafter.reads).features
                wanted = drafter.unrolled(tokens, features, depth + 1)[depth][0, -2]
            torch.testing.assert_close(scores[0, m], wanted)


def test_unrolled_steps_see_no_feature_they_would_not_have(llama):
    drafter = random_drafter(Feature, llama, unroll=3).eval()
    tokens = torch.randint(VOCAB, (1, 12))
    with torch.no_grad():
        seen = llama.text(tokens, reads=drafter.reads).features
    changed = {layer: part.clone() for layer, part in seen.items()}
    for part in changed.values():
        part[:, 6:] += 1.0
    with torch.no_grad():
        before, after = drafter.unrolled(tokens, seen, 3), drafter.unrolled(tokens, changed, 3)
    for step in range(3):  # step s at t reads features up to t - s
        same = (before[step] == after[step]).all(-1)[0]
        assert same.tolist() == [t - step < 6 for t in range(11)]


# -- what the drafters keep between passes


@pytest.mark.parametrize(("kind", "shape"), [(EarlyExit, {"exit": 1}), (Feature, {}), (SequentialHeads, {"heads": 3})])
@pytest.mark.parametrize("rows", [1, 3])
def test_own_keys_and_values_are_those_of_verified_text(kind, shape, rows, llama):
    """After many passes the drafter's cache holds what one pass over the finished text would put there."""
    prompts = [PROMPT, PROMPT[:4], [9, 9, 1]][:rows]
    drafter = random_drafter(kind, llama, rank=4, width=2, min_prob=0.0, **shape).eval()
    watch = Watch(drafter)
    speculative(llama, prompts, Options(40), watch, 9)
    session: Any = watch.inner
    cache = session.cache if kind is EarlyExit else session.cache.caches[0]
    for place, text in enumerate(watch.seen[-1][0]):  # the rows of the last pass
        tokens = torch.tensor([text])
        out = llama.forward(chain(tokens), llama.cache(1, 80), reads=drafter.reads)
        length = cache.lengths[place]
        assert length > 25
        layer = {Feature: "layer", SequentialHeads: "prefix"}.get(kind)
        if layer is not None:
            own_layer = getattr(drafter, layer)
            tail, states = (
                own_layer.tail,
                own_layer.entry(own_layer.fused(own_layer.stacked(out.features))[:, :-1], tokens[:, 1:]),
            )
        else:
            tail, states = drafter.tail, out.features[0]
        with torch.inference_mode():
            own = tail.target.cache(1, 80)
            layers = tail.layer, tail.layer + 1
            tail.target.forward(chain(tokens[:, : states.shape[1]]), own, False, layers, states)
            own.commit([list(range(states.shape[1]))])
        for i in range(len(own.stores)):
            held, wanted = cache.stores[i][:, place, :, :length], own.stores[i][:, 0, :, :length]
            torch.testing.assert_close(held, wanted)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("nodes", [2, 5, 16])
def test_every_node_passes_every_layer_exactly_once(rows, nodes):
    target = Target(tiny_model(num_hidden_layers=5))
    drafter = random_drafter(EarlyExit, target, exit=2, rank=4, width=3, min_prob=0.0).eval()
    watch, passed = Watch(drafter), [0] * 5

    def count(layer: int, hidden: torch.Tensor) -> None:
        passed[layer] += hidden.shape[0] * hidden.shape[1]

    for i, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda m, a, out, i=i: count(i, out if isinstance(out, torch.Tensor) else out[0]))
    prompts = [PROMPT, PROMPT[::-1], [*PROMPT[2:], 1, 2]][:rows]
    options = Options(20, Sampling(1.0), 3)
    result = speculative(target, prompts, options, watch, nodes)
    drafted = sum(tree.tokens.numel() for _, tree in watch.seen)
    assert passed == [drafted + rows * (len(PROMPT) - 1)] * 5
    assert all(tree.start == 2 for _, tree in watch.seen)
    assert max(tree.tokens.shape[1] for _, tree in watch.seen) == nodes
    assert result.token_ids == autoregressive(target, prompts, options).token_ids


def test_drafting_ends_early_where_the_draft_is_unsure(llama):
    sizes = {}
    for least in (0.0, 0.999):
        watch = Watch(random_drafter(EarlyExit, llama, exit=1, rank=4, depth=4, width=2, min_prob=least).eval())
        speculative(llama, [PROMPT], Options(12), watch, 12)
        sizes[least] = max(int(tree.depth.max()) for _, tree in watch.seen)
    assert sizes[0.0] > sizes[0.999] == 1


def test_without_a_block_the_exit_is_the_targets_own_lens():
    """Rank 0: the final norm and lm_head read the exit's hidden state, and nothing is trained."""
    target = Target(tiny_model())
    drafter = made("early_exit", target, exit=2, rank=0).eval()
    tokens = torch.randint(VOCAB, (1, 6))
    hidden = target.text(tokens, reads=(1,)).features[1]
    norm = target.decoder.norm
    torch.testing.assert_close(drafter.along(hidden, tokens), target.lm_head(norm(hidden)))
    assert not drafter.trained()
    assert not adapters(drafter)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_tail_is_pefts_own_and_leaves_the_target_alone(family):
    target = Target(tiny_model(family))
    before = weights_hash(target.model)
    tail = Tail(target, 4, torch.float64, "exit", head=True)
    with torch.no_grad():
        for parameter in tail.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    tokens, hidden = torch.randint(VOCAB, (2, 7)), torch.randn(2, 7, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        slow = tail.train().text(hidden, tokens)
        merged = tail.eval().text(hidden, tokens)
        layers, cache = (tail.layer, tail.layer + 1), tail.target.cache(2, 7)
        stepped = tail.target.forward(chain(tokens), cache, True, layers, hidden, (tail.layer,))
    for other in (merged, stepped):
        torch.testing.assert_close(other.logits, slow.logits)
        torch.testing.assert_close(other.hidden, slow.hidden)
        torch.testing.assert_close(other.features, slow.features)
    assert not torch.allclose(slow.logits, target.model(tokens).logits)
    assert weights_hash(target.model) == before
    names = [name for name, _ in target.model.named_modules()]
    assert not any("lora" in name for name in names)


# -- a reduced draft vocabulary


@pytest.mark.parametrize("kind", [Feature, Medusa, SequentialHeads])
def test_few_tokens_are_drafted_and_all_are_emitted(kind, llama):
    drafter = random_drafter(kind, llama, draft_vocab=7).eval()
    drafter.drafts_only(torch.tensor([3, 60, 8, 41, 0, 22, 17]))
    drafter.eval()
    for temperature in (0.0, 1.0):
        watch, options = Watch(drafter), Options(30, Sampling(temperature), 2)
        result = speculative(llama, [PROMPT], options, watch, 9)
        assert result.token_ids == autoregressive(llama, [PROMPT], options).token_ids
        drafted = {token for _, tree in watch.seen for token in tree.tokens[0, 1:].tolist()}
        assert drafted <= {3, 60, 8, 41, 0, 22, 17}
        assert len(drafted) > 3


@pytest.mark.parametrize(
    ("ids", "message"), [([1, 2, 2], "it names 2"), ([1, 2, VOCAB], f"to {VOCAB}"), ([-1, 2, 3], "from -1")]
)
def test_a_broken_map_is_refused(ids, message, tmp_path):
    target = Target(tiny_model())
    drafter = random_drafter(Feature, target, draft_vocab=3).eval()
    save_drafter(drafter, tmp_path / "d", target, "tiny", None, "")
    path = tmp_path / "d" / "drafter.safetensors"
    state = load_file(path)
    save_file({**state, "vocabulary": torch.tensor(ids)}, path)
    meta = json.loads((tmp_path / "d" / "drafter.json").read_text())
    (tmp_path / "d" / "drafter.json").write_text(json.dumps({**meta, "files": {}}))
    refused(f"draft vocabulary must name 3 different tokens.*{message}", load_drafter, tmp_path / "d", target)


# -- training and loading


def test_drafters_trained_beside_a_cast_target_are_saved_as_the_target_was(tmp_path, tokenizer):
    folder = save_tiny(tmp_path / "half", tokenizer)
    load_target(folder)[0].model.to(torch.bfloat16).save_pretrained(folder)
    target, _ = load_target(folder, "float32")
    save_drafter(made("feature", target), tmp_path / "d", target, folder, tokenizer, "")
    assert {t.dtype for t in load_file(tmp_path / "d" / "drafter.safetensors").values()} == {torch.bfloat16}
    load_drafter(tmp_path / "d", load_target(folder)[0], tokenizer)


def test_a_target_of_one_layer_is_refused():
    target = Target(tiny_model(num_hidden_layers=1))
    for kind in (EarlyExit, Feature, SequentialHeads):
        refused("at least two", made, kind, target)
    made("sequential", target, prefix=False)


@pytest.mark.parametrize("kind", [Feature, Eagle3, Medusa, SequentialHeads])
def test_a_reduced_vocabulary_fits_a_bfloat16_target(kind):
    drafter = made(kind, Target(tiny_model(dtype=torch.bfloat16)), draft_vocab=20)
    assert drafter.vocabulary.shape == (20,)


def test_a_reduced_vocabulary_wants_plain_logits():
    with pytest.raises(ValueError, match="scales, caps or shifts its logits"):
        made("feature", Target(tiny_model("granite", logits_scaling=8.0)), draft_vocab=20)


TABLE = [[0.5, 0.2]] * 3
BROKEN = [
    {},
    {"greedy": 3},
    {"greedy": {"acceptance": TABLE}},
    {"greedy": {"acceptance": TABLE[:1], "inverse_temperature": [1.0] * 3}},
    {"greedy": {"acceptance": TABLE, "inverse_temperature": [1.0, float("nan"), 1.0]}},
    {"greedy": {"acceptance": [[0.5], [], [0.1]], "inverse_temperature": [1.0] * 3}},
]


@pytest.mark.parametrize("change", BROKEN)
def test_broken_calibrations_are_refused(change, tmp_path):
    target = Target(tiny_model())
    save_drafter(random_drafter(SequentialHeads, target, heads=3), tmp_path / "d", target, "tiny", None, "")
    path = tmp_path / "d" / "drafter.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "calibration": {"sampled": meta["calibration"]["sampled"], **change}}))
    refused("must hold numbers from 0 to 1,000,000 for each of 3 depths", load_drafter, tmp_path / "d", target)


# Of each kind settings that are named as they stand
NAMED = {
    "medusa": "heads=0 rank=0 blocks=0 projection=lo loss=mse depth_decay=0",
    "sequential": "heads=0 rank=-1 form=gru min_prob=1.0 loss=mse depth_decay=0 prefix=nope depth_decay=inf",
    "early_exit": "rank=-1 depth=0 min_prob=-0.1 loss=mse width=1.5 min_prob=null",
    "feature": f"train=some draft_vocab={VOCAB + 1} layers=[]",
    "eagle3": "head=mine fc_norm=maybe llama=null",
    "prompt_lookup": "longest=0 shortest=0 longest=2.5 choices=0 min_prob=1.0 min_prob=nan",
    "lookahead": "window=0 ngram=1 guesses=0 pool=0",
    "mask": "masks=0 rank=-1 passes=3 adapter=full loss=mse",
    "block": "size=65 predicts=last stack=0 confidence=yes",
}
SHAPES = [
    ("early_exit", {"exit": 0}, "drafter.exit=0 must be between 1 and"),
    ("early_exit", {"exit": 3}, "drafter.exit=3 must be between 1 and 2"),
    ("feature", {"layers": [0, 3]}, "no layer 3, only 0 to 2"),
    ("feature", {"layers": [-1]}, "no layer -1"),
    ("feature", {"layers": [1, 1]}, "each once"),
    ("feature", {"layers": [0.5]}, "0.5 must be an integer"),
    ("feature", {"layers": "x"}, "must be a list of layers"),
    ("feature", {"rank": -4, "train": "lora"}, "drafter.rank=-4"),
    ("feature", {"draft_vocab": 5, "loss": "ce"}, "needs the whole vocabulary"),
    ("medusa", {"draft_vocab": 5, "loss": "ce_tv"}, "loss='ce_tv' needs the whole vocabulary"),
    (
        "eagle3",
        {
            "llama": {
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                "max_position_embeddings": 16,
            }
        },
        "max_position_embeddings=16 with rope_type=dynamic",
    ),
    ("eagle3", {"draft_vocab": VOCAB + 1, "head": "own"}, f"drafter.draft_vocab={VOCAB + 1}"),
    ("eagle3", {"llama": {"num_heads": 2}}, r"drafter.llama has unknown keys \['num_heads'\]"),
    ("eagle3", {"draft_vocab": VOCAB}, "all of which are drafted with drafter.draft_vocab=null"),
    ("eagle3", {"llama": {"rope_parameters": {"rope_type": "x"}}}, "rope_type must be one of default"),
    ("eagle3", {"llama": {"head_dim": 7}}, "head_dim=7 must be even"),
    ("eagle3", {"llama": {"rms_norm_eps": -1.0}}, "rms_norm_eps=-1.0 must be a number above 0, below 1"),
    ("eagle3", {"llama": {"attention_bias": "no"}}, "attention_bias='no' must be true or false"),
    ("eagle3", {"llama": {"num_attention_heads": 3, "num_key_value_heads": 1}}, "makes no layer"),
    ("eagle3", {"layers": [[1]]}, "must be a list of layers"),
    ("eagle3", {"llama": {"head_dim": 0}}, "drafter.llama.head_dim=0"),
    ("eagle3", {"llama": {"num_attention_heads": 4, "num_key_value_heads": 3}}, "num_key_value_heads=3 must divide"),
    ("prompt_lookup", {"longest": 256}, "between 1 and 255: the target's context has 256"),
    (
        "prompt_lookup",
        {"shortest": 5, "longest": 3},
        "drafter.shortest=5 must be between 1 and 3: drafter.longest is 3",
    ),
    ("lookahead", {"ngram": 256}, "between 2 and 255: the target's context has 256"),
    ("mask", {"maps": []}, "drafter.maps is empty"),
    ("mask", {"maps": ["nothing"]}, "has a linear map nothing whose rows can be gated; there are down_proj, gate_proj"),
    ("block", {"size": 1, "predicts": "own"}, r"drafter\."),
    ("block", {"layers": [1, 1]}, "each once"),
    ("block", {"sliding": [0]}, r"drafter\."),
    ("block", {"sliding": [2], "window": 8}, r"drafter\."),
    ("block", {"sliding": [0], "window": 7}, r"drafter\."),
    ("block", {"causal": True, "sliding_causal": False}, r"drafter\."),
    ("block", {"correction_form": "rnn", "predicts": "own"}, r"drafter\."),
    ("block", {"correction": 0, "confidence": "parents"}, r"drafter\."),
]
SHAPES += [
    (kind, {(pair := setting.partition("="))[0]: yaml.safe_load(pair[2])}, "")
    for kind, settings in NAMED.items()
    for setting in settings.split()
]


@pytest.mark.parametrize(("kind", "shape", "message"), SHAPES)
def test_bad_shapes_are_refused(kind, shape, message, llama):
    (name, value), *_ = shape.items()
    refused(message or re.escape(f"drafter.{name}={value!r}"), made, kind, llama, **shape)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo", "cohere", "gpt2"])
def test_an_eagle3_layer_begins_as_the_last_of_the_target(family):
    """It reads the highest feature and is blind for the token after it; what a family lacks begins at random."""
    configs = {"gemma2": Gemma2Config, "olmo": OlmoConfig, "cohere": CohereConfig}
    if family in configs:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = configs[family](vocab_size=VOCAB, num_key_value_heads=2, head_dim=8, **sizes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
        for module in model.modules():
            if type(module).__name__ in ("Gemma2RMSNorm", "CohereLayerNorm"):
                module.weight.data.normal_()  # Gemma2 keeps it less one
        target = Target(model)
    else:
        target = Target(tiny_model(family))
    layer = made("eagle3", target, layers=[0, 2]).layer
    features, tokens = torch.randn(1, 5, 64).double(), torch.randint(VOCAB, (1, 5))
    states = layer.fused(features)
    torch.testing.assert_close(states, features[..., 32:])
    found = layer.tail.text(layer.entry(states, tokens), tokens).logits
    assert found.isfinite().all()
    if family == "gpt2":
        return
    others = (tokens + 1) % VOCAB
    torch.testing.assert_close(layer.tail.text(layer.entry(states, others), others).logits, found)
    norm, centred = target.layers[-1].input_layernorm, states - states.mean(-1, keepdim=True)
    torch.testing.assert_close(layer.midlayer.hidden_norm(centred), norm(centred), rtol=1e-4, atol=1e-4)
    if family == "llama":
        wanted = target.text(tokens, layers=(2, 3), hidden=states).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


ALL_AT_ONCE = (Medusa, SequentialHeads)  # these rank all depths together


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (EarlyExit, {"exit": 2, "rank": 4}),
        (Feature, {}),
        (SequentialHeads, {"heads": 3, "rank": 4}),
        (Medusa, {"heads": 3}),
    ],
)
def test_noise_is_that_of_the_drafted_position(kind, shape, llama, monkeypatch):
    """What children at depth d are ranked with is what the target will add where they would stand."""
    drafter = random_drafter(kind, llama, **shape).eval()
    watch, used, real = Watch(drafter), [], growth_module.perturbed

    def spy(logits: torch.Tensor, noise: torch.Tensor, temperature: float) -> torch.Tensor:
        used.append((len(watch.seen), noise.clone()))
        return real(logits, noise, temperature)

    module = {Medusa: plan_module, SequentialHeads: sequential_module}.get(kind, growth_module)
    monkeypatch.setattr(module, "perturbed", spy)
    speculative(llama, [PROMPT], Options(8, Sampling(1.0), [9]), watch, 9)
    known = [gumbel(noise_bits(*map(torch.tensor, (9, 0, p)), torch.arange(VOCAB))) for p in range(40)]
    for number, (texts, _) in enumerate(watch.seen):
        depths = [noise for n, noise in used if n == number]
        if kind in ALL_AT_ONCE:  # all depths at once, [.., depth, V] or [depth, .., V]
            depths = list(depths[0].reshape(-1, VOCAB))
        for depth, noise in enumerate(depths):
            torch.testing.assert_close(noise.reshape(-1, VOCAB)[0], known[len(texts[0]) + depth])


def test_scores_that_are_no_numbers_change_nothing(llama):
    for kind, shape in (
        (Feature, {}),
        (SequentialHeads, {"heads": 3}),
        (EarlyExit, {"exit": 1, "rank": 2}),
        (Medusa, {}),
    ):
        drafter = random_drafter(kind, llama, **shape).eval()
        with torch.no_grad():
            for parameter in drafter.trained().values():
                parameter.fill_(torch.nan)
        for temperature in (0.0, 1.0):
            options = Options(12, Sampling(temperature), 4)
            plain = autoregressive(llama, [PROMPT, PROMPT[:2]], options).token_ids
            assert speculative(llama, [PROMPT, PROMPT[:2]], options, drafter.eval(), 9).token_ids == plain


def test_a_compiled_tree_is_as_deep_as_pays():
    """Where depths cost nothing, the static tree decides; the dearer they are, the fewer are drafted."""
    acceptance = tuple((p, 0.1, 0.05) for p in (0.6, 0.55, 0.5, 0.45, 0.4))
    depths = [len(expanded(acceptance, 8, 4, cost)) for cost in (0.0, 0.04, 0.4, 4.0)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[2] > depths[3]
    for cost, depth in zip((0.0, 0.04, 0.4, 4.0), depths, strict=True):
        rates = [sum(static_tree(acceptance[:d], 8)[2]) / (2 + d * cost) for d in range(1, 6)]
        assert rates[depth] == max(rates)
    assert max(expanded(acceptance, 8, 2)) == 2


@pytest.mark.parametrize("kind", [Eagle3, Feature])
def test_a_depth_costs_the_weights_that_it_reads(kind, llama):
    """Those of the draft layer and of its head, beside those of the target's layers and its head; what is read once for
    all depths, such as the product that fuses features, does not count."""
    drafter = random_drafter(kind, llama, draft_vocab=8).eval()
    layer = drafter.layer.midlayer if kind is Eagle3 else drafter.layer.tail.target.layers[-1]
    numbers = [sum(p.numel() for p in part.parameters()) for part in (layer, llama.layers, llama.lm_head)]
    assert drafter.depth_cost(llama) == (numbers[0] + 8 * llama.hidden_size) / (numbers[1] + numbers[2])
    assert drafter.session(llama, 1).depth_cost == drafter.depth_cost(llama)
