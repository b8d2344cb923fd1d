"""The contract every drafter keeps: one row a drafter, one test a clause."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HIDDEN, VOCAB, randomize, tiny_model

from selfspec.checkpoint import load_drafter, save_drafter
from selfspec.drafters.base import Drafter, Untrained
from selfspec.drafters.early_exit import EarlyExit
from selfspec.drafters.feature import Feature
from selfspec.drafters.hybrid import Hybrid
from selfspec.drafters.lookahead import Lookahead
from selfspec.drafters.medusa import Medusa
from selfspec.drafters.prompt_lookup import PromptLookup
from selfspec.drafters.sequential import Sequential
from selfspec.generate import Accepted, Context, Options, autoregressive, speculative
from selfspec.sampling import Sampling
from selfspec.target import Target
from selfspec.training.heads import DraftLoss
from selfspec.training.measure import KINDS, own_text
from selfspec.tree import DraftTree

PROMPTS = [[5, 9, 2, 7, 7, 1], [3], [8, 1, 30, 4, 17, 22, 9, 40, 2, 11, 12], [60, 59]]


@dataclass(frozen=True)
class Row:
    build: Callable[[Target], Drafter]
    parameters: Callable[[Target], int]


def medusa(**shape: Any) -> Row:
    return Row(lambda target: Medusa(target, **shape), lambda _: Medusa.parameter_count(HIDDEN, VOCAB, **shape))


def sequential(**shape: Any) -> Row:
    return Row(lambda target: Sequential(target, **shape), lambda target: Sequential.parameter_count(target, **shape))


def early_exit(**shape: Any) -> Row:
    return Row(lambda target: EarlyExit(target, **shape), lambda target: EarlyExit.parameter_count(target, **shape))


def feature(**shape: Any) -> Row:
    return Row(lambda target: Feature(target, **shape), lambda target: Feature.parameter_count(target, **shape))


def untrained(kind: type[Untrained], **shape: Any) -> Row:
    return Row(lambda target: kind(target, **shape), lambda _: 0)


def hybrid(**trained: Row) -> Row:
    """A prompt lookup and trained drafters, each saved for the target that the row is built on."""

    def build(target: Target) -> Drafter:
        folder = Path(tempfile.mkdtemp())
        for name, row in trained.items():
            torch.manual_seed(2)
            member = row.build(target)
            randomize(member)
            save_drafter(member, folder / name, target, "tiny", None, "")
        return Hybrid(target, ["prompt_lookup", *(str(folder / name) for name in trained)])

    return Row(build, lambda _: 0)


TABLE = {
    "prompt_lookup": untrained(PromptLookup),
    "prompt_lookup_wide": untrained(PromptLookup, longest=3, shortest=2, choices=6, least=0.0),
    "lookahead": untrained(Lookahead),
    "lookahead_long": untrained(Lookahead, window=3, ngram=4, guesses=2, pool=20),
    "hybrid": hybrid(medusa=medusa(heads=3, rank=4)),
    "hybrid_three": hybrid(feature=feature(layers=[1, 2]), sequential=sequential(heads=3, rank=4, width=2)),
    "medusa": medusa(heads=4, rank=8),
    "medusa_deep": medusa(heads=2, blocks=3, rank=4),
    "medusa_full": medusa(heads=3, projection="full"),
    "medusa_ce": medusa(heads=3, rank=4, loss="ce"),
    "sequential": sequential(heads=4, rank=4, width=3),
    "sequential_alone": sequential(heads=4, rank=4, prefix=False),
    "sequential_deep": sequential(heads=3, prefix=False, rank=4, blocks=3, least=0.0, loss="ce"),
    "early_exit": early_exit(exit=1, rank=4, width=2),
    "early_exit_late": early_exit(exit=2, rank=2, depth=6, width=4, least=0.0, loss="ce"),
    "early_exit_free": early_exit(exit=2, rank=0, least=0.0),
    "feature": feature(layers=[0, 1, 2]),
    "feature_lora": feature(layers=[2], train="lora", rank=4, depth=7, width=5, least=0.0),
    "feature_few": feature(layers=[1, 2], vocabulary=20),
    "sequential_markov": sequential(heads=4, form="markov", rank=4, blocks=1, correction=8),
}


@pytest.fixture(params=TABLE)
def row(request: pytest.FixtureRequest) -> Row:
    return TABLE[request.param]


def built(row: Row, target: Target) -> Drafter:
    torch.manual_seed(0)
    drafter = row.build(target)
    randomize(drafter)
    return drafter.eval()


def batch() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (3, 24), generator=g)
    return {"tokens": tokens, "mask": torch.rand(3, 24, generator=g) < 0.8}


def test_parameter_count_is_the_formula(row: Row, target: Target) -> None:
    assert sum(p.numel() for p in row.build(target).trained().values()) == row.parameters(target)


def test_training_moves_own_parameters_alone(row: Row, target: Target) -> None:
    before = target.checksum()
    drafter = built(row, target)
    own = {name: p.detach().clone() for name, p in drafter.trained().items()}
    assert sum(p.numel() for p in own.values()) == row.parameters(target)  # eval mode has frozen none of them
    frozen = {name: p.detach().clone() for name, p in drafter.named_parameters() if name not in own}
    drafter.train()
    loss, figures = DraftLoss(drafter, target)(batch())
    if own:  # the training-free form of early exit has none
        optimizer = torch.optim.SGD(drafter.trained().values(), lr=0.1)
        loss.backward()
        optimizer.step()
    assert loss.ndim == 0
    assert all(figure.ndim == 1 for figure in figures.values())
    assert all(not torch.equal(p, own[name]) for name, p in drafter.trained().items())
    assert all(torch.equal(p, frozen[name]) for name, p in drafter.named_parameters() if name in frozen)
    assert not any(p.grad is not None for p in target.model.parameters())
    assert target.checksum() == before


def test_target_weights_are_views(row: Row, target: Target) -> None:
    drafter = row.build(target)
    storages = {p.data_ptr() for p in target.model.parameters()}
    assert all(p.data_ptr() in storages for p in drafter.parameters() if not p.requires_grad)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("rows", [1, 4])
def test_lossless(row: Row, target: Target, temperature: float, rows: int) -> None:
    drafter = built(row, target)
    for kind in ("greedy", "sampled"):
        drafter.measure(kind, own_text(target, PROMPTS[2:], 30, KINDS[kind], 0, drafter.features))
    options = Options(30, Sampling(temperature), 5)
    plain = autoregressive(target, PROMPTS[:rows], options)
    for nodes in (1, 4, 13):
        fast = speculative(target, PROMPTS[:rows], options, drafter, nodes)
        assert fast.token_ids == plain.token_ids
        assert [len(d) for d in fast.from_draft] == [len(t) for t in fast.token_ids]


def test_trees_keep_the_budget_and_the_root(row: Row, target: Target) -> None:
    drafter = built(row, target)
    seen: list[DraftTree] = []

    class Spy:
        features = drafter.features

        def propose(self, context: Context) -> DraftTree:
            tree = drafter.propose(context)
            assert tree.tokens[:, 0].tolist() == [tokens[-1] for tokens in context.tokens]
            seen.append(tree)
            return tree

        def observe(self, accepted: Accepted) -> None:
            drafter.observe(accepted)

    prompts = [prompt * 3 for prompt in PROMPTS[2:]]
    speculative(target, prompts, Options(40, Sampling(1.0)), Spy(), 7)
    widest = max(tree.tokens.shape[1] for tree in seen)
    assert widest == 7 or (drafter.kind == "lookahead" and 3 <= widest < 7)  # its pool may know too little


def test_save_and_load_give_the_same_draft(row: Row, tmp_path: Path) -> None:
    target = Target(tiny_model())
    drafter = built(row, target)
    drafter.measure("greedy", own_text(target, PROMPTS[2:], 20, 0.0, 0, drafter.features))
    save_drafter(drafter, tmp_path / "d", target, "tiny", None, "")
    again = load_drafter(tmp_path / "d", target)
    assert again.measured == drafter.measured
    options = Options(20, Sampling(1.0), 1)
    drafts = []
    for one in (drafter, again):
        result = speculative(target, PROMPTS[:1], options, one, 9)
        drafts.append((result.token_ids, result.from_draft, result.stats.passes))
    assert drafts[0] == drafts[1]
    assert not any(p.requires_grad for p in again.parameters())


def test_decoding_leaves_no_state_behind(row: Row, llama: Target) -> None:
    drafter = built(row, llama)
    before = dict(drafter.__dict__)
    speculative(llama, PROMPTS, Options(8), drafter, 6)
    assert {k: v for k, v in drafter.__dict__.items() if v is not before[k]} == {}


def test_stacked_product_is_pefts_own(llama: Target) -> None:
    """Medusa's one product for all heads against PEFT's forward with one adapter at a time."""
    drafter = Medusa(llama, heads=3, rank=4)
    randomize(drafter)
    with torch.no_grad():
        drafter.weight.zero_()
        drafter.bias.zero_()
    hidden = torch.randn(5, HIDDEN, dtype=torch.float64)
    layer: Any = drafter.shared.lora[drafter.shared.name]  # type: ignore[union-attr]
    for stacked in (False, True):
        drafter.train(not stacked)
        with torch.no_grad():
            got = drafter(hidden)
            for k in range(3):
                want = layer(hidden, adapter_names=[f"head_{k}"] * 5) if not layer.training else None
                if want is None:
                    a, b = layer.lora_A[f"head_{k}"], layer.lora_B[f"head_{k}"]
                    want = layer.base_layer(hidden) + b(a(hidden)) * layer.scaling[f"head_{k}"]
                torch.testing.assert_close(got[k], want)


def test_medusa_starts_as_the_targets_own_prediction(llama: Target) -> None:
    hidden = torch.randn(4, HIDDEN, dtype=torch.float64)
    for projection in ("lora", "full"):
        drafter = Medusa(llama, heads=2, projection=projection)
        with torch.no_grad():
            torch.testing.assert_close(drafter(hidden), llama.lm_head(hidden).expand(2, -1, -1))


def test_medusa_loss_is_the_definition(llama: Target) -> None:
    """Against one position and one head at a time, in plain operations."""
    drafter = Medusa(llama, heads=3, rank=4)
    randomize(drafter)
    data = batch()
    loss, figures = DraftLoss(drafter, llama)(data)
    with torch.no_grad():
        seen: list[torch.Tensor] = []
        hook = llama.decoder.register_forward_hook(lambda m, a, out: seen.append(out.last_hidden_state))
        logits = llama.model(data["tokens"]).logits
        hook.remove()
        means = []
        for k in range(3):
            total = count = 0.0
            for b in range(3):
                for t in range(24 - 1 - 3):
                    if data["mask"][b, t + 2 + k]:
                        q = drafter(seen[0][b, t : t + 1])[k, 0].log_softmax(-1)
                        p = logits[b, t + 1 + k].log_softmax(-1)
                        total, count = total + float((p.exp() * (p - q)).sum()), count + 1
            means.append(total / count)
    assert figures["kl"].tolist() == pytest.approx(means)
    weights = [0.8**k for k in range(3)]
    assert float(loss) == pytest.approx(sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"heads": 0}, "drafter.heads=0"),
        ({"rank": 0}, "drafter.rank=0"),
        ({"blocks": 0}, "drafter.blocks=0"),
        ({"projection": "lo"}, "drafter.projection='lo'"),
        ({"loss": "mse"}, "drafter.loss='mse'"),
        ({"depth_decay": 0}, "drafter.depth_decay=0"),
    ],
)
def test_medusa_refuses_bad_shapes(llama: Target, shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Medusa(llama, **shape)
