"""The embedded target at work: identity in float32 on every evaluation prompt. Slow; run by `make slow`."""

import pytest

import selfspec
from selfspec.api import Spec
from selfspec.data.corpus import PythonSource
from selfspec.data.cut_prompts import cut_prompts

pytestmark = pytest.mark.slow


TRAINED = ["tiny-medusa", "tiny-early-exit", "tiny-eagle3"]
OTHERS = ["prompt_lookup", "lookahead", "tiny-eagle3+prompt_lookup"]


@pytest.fixture(scope="module", params=[*TRAINED, *OTHERS])
def spec(request) -> Spec:
    return selfspec.load(request.param, target="tiny-target", dtype="float32")


@pytest.fixture(scope="module")
def prompts(spec) -> list[list[int]]:
    return cut_prompts(PythonSource().evaluation(), spec.tokenizer, 24, 128)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("batch", [1, 4])
def test_identical_on_every_prompt(spec, prompts, batch, temperature):
    for first in range(0, len(prompts), batch):
        rows = prompts[first : first + batch]
        plain = spec.autoregressive(rows, 128, temperature, seed=first)
        for nodes in (16, 32, "auto"):
            assert spec.generate(rows, 128, temperature, seed=first, nodes=nodes).token_ids == plain.token_ids


def test_hybrids_accept_more_than_their_members():
    taus = {}
    for name in ("tiny-medusa", "prompt_lookup", "tiny-medusa+prompt_lookup"):
        spec = selfspec.load(name, target="tiny-target", dtype="float32")
        texts = cut_prompts(PythonSource().evaluation(), spec.tokenizer, 6, 128)
        taus[name] = spec.generate(texts, 128, nodes=16).stats.acceptance_length
    assert taus["tiny-medusa+prompt_lookup"] > 1.1 * max(taus["tiny-medusa"], taus["prompt_lookup"])
