"""Mask slots in the verification tree: tree rows compute what they compute without them."""

from typing import Any

import pytest
import torch
from conftest import VOCAB, Watch, made, random_drafter, tiny_model
from families import FAMILIES, build
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor

from selfspec.core.generate import autoregressive, speculative
from selfspec.core.lossy import Lossy
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.core.verify import Kept
from selfspec.drafters.base import Calibration
from selfspec.drafters.hybrid import Hybrid
from selfspec.drafters.mask import MaskSession
from selfspec.drafters.parts.mask_layout import Layout, behind, layout, with_mask_slots
from selfspec.drafters.parts.static_tree import expected_length

PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]
PARENTS = torch.tensor([[-1, 0, 0, 1, 2, 2, 5]])
DEPTHS = [0] * 7 + [1] * 4 + [2]  # of the mask rows that `trees` gives


def trees(vocab: int, rows: int) -> tuple[DraftTree, tuple[Tensor, ...]]:
    """A tree of random tokens and the same with mask rows behind all nodes."""
    tokens = torch.randint(vocab, (rows, 7), generator=torch.Generator().manual_seed(0))
    parents = PARENTS.expand(rows, -1)
    scores = torch.tensor([[1.0, 0.6, 0.39, 0.33, 0.2, 0.1, 0.03]], dtype=torch.float64).expand(rows, -1)
    return DraftTree(tokens, parents), with_mask_slots(vocab, (tokens, parents, scores), (7, 4, 1))


@pytest.mark.parametrize("name", FAMILIES)
def test_tree_rows_are_the_targets_own(name):
    """Logits with mask slots and without, in float64, behind prompts of different lengths."""
    target = Target(build(name))
    drafter = random_drafter("mask", target, masks=3, rank=4, correction=0)
    drafter.eval()
    tree, (tokens, parents, *_) = trees(target.vocab_size, 2)
    found = []
    for view, both in ((target, tree), (drafter.gated.behind(7, DEPTHS), DraftTree(tokens, parents))):
        cache = target.cache(2, 40)
        target.forward(chain(torch.arange(18).view(2, 9) % target.vocab_size), cache, logits=False)
        cache.commit([list(range(9)), list(range(5))])
        found.append(view.forward(both, cache))
    plain, with_mask_slots_ = found
    limit = 1e-6 if name == "Bailing-hybrid" else 1e-12  # whose gate computes in float32
    torch.testing.assert_close(with_mask_slots_.logits[:, :7], plain.logits, rtol=limit, atol=limit)
    assert not torch.allclose(with_mask_slots_.logits[:, 7:8], plain.logits[:, :1])


@pytest.mark.parametrize("adapter", ["lora", "vectors"])
def test_the_adapter_runs_on_mask_rows_alone(adapter):
    """Other weights of the adapter change the mask rows' logits and nothing else."""
    target = Target(tiny_model())
    drafter = made("mask", target, masks=3, adapter=adapter, rank=4, correction=0)
    tree, (tokens, parents, *_) = trees(VOCAB, 1)
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in drafter.trained().values():
                parameter.normal_(std=0.2)
        drafter.eval()
        out = drafter.gated.behind(7, DEPTHS).forward(DraftTree(tokens, parents), target.cache(1, 40))
        found.append(out.logits)
        drafter.train()
    assert torch.equal(found[0][:, :7], found[1][:, :7])
    assert not torch.allclose(found[0][:, 7:], found[1][:, 7:])
    torch.testing.assert_close(found[0][:, :7], target.forward(tree, target.cache(1, 40)).logits)


def test_rows_ride_where_the_walk_ends():
    tree, (tokens, parents, scores, hosts) = trees(VOCAB, 1)
    ends = [0.01, 0.27, 0.09, 0.33, 0.2, 0.07, 0.03]  # what is left of each node's probability behind its children
    order = sorted(range(7), key=lambda node: -ends[node])
    assert torch.equal(tokens[:, :7], tree.tokens)
    assert hosts[0].tolist() == [*order, *order[:4], order[0]]
    assert tokens[0, 7:].tolist() == [VOCAB] * 7 + [VOCAB + 1] * 4 + [VOCAB + 2]
    assert parents[0, 7:].tolist() == [*order, 7, 8, 9, 10, 14]
    assert scores[0, 7:].tolist() == [0.0] * 12


def test_a_layout_spends_its_rows_on_what_they_bring():
    sure, unsure = ((0.9, 0.05), (0.9, 0.05), (0.8, 0.1)), ((0.3, 0.1), (0.2, 0.1), (0.1, 0.0))
    for table in (sure, unsure):
        for rows in (3, 8, 24, 48):
            found = layout(table, rows)
            assert found.nodes >= 2
            assert 1 <= sum(found.slots) <= rows - found.nodes
            assert list(found.slots) == sorted(found.slots, reverse=True)
    # One certain token a depth: a chain of three nodes behind the root, and rows behind its end.
    assert layout(((1.0,), (1.0,), (1.0,)), 7) == Layout(4, (1, 1, 1), 3.0)
    assert layout(((1.0,), (1.0,), (1.0,)), 4) == Layout(2, (1, 0, 0), 1.0)


def test_a_walk_that_ends_without_rows_reads_its_ancestors():
    """Row j of an ancestor a nodes up forecasts what row j - a of the node's own would."""
    tree, scores = (torch.tensor([[7, 7, 7, 7]]), torch.tensor([[-1, 0, 1, 2]])), torch.tensor([[1.0, 0.3, 0.1, 0.01]])
    paths = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    for slots, expected in (
        ((2, 2, 1), [[4, 6, 8], [5, 7, -1], [7, -1, -1], [-1, -1, -1]]),
        ((2, 1, 1), [[4, 6, 7], [5, 7, -1], [7, -1, -1], [-1, -1, -1]]),
        ((0, 0, 0), [[-1, -1, -1]] * 4),
    ):
        hosts = with_mask_slots(9, (*tree, scores), slots)[3] if any(slots) else torch.zeros(1, 0, dtype=torch.long)
        for path, rows in zip(paths, expected, strict=True):
            kept = Kept.of([path], [path], torch.device("cpu"))
            found, of = behind(kept, hosts, slots, 4, 3)
            assert found.tolist() == [rows]
            firsts = [4, 4 + slots[0], 4 + slots[0] + slots[1]]  # of the masks of each depth
            known = [sum(row >= first for first in firsts) - 1 for row in rows if row >= 0]
            assert of[found >= 0].tolist() == known  # by which it is corrected, as in training


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forecasts_that_are_right_are_accepted(temperature, monkeypatch):
    """With forecasts that know the text, every pass but the first emits a whole path."""
    target, options = Target(tiny_model()), Options(30, Sampling(temperature), 3)
    prompt = [5, 9, 2, 7, 7, 1]
    text = prompt + autoregressive(target, [prompt], options).token_ids[0]
    drafter = made("mask", target, masks=3, rank=0, correction=0, width=1).eval()
    real = MaskSession.propose

    def propose(self: Any, context: Any) -> DraftTree:
        if self.logits is not None:
            at = len(context.tokens[0])
            known = text[at : at + 3] + [0] * 3
            self.logits, rows = torch.full_like(self.logits, -50.0), self.forecasts[0][0]
            for depth, token in enumerate(known[:3]):
                if rows[depth] >= 0:
                    self.logits[0, rows[depth], token] = 50.0
        return real(self, context)

    monkeypatch.setattr(MaskSession, "propose", propose)
    found = speculative(target, [prompt], options, drafter, 40)
    assert found.token_ids[0] == text[len(prompt) :]
    assert found.stats.lengths[0] == 1
    assert set(found.stats.lengths[1:-1]) == {4}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pass_of_their_own_begins_with_a_token_that_is_right(temperature):
    target, prompt, options = Target(tiny_model()), [5, 9, 2, 7, 7, 1], Options(30, Sampling(temperature), 3)
    drafter = made("mask", target, masks=3, passes=2, rank=4, correction=4).eval()
    found = speculative(target, [prompt], options, drafter, 8)
    plain = autoregressive(target, [prompt], options)
    assert found.token_ids == plain.token_ids
    assert min(found.stats.lengths[:-1]) >= 2
    mixed = Hybrid(target, {"mask": drafter, "prompt_lookup": made("prompt_lookup", target)}).eval()
    for nodes in (2, 3):
        assert speculative(target, [prompt], options, mixed, nodes).token_ids == plain.token_ids
    mode = "sampled" if temperature else "greedy"
    drafter.calibration[mode] = Calibration([[0.5]] * 3, [1.0] * 3)
    by = drafter.session(target, 1), drafter.calibration[mode].acceptance, mode
    assert [expected_length(*by, nodes) for nodes in (2, 3, 4)] == [2.0, 2.5, 2.75]


def test_maps_of_a_family_of_experts_get_adapters():
    """PEFT takes maps of such a family for the experts', whether it has any or not."""
    target = Target(build("Qwen3-MoE", mlp_only_layers=[0, 1]))
    drafter = random_drafter("mask", target, masks=2, rank=4)
    model = next(iter(drafter.gated.adapters.values()))
    adapted = {name for name, part in model.named_modules() if isinstance(part, LoraLayer)}
    assert adapted == {f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")}
    plain = autoregressive(target, PROMPTS, Options(12)).token_ids
    assert speculative(target, PROMPTS, Options(12), drafter.eval(), 9).token_ids == plain


@pytest.mark.parametrize("change", ["hook", "lora", "replaced"])
def test_passes_follow_what_is_changed_in_the_model(change):
    """A pass with mask slots verifies too."""
    model = tiny_model()
    target, options = Target(model), Options(24)
    drafter = random_drafter("mask", target, masks=3, rank=4)
    drafter.eval()
    before = speculative(target, PROMPTS, options, drafter, 9).token_ids
    if change == "hook":
        model.model.layers[1].mlp.register_forward_hook(lambda module, given, out: out * 3 + 0.5)
    elif change == "lora":
        names = ["q_proj", "down_proj"]
        inject_adapter_in_model(LoraConfig(r=4, target_modules=names, init_lora_weights=False), model)
        model.double().eval()
    else:
        model.model.layers[1].mlp = tiny_model().model.layers[0].mlp
    plain = autoregressive(target, PROMPTS, options).token_ids
    assert plain != before
    assert speculative(target, PROMPTS, options, drafter, 9).token_ids == plain
    if change == "lora":  # one that is made for such a model leaves the maps with adapters alone
        again = made("mask", target, masks=3, rank=4).eval()
        assert not any("lora" in path or "down_proj" in path for path in again.gated.paths)
        assert speculative(target, PROMPTS, options, again, 9).token_ids == plain


@pytest.mark.parametrize("adapter", ["lora", "vectors"])
def test_two_rows_draft_in_every_second_pass(adapter):
    target = Target(tiny_model())
    drafter = random_drafter("mask", target, masks=3, rank=4, adapter=adapter)
    watch = Watch(drafter.eval())
    options = Options(12)
    result = speculative(target, PROMPTS[:1], options, watch, 2)
    assert result.token_ids == autoregressive(target, PROMPTS[:1], options).token_ids
    slots = [bool((tree.tokens >= VOCAB).any()) for _, tree in watch.seen]
    assert slots[:6] == [True, False] * 3


def test_a_lossy_rule_is_shown_no_mask_slot():
    target = Target(tiny_model())
    drafter = random_drafter("mask", target, masks=3, rank=4)
    rule = Lossy("top_k:3")
    result = speculative(target, PROMPTS, Options(24, relaxed=rule), drafter.eval(), 9)
    assert sum(map(len, result.token_ids)) == 2 * 24


@pytest.mark.parametrize("passes", [1, 2])
def test_float16(passes):
    target = Target(tiny_model(dtype=torch.float16))
    drafter = made("mask", target, rank=4, passes=passes).eval()
    options = Options(12, Sampling(1.0), 3)
    found = speculative(target, [[5, 9, 2, 7]], options, drafter, 12)
    assert len(found.token_ids[0]) == 12
