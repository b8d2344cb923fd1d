import functools

import pytest
import torch
from conftest import VOCAB, RandomTrees, refused, stock, tiny_model
from families import build
from sweep import tiny
from transformers import AutoModel, T5Config, T5ForConditionalGeneration

from selfspec.checkpoints.load_target import load_target
from selfspec.checkpoints.weights_hash import weights_hash
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.probe import probe
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")  # of transformers: what it drops next

TOKENS = torch.tensor([[5, 9, 2, 7, 11, 3, 8]])
TREE = DraftTree(torch.tensor([[4, 10, 20, 30, 12, 13]]), torch.tensor([[-1, 0, 0, 1, 1, 2]]))


def branch_logits(target: Target, node: int) -> torch.Tensor:
    """The plain model on prompt and the node's path, at the node."""
    path = TREE.tokens[0][TREE.mask[0, node]]
    with torch.no_grad():
        return target.model(torch.cat([TOKENS[0], path])[None]).logits[0, -1]


def check_branches(target: Target, atol: float = 1e-7) -> None:
    with torch.no_grad():
        cache = target.cache(1, 8)
        target.forward(chain(TOKENS), cache, logits=False)
        cache.commit([list(range(7))])
        out = target.forward(TREE, cache)
        for node in range(6):
            torch.testing.assert_close(out.logits[0, node], branch_logits(target, node), atol=atol, rtol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_node_sees_its_own_branch_alone(target, attention):
    target.model.set_attn_implementation(attention)
    target.check()  # as every call does: parts follow
    check_branches(target, 1e-7 if attention == "sdpa" else 1e-5)  # whose softmax is in float32
    target.model.set_attn_implementation("sdpa")
    target.check()


@pytest.mark.parametrize("stop", [1, 2])
def test_a_pass_can_be_split_between_layers(target, stop):
    with torch.no_grad():
        whole_cache, split_cache = target.cache(1, 16), target.cache(1, 16)
        for cache in (whole_cache, split_cache):
            target.forward(chain(TOKENS), cache, logits=False)
            cache.commit([list(range(7))])
        whole = target.forward(TREE, whole_cache, reads=(0, stop - 1, 2))
        calls = [0] * target.n_layers
        stack = next(name for name, module in target.decoder.named_children() if module is target.layers)
        parts = [target.part(0, stop, ()), target.part(stop, target.n_layers, (2,))]
        handles = [
            layer.register_forward_hook(lambda m, a, o, i=i: calls.__setitem__(i, calls[i] + 1))
            for part, own in zip(parts, (range(stop), range(stop, target.n_layers)), strict=True)
            for i, layer in enumerate(part.module.get_decoder().get_submodule(stack))
            if i in own
        ]
        first = target.forward(TREE, split_cache, layers=(0, stop))
        rest = target.forward(TREE, split_cache, layers=(stop, target.n_layers), hidden=first.hidden, reads=(2,))
        for handle in handles:
            handle.remove()
    assert calls == [1] * target.n_layers
    assert first.logits is None
    assert torch.equal(first.hidden, whole.features[stop - 1])
    assert torch.equal(rest.logits, whole.logits)
    assert torch.equal(rest.hidden, whole.hidden)
    assert torch.equal(rest.features[2], whole.features[2])
    whole_kv, split_kv = (cache.view(0, target.n_layers, 0).buffers for cache in (whole_cache, split_cache))
    for a, b in zip(whole_kv, split_kv, strict=True):
        assert torch.equal(a[0].flat, b[0].flat)
        assert torch.equal(a[1].flat, b[1].flat)


def test_parts_are_built_once_and_leave_the_model_alone(llama):
    layers, names = list(llama.layers), [name for name, _ in llama.model.named_modules()]
    with torch.no_grad(), pytest.raises(RuntimeError):
        llama.forward(chain(TOKENS), llama.cache(1, 16), layers=(1, 3), hidden=torch.zeros(1, 7, 5))
    assert list(llama.layers) == layers
    assert [name for name, _ in llama.model.named_modules()] == names
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llama.model.modules())
    part = llama.part(1, 3, (2,)).module
    assert llama.part(1, 3, (2, 2)).module is part is not llama.model
    own = {p.data_ptr() for p in llama.model.parameters()}
    assert {p.data_ptr() for p in part.parameters()} <= own


def test_layer_ranges_are_checked(llama):
    for layers, hidden in [((0, 4), None), ((2, 2), None), ((1, 3), None), ((0, 3), torch.zeros(1, 7, 32))]:
        refused("start < stop", llama.forward, chain(TOKENS), llama.cache(1, 16), layers=layers, hidden=hidden)


REFUSED = {
    "recurrent_gemma": "no tree can run over",
    "rwkv": "keeps no cache",
    **dict.fromkeys(("bloom", "mpt", "gpt_neo"), "inside its"),
    "openai-gpt": "keeps no cache of keys and values",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_a_tree_cannot_serve(name):
    refused(REFUSED[name], Target, tiny(name))


def test_refuses_what_is_no_causal_model():
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=32, num_layers=2))
    refused("encoder-decoder", Target, t5)
    refused("no language-model head", Target, AutoModel.from_config(tiny_model().config))


def test_the_weights_hash_sees_the_smallest_change_and_rounded_no_dtype():
    target, other = Target(tiny_model(dtype=torch.float32)), Target(tiny_model(dtype=torch.float32))
    assert weights_hash(target.model) == weights_hash(other.model)
    with torch.no_grad():
        weight = target.layers[1].mlp.up_proj.weight
        weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(9.0))
    assert weights_hash(target.model) != weights_hash(other.model)
    half = Target(tiny_model(dtype=torch.bfloat16))
    assert weights_hash(half.model, torch.bfloat16) == weights_hash(other.model, torch.bfloat16)
    rounded = weights_hash(half.model, torch.bfloat16)
    assert rounded == weights_hash(half.model.float(), torch.bfloat16)


FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 8.0, 16.0]}


def test_doge_is_served_as_far_as_it_sees_every_key():
    model = tiny_model("doge", keep_window_size=32, num_key_value_heads=4)
    target = Target(model)
    assert (target.max_positions, target.limited_by.partition(":")[0]) == (32, "keep_window_size")


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **FACTORS}


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_longrope_is_exact_up_to_its_original_length_and_refused_behind_it(family):
    """The model picks its factors by the largest position of a pass, so drafts, rows and prefill parts would too."""
    if family == "llama":
        model = tiny_model(max_position_embeddings=128, rope_parameters=dict(LONGROPE))
    else:
        model = build("Phi-3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=32)
    target = Target(model)
    probe(target)
    assert target.max_positions == 32
    prompts = [[(7 * i) % 61 for i in range(10)], [5, 9, 2]]
    for temperature in (0.0, 1.0):
        options = Options(40, Sampling(temperature), seed=3)
        plain = autoregressive(target, prompts, options)
        assert [len(row) for row in plain.token_ids] == [22, 29]
        fast = speculative(
            target, prompts, options, RandomTrees([p + t for p, t in zip(prompts, plain.token_ids, strict=True)]), 12
        )
        assert fast.token_ids == plain.token_ids
        if temperature == 0:
            assert plain.token_ids[0] == stock(model, prompts[0], 22)
    with pytest.raises(ValueError, match=r"prompt 1 has 33 tokens.*up to 32 positions \(rope_type longrope"):
        autoregressive(target, [prompts[0], [1] * 33], Options(4))


def test_the_probe_finds_rows_that_change_each_other(monkeypatch):
    monkeypatch.setattr("selfspec.core.support.longest_context", lambda model: (128, "nothing"))
    target = Target(tiny_model(max_position_embeddings=128, rope_parameters=dict(LONGROPE)))
    refused("a row's logits depend on the largest position of the pass", probe, target)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    monkeypatch.undo()
    probe(Target(tiny_model(max_position_embeddings=32, rope_parameters=dynamic)))


def test_a_model_of_known_form_is_probed_once(tmp_path, monkeypatch):
    """By name, until its config changes; and a model from the caller's hands always."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    probed: list[Target] = []
    monkeypatch.setattr("selfspec.core.probe.probe", probed.append)
    for name, changes in (("one", {}), ("other", {"rms_norm_eps": 1e-3})):
        tiny_model(**changes).save_pretrained(tmp_path / name)
    for name, count in (("one", 1), ("one", 1), ("other", 2), ("one", 2)):
        load_target(tmp_path / name)
        assert len(probed) == count
    load_target(tmp_path / "one", dtype="float32")
    assert len(probed) == 3
    for count in (4, 5):
        load_target(tiny_model())
        assert len(probed) == count
    monkeypatch.setattr(type(tiny_model()), "__module__", "mine")  # code that can change without a new version
    for count in (6, 7):
        load_target(tmp_path / "one")
        assert len(probed) == count


def test_a_forward_that_was_replaced_is_followed_and_autocast_is_refused(llama):
    options, prompts = Options(12), [[5, 9, 2, 7]]
    before = autoregressive(llama, prompts, options).token_ids
    mlp = llama.layers[1].mlp
    mlp.forward = lambda states: 0 * states
    try:
        other = autoregressive(llama, prompts, options).token_ids
        theirs = stock(llama.model, prompts[0], 12)
    finally:
        del mlp.forward
    assert other == [theirs] != before
    assert autoregressive(llama, prompts, options).token_ids == before
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=r"torch\.autocast is on"):
        autoregressive(llama, prompts, options)


@pytest.mark.parametrize(
    ("family", "settings", "window"),
    [
        ("llama", {"sliding_window": 8}, None),  # Llama reads no window, as of a Mistral that was converted
        ("llama", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}, None),
        ("mistral", {"sliding_window": 8, "use_sliding_window": False}, 8),  # which Mistral does not read
        ("mistral", {"sliding_window": 8}, 8),
        ("mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 3}, 8),  # which it does not read
    ],
)
def test_the_window_is_the_one_that_the_model_follows(family, settings, window):
    target, prompt = Target(tiny_model(family, **settings)), [(7 * i + 3) % VOCAB for i in range(24)]
    assert set(target.windows.values()) == {window}
    new = autoregressive(target, [prompt], Options(8)).token_ids[0]
    with torch.no_grad():
        logits = target.model(torch.tensor([prompt + new]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    assert new == logits.argmax(-1).tolist()
    drafter = RandomTrees([prompt + new])
    assert speculative(target, [prompt], Options(8), drafter, 6).token_ids == [new]


@pytest.mark.parametrize("how", ["silent layer", "wrapped decoder"])
def test_a_window_is_followed_whatever_the_first_layer_does(how):
    model = tiny_model("mistral", sliding_window=8)
    if how == "silent layer":
        model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    else:
        decode = model.model.forward
        model.model.forward = functools.wraps(decode)(lambda *args, **kwargs: decode(*args, **kwargs))
    assert Target(model).windows == {"sliding_attention": 8}
