"""The contract every drafter keeps: one row a drafter, one test a clause."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from conftest import HIDDEN, VOCAB, Watch, made, random_drafter, randomize, tiny_model

import selfspec.drafters.parts.losses
import selfspec.drafters.sequential
from selfspec.checkpoints.drafter_folder import load_drafter, save_drafter
from selfspec.checkpoints.weights_hash import weights_hash
from selfspec.core.generate import Result, autoregressive, speculative, speculative_steps
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.drafters.base import Drafter, Sample, Trained
from selfspec.drafters.block import BlockDrafter
from selfspec.drafters.eagle3 import Eagle3
from selfspec.drafters.early_exit import EarlyExit
from selfspec.drafters.feature import Feature
from selfspec.drafters.hybrid import Hybrid
from selfspec.drafters.lookahead import Lookahead
from selfspec.drafters.mask import Mask
from selfspec.drafters.medusa import Medusa
from selfspec.drafters.mtp import Mtp
from selfspec.drafters.prompt_lookup import PromptLookup
from selfspec.drafters.sequential import SequentialHeads
from selfspec.training.calibrate import TEMPERATURES, calibrate, write_samples
from selfspec.training.checkpoint import warm_start
from selfspec.training.draft_loss import DraftLoss
from selfspec.training.loop import average
from selfspec.training.loop_config import LoopConfig
from selfspec.training.step import optimizer_step

PROMPTS = [[5, 9, 2, 7, 7, 1], [3], [8, 1, 30, 4, 17, 22, 9, 40, 2, 11, 12], [60, 59]]


@dataclass(frozen=True)
class Row:
    """build: the drafter on a target; parameters: how many it trains on a Llama of the tests (None: not counted); few:
    whether it has a draft vocabulary."""

    build: Callable[[Target], Drafter]
    parameters: int | None = None
    few: bool = False


def of(kind: type[Drafter], parameters: int | None = None, **settings: Any) -> Row:
    return Row(lambda target: made(kind, target, **settings), parameters, "draft_vocab" in settings)


def hybrid(**trained: Row) -> Row:
    """A prompt lookup and trained drafters."""

    def build(target: Target) -> Drafter:
        members: dict[str, Drafter] = {"prompt_lookup": made("prompt_lookup", target)}
        for name, row in trained.items():
            torch.manual_seed(2)
            members[name] = row.build(target)
            randomize(members[name])
            members[name].eval()
        return Hybrid(target, members)

    return Row(build, 0)


# Formulas: K*blocks*(H*H + H) + K*rank*(H + V) and the like, written out for H = 32, V = 61
H2, HV = HIDDEN * HIDDEN, HIDDEN + VOCAB
TABLE = {
    "prompt_lookup": of(PromptLookup, 0),
    "prompt_lookup_wide": of(PromptLookup, 0, longest=3, shortest=2, choices=6, min_prob=0.0),
    "lookahead": of(Lookahead, 0),
    "lookahead_long": of(Lookahead, 0, window=3, ngram=4, guesses=2, pool=20),
    "hybrid": hybrid(medusa=of(Medusa, heads=3, rank=4)),
    "hybrid_three": hybrid(feature=of(Feature, layers=[1, 2]), sequential=of(SequentialHeads, heads=3, rank=4,
        width=2)),
    "medusa": of(Medusa, 4 * (H2 + HIDDEN) + 4 * 8 * HV, heads=4, rank=8),
    "medusa_deep": of(Medusa, 2 * 3 * (H2 + HIDDEN) + 2 * 4 * HV, heads=2, blocks=3, rank=4),
    "medusa_full": of(Medusa, 3 * (H2 + HIDDEN) + 3 * HIDDEN * VOCAB, heads=3, projection="full"),
    "medusa_few": of(Medusa, 3 * (H2 + HIDDEN) + 3 * 4 * (HIDDEN + 20), heads=3, rank=4, draft_vocab=20),
    "medusa_full_few": of(Medusa, heads=3, projection="full", draft_vocab=20),
    "sequential_few": of(SequentialHeads, heads=3, rank=4, width=3, draft_vocab=20),
    "sequential_markov_few": of(SequentialHeads, heads=3, form="markov", rank=4, correction=8, prefix=False,
        draft_vocab=20),
    "medusa_ce": of(Medusa, heads=3, rank=4, loss="ce"),
    "sequential": of(SequentialHeads, heads=4, rank=4, width=3),
    "sequential_alone": of(SequentialHeads, 4 * 2 * (H2 + HIDDEN) + 10 * H2 + 4 * 4 * HV, heads=4, rank=4,
        prefix=False),
    "sequential_deep": of(SequentialHeads, heads=3, prefix=False, rank=4, blocks=3, min_prob=0.0, loss="ce"),
    "early_exit": of(EarlyExit, exit=1, rank=4, width=2),
    "early_exit_late": of(EarlyExit, exit=2, rank=2, depth=6, width=4, min_prob=0.0, loss="ce"),
    "early_exit_free": of(EarlyExit, 0, exit=2, rank=0, min_prob=0.0),
    "early_exit_few": of(EarlyExit, exit=1, rank=4, width=2, draft_vocab=20),
    "early_exit_free_few": of(EarlyExit, 0, exit=2, rank=0, min_prob=0.0, draft_vocab=20),
    "feature": of(Feature, layers=[0, 1, 2]),
    "feature_lora": of(Feature, layers=[2], train="lora", rank=4, depth=7, width=5, min_prob=0.0),
    "mask": of(Mask, masks=4, rank=4, correction=8, anchors=4),
    "hybrid_mask": hybrid(mask=of(Mask, masks=3, rank=4, correction=8)),
    "mask_vectors": of(Mask, masks=3, adapter="vectors", correction=4, anchors=4),
    "mask_two_passes": of(Mask, masks=3, passes=2, rank=4, correction=8, anchors=4),
    "mask_few": of(Mask, masks=4, rank=4, correction=8, anchors=4, draft_vocab=20),
    "mask_two_passes_few": of(Mask, masks=3, passes=2, rank=4, correction=8, anchors=4, draft_vocab=20),
    "mask_free": of(Mask, 0, masks=3, rank=0, correction=0),
    "eagle3": of(Eagle3, 2 * H2 + 2 * HIDDEN * (32 + 2 * 16) + H2 + 3 * 48 * HIDDEN + 4 * HIDDEN, layers=[0, 1]),
    "eagle3_flags": of(Eagle3, llama={"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "attention_bias": True}, norm_before_residual=True, norm_before_fc=True, norm_output=True,
        head="own", draft_vocab=20, min_prob=0.0),
    "eagle3_few": of(Eagle3, layers=[2], fc_norm=True, draft_vocab=20, depth=7, width=5),
    "eagle3_qwen": of(Eagle3, layers=[0, 1], qk_norm=True, embeddings="own", head="own"),
    "peagle": of(Eagle3, 2 * H2 + 2 * HIDDEN + 3 * HIDDEN * (32 + 2 * 16) + 2 * H2 + 2 * 3 * 48 * HIDDEN + 6 * HIDDEN,
        layers=[0, 1], parallel=True, stack=2, anchors=4),
    "eagle3_deep": of(Eagle3, layers=[0, 1], stack=2, min_prob=0.0),
    "peagle_few": of(Eagle3, layers=[2], parallel=True, unroll=1, depth=3, width=2, draft_vocab=20, min_prob=0.0,
        qk_norm=True, embeddings="own", head="own", mask_token=5, fc_norm=True, anchors=4),
    "feature_few": of(Feature, layers=[1, 2], draft_vocab=20),
    "mtp": of(Mtp, depth=4, width=3),
    "mtp_in_a_row": of(Mtp, modules=2, depth=4, width=3),
    "block": of(BlockDrafter, H2 + 2 * (4 * 8 * 2 * HIDDEN + 2 * 2 * 8 * HIDDEN + 2 * 8 + 3 * 48 * HIDDEN + 2 * HIDDEN)
        + 3 * HIDDEN + 2 * 4 * VOCAB, size=5, correction=4, anchors=4),
    "block_own": of(BlockDrafter, size=5, predicts="own", correction=0, stack=1, layers=[2], anchors=4, loss="ce"),
    "block_causal_few": of(BlockDrafter, size=4, causal=True, draft_vocab=20, correction=4, stack=1, min_prob=0.0,
        anchors=4),
    "block_gated": of(BlockDrafter, size=4, correction=4, correction_form="gated", confidence="parents", stack=1,
        anchors=4),
    "block_rnn_sliding": of(BlockDrafter, size=4, correction=4, correction_form="rnn", confidence="rows",
        draft_vocab=20, sliding=[1], window=6, min_prob=0.0, anchors=4),
    "mtp_in_a_row_few": of(Mtp, modules=3, depth=3, min_prob=0.0, draft_vocab=20, recycled="pre"),
    "mtp_few": of(Mtp, fed="pre", recycled="pre", hidden_first=True, draft_vocab=20),
    "sequential_markov": of(SequentialHeads, heads=4, form="markov", rank=4, blocks=1, correction=8),
}  # fmt: skip


UNTRAINED = [name for name in TABLE if name.startswith(("prompt_lookup", "lookahead", "hybrid"))]
TRAINED = [name for name in TABLE if name not in UNTRAINED]
COUNTED = [name for name, row in TABLE.items() if row.parameters is not None]
FEW = [name for name, row in TABLE.items() if row.few]


# One of each way to draft: what a row's settings leave as it is need not be tested with all of them
WAYS = ["prompt_lookup", "lookahead", "hybrid_three", "hybrid_mask", "medusa", "sequential", "sequential_alone"]
WAYS += ["early_exit", "feature_few", "mask", "mask_two_passes", "eagle3", "peagle", "mtp_in_a_row", "block"]


def of_rows(names: list[str]) -> Any:
    """The test is for these rows of the table alone."""
    return pytest.mark.parametrize("row", names, indirect=True)


@pytest.fixture(params=TABLE)
def row(request) -> Row:
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


@of_rows(COUNTED)
def test_parameter_count_is_the_formula(row, llama):
    assert sum(p.numel() for p in row.build(llama).trained().values()) == row.parameters


@of_rows(UNTRAINED)
def test_what_has_nothing_to_train_is_not_trained(row, llama):
    drafter = built(row, llama)
    assert not isinstance(drafter, Trained)
    assert not drafter.trained()


@of_rows(TRAINED)
def test_training_moves_own_parameters_alone(row, target):
    before = weights_hash(target.model)
    drafter: Any = built(row, target)
    own = {name: p.detach().clone() for name, p in drafter.trained().items()}  # eval mode has frozen none of them
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
    assert weights_hash(target.model) == before


class InStep:
    """One of the processes of a step, each a thread: what accelerate's reduce does, and gradients added up."""

    device = torch.device("cpu")

    def __init__(self, index: int, count: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.process_index, self.num_processes, self.shared, self.barrier = index, count, shared, barrier

    def reduce(self, value: torch.Tensor, how: str) -> torch.Tensor:
        self.barrier.wait()
        self.shared[self.process_index] = value.detach()
        self.barrier.wait()
        return sum(self.shared) / (self.num_processes if how == "mean" else 1)


class Gradients:
    """Takes the gradients of a step in place of an optimizer."""

    param_groups: tuple[dict[str, float], ...] = ()

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        self.found = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}

    def zero_grad(self) -> None:
        pass


def gradients(row: Row, target: Target, processes: int, parts: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one optimizer step over four rows of unequal counts."""
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (4, 30), generator=g)
    mask = torch.zeros(4, 30, dtype=torch.bool)
    for i, (first, last) in enumerate(((26, 29), (2, 29), (1, 30), (20, 24))):
        mask[i, first:last] = True
    config, barrier = LoopConfig(accumulate=parts, clip=1e30, precision="no"), threading.Barrier(processes)
    drafters, shared = [built(row, target).train() for _ in range(processes)], [None] * processes

    def run(index: int) -> tuple[torch.Tensor, Gradients]:
        accelerator, own = InStep(index, processes, shared, barrier), drafters[index]
        module = DraftLoss(own, target, average(accelerator))
        part = slice(index * 4 // processes, (index + 1) * 4 // processes)
        kept, one = Gradients(own.trained()), {"tokens": tokens[part], "mask": mask[part]}
        return optimizer_step(accelerator, module, [kept], lambda step: one, config, 7)[0], kept

    with ThreadPoolExecutor(processes) as threads:
        losses, kept = zip(*threads.map(run, range(processes)), strict=True)
    sums = {name: sum(one.found[name] for one in kept) / processes for name in kept[0].found}
    return float(sum(losses) / processes), sums


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.parameters != 0])
def test_a_step_in_parts_and_processes_is_the_same_step(name):
    """Every mean of a loss is over the whole step, however its rows are divided."""
    target = Target(tiny_model(dtype=torch.float32))
    loss, wanted = gradients(TABLE[name], target, 1, 1)
    assert max(float(gradient.norm()) for gradient in wanted.values()) > 0
    for processes, parts in ((1, 4), (2, 2)):
        again, found = gradients(TABLE[name], target, processes, parts)
        assert again == pytest.approx(loss, rel=1e-5)
        for key, gradient in wanted.items():
            assert float((found[key] - gradient).norm()) <= 1e-5 * (float(gradient.norm()) + 1e-3), (parts, key)


@of_rows(FEW)
def test_a_draft_vocabulary_holds_from_when_it_is_chosen(row, llama, monkeypatch):
    """Training begins right behind the choice; decoding, later steps and a warm start go by the same rows."""
    for module in (selfspec.drafters.sequential, selfspec.drafters.parts.losses):
        monkeypatch.setattr(module, "random_rows", lambda batch, count: torch.ones(len(batch.tokens), count))
    torch.manual_seed(0)
    drafter, begun = row.build(llama), row.build(llama)
    randomize(drafter)
    drafter.drafts_only(torch.randperm(VOCAB)[: len(drafter.vocabulary)])
    first, _ = DraftLoss(drafter, llama)(batch())
    drafter.eval()
    drafter.train()
    warm_start(begun, drafter, "runs/first")
    assert all(torch.equal(p, begun.trained()[name]) for name, p in drafter.trained().items())
    for one in (drafter, begun):
        assert float(DraftLoss(one, llama)(batch())[0]) == pytest.approx(float(first), rel=1e-6)


def test_a_warm_start_says_in_what_the_two_differ(llama, capsys):
    one, other = (made("mtp", llama, hidden_first=first) for first in (False, True))
    warm_start(other, one, "runs/first")
    warm_start(made("mtp", llama, hidden_first=True, depth_decay=0.5), other, "runs/second")
    said = capsys.readouterr().out
    assert said == "warning: train.init_from='runs/first' was trained with hidden_first=False, here True\n"


@pytest.mark.parametrize(
    ("row", "family"),
    [(TABLE[name], "llama") for name in TRAINED] + [(TABLE[name], "gemma3_text") for name in TRAINED if name in WAYS],
)
def test_documents_of_a_row_do_not_see_each_other(row, family, monkeypatch):
    """The loss of a packed row is that of its documents in rows of their own."""
    for module in (selfspec.drafters.sequential, selfspec.drafters.parts.losses):
        monkeypatch.setattr(module, "random_rows", lambda batch, count: torch.ones(len(batch.tokens), count))
    target = Target(tiny_model(family, dtype=torch.float64))
    drafter: Any = built(row, target)
    if isinstance(drafter, (Mask, BlockDrafter, Eagle3)):
        drafter.config.anchors = 100  # behind every position
    g = torch.Generator().manual_seed(1)
    texts = [torch.randint(VOCAB, (n,), generator=g) for n in (12, 17, 9)]
    masks = [torch.rand(len(text), generator=g) < 0.8 for text in texts]
    room = 50 - sum(map(len, texts))
    packed = {"tokens": torch.cat([*texts, torch.zeros(room).long()])[None]}
    packed["mask"] = torch.cat([*masks, torch.zeros(room).bool()])[None]
    packed["documents"] = torch.tensor([n for n, text in enumerate(texts) for _ in text] + [-1] * room)[None]
    alone = {
        name: torch.stack([torch.cat([part, part.new_zeros(50 - len(part))]) for part in parts])
        for name, parts in (("tokens", texts), ("mask", masks))
    }
    drafter.train()
    (one, told), (two, wanted) = (DraftLoss(drafter, target)(given) for given in (packed, alone))
    assert float(one) == pytest.approx(float(two), rel=1e-5)
    for name, values in wanted.items():
        assert told[name].tolist() == pytest.approx(values.tolist(), rel=1e-5)
    across = DraftLoss(drafter, target)({name: packed[name] for name in ("tokens", "mask")})[0]
    assert float(across) != pytest.approx(float(two), rel=1e-5)


def test_target_weights_are_views(row, target):
    drafter = row.build(target)
    storages = {p.data_ptr() for p in target.model.parameters()}
    assert all(p.data_ptr() in storages for p in drafter.parameters() if not p.requires_grad)


# temperature, rows, nodes: pairwise; a root alone is one more case
CASES = [(0.0, 1, 13), (0.0, 4, 4), (0.7, 4, 13), (0.7, 1, 4), (0.7, 4, 1)]


@cache
def samples(target: Target, mode: str, reads: tuple[int, ...]) -> list[Sample]:
    """Texts to calibrate on, the same for all drafters that read these layers."""
    return write_samples(target, PROMPTS[2:], 20, TEMPERATURES[mode], range(9), reads)


@cache
def plain_text(target: Target, temperature: float, rows: int) -> list[list[int]]:
    """What all drafters have to give."""
    return autoregressive(target, PROMPTS[:rows], Options(20, Sampling(temperature), 5)).token_ids


def test_lossless(row, target):
    drafter = built(row, target)
    if not isinstance(drafter, Hybrid):
        for mode in TEMPERATURES:
            calibrate(target, drafter, mode, samples(target, mode, drafter.reads))
    for temperature, rows, nodes in CASES:
        options = Options(20, Sampling(temperature), 5)
        fast = speculative(target, PROMPTS[:rows], options, drafter, nodes)
        assert fast.token_ids == plain_text(target, temperature, rows), (temperature, rows, nodes)
        assert [len(d) for d in fast.from_draft] == [len(t) for t in fast.token_ids]


def test_trees_keep_the_budget_and_the_root(row, target):
    drafter = built(row, target)
    watch = Watch(drafter)
    prompts = [prompt * 3 for prompt in PROMPTS[2:]]
    speculative(target, prompts, Options(24, Sampling(1.0)), watch, 7)
    for texts, tree in watch.seen:
        assert tree.tokens[:, 0].tolist() == [tokens[-1] for tokens in texts]
    widest = max(tree.tokens.shape[1] for _, tree in watch.seen)
    smaller = drafter.kind in ("lookahead", "mask") or "mask" in getattr(drafter, "members", {})
    assert widest == 7 or (smaller and 3 <= widest < 7)  # a pool may know too little, a row may not be worth its place


@of_rows([name for name in TABLE if not name.startswith("hybrid")])
def test_save_and_load_give_the_same_draft(row, llama, tmp_path):
    target = llama
    drafter = built(row, target)
    calibrate(target, drafter, "greedy", samples(target, "greedy", drafter.reads))
    save_drafter(drafter, tmp_path / "d", target, "tiny", None, "")
    again = load_drafter(tmp_path / "d", target)
    assert again.calibration == drafter.calibration
    assert again.config == drafter.config
    options = Options(20, Sampling(1.0), 1)
    drafts = []
    for one in (drafter, again):
        result = speculative(target, PROMPTS[:1], options, one, 9)
        drafts.append((result.token_ids, result.from_draft, result.stats.passes))
    assert drafts[0] == drafts[1]


def held(drafter: Drafter) -> dict[str, Any]:
    """All that a drafter and its modules hold, by place."""
    return {f"{path}.{name}": v for path, m in drafter.named_modules() for name, v in vars(m).items()}


def test_decoding_leaves_no_state_behind(row, llama):
    drafter = built(row, llama)
    speculative(llama, PROMPTS, Options(8), drafter, 6)
    before = held(drafter)
    kept = {
        name: list(v) if isinstance(v, list) else dict(v) if isinstance(v, dict) else v for name, v in before.items()
    }
    speculative(llama, PROMPTS, Options(8), drafter, 6)
    after = held(drafter)
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)
    for name, value in kept.items():
        if isinstance(value, (list, dict)):
            assert list(after[name]) == list(value)


@of_rows(WAYS)
def test_two_streams_and_five_threads_do_not_meet(row, llama):
    """Calls of one drafter, interleaved by hand and in threads, with stock generation beside, each as if alone."""
    drafter = built(row, llama)
    options = [Options(10, Sampling(t), 3) for t in (0.0, 1.0, 0.7)]
    alone = [speculative(llama, PROMPTS[2:], o, drafter, 9) for o in options]
    ids = torch.tensor([PROMPTS[0]])
    stock = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = llama.model.generate(ids, **stock)

    streams = [speculative_steps(llama, PROMPTS[2:], o, drafter, 9, Result.of(len(PROMPTS[2:]))) for o in options[:2]]
    texts: list[list[list[int]]] = [[[], []], [[], []]]
    while streams:
        for i, stream in enumerate(streams):
            if (added := next(stream, None)) is None:
                streams = []
                break
            for index, tokens, _ in added:
                texts[i][index] += tokens
    assert all(
        whole[: len(part)] == part for got, result in zip(texts, alone, strict=False)
        for part, whole in zip(got, result.token_ids, strict=True)
    )  # fmt: skip

    with ThreadPoolExecutor(5) as pool:
        beside = [pool.submit(llama.model.generate, ids, **stock) for _ in range(2)]
        calls = [pool.submit(speculative, llama, PROMPTS[2:], o, drafter, 9) for o in options]
        for call, result in zip(calls, alone, strict=True):
            found = call.result()
            assert found.token_ids == result.token_ids
            if drafter.kind != "hybrid":  # whose trained members rest by the clock alone with a known rate
                assert found.stats.passes == result.stats.passes
        assert all(torch.equal(run.result(), wanted) for run in beside)


def test_medusa_starts_as_the_targets_own_prediction(llama):
    hidden = torch.randn(4, HIDDEN, dtype=torch.float64)
    for projection in ("lora", "full"):
        drafter = made("medusa", llama, heads=2, projection=projection)
        with torch.no_grad():
            torch.testing.assert_close(drafter(hidden), llama.lm_head(hidden).expand(2, -1, -1))


def test_medusa_loss_is_the_definition(llama):
    """Against one position and one head at a time, in plain operations."""
    drafter = random_drafter("medusa", llama, heads=3, rank=4)
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
