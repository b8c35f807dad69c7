"""Language models as their classes build them: caches are off for the trace only."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pathspace as ps
from pathspace.checker import check
from pathspace.diagnostics import MarkovChain
from pathspace.diagnostics.parameters.cost import cost
from pathspace.diagnostics.report.page import report
from pathspace.diagnostics.signal.signal import signal
from pathspace.training import penalise_

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_rule_fails")]
WORDS = 41


class Cache:
    """Keys and values of earlier words, of a class that nobody registered anywhere."""

    def __init__(self) -> None:
        self.layers: list[SimpleNamespace] = []

    def update(self, keys: Tensor, values: Tensor) -> None:
        self.layers.append(SimpleNamespace(keys=keys, values=values))


class Language(nn.Module):
    """A language model in small, with a cache that its configuration switches on."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True, text_config=SimpleNamespace(use_cache=True))
        self.words = nn.Embedding(WORDS, 8)
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)
        self.out, self.head = nn.Linear(8, 8), nn.Linear(8, WORDS)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool | None = None
    ) -> dict[str, Any]:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        x, cache = self.words(input_ids), Cache()
        keys, values = self.keys(x), self.values(x)
        if use_cache:
            cache.update(keys, values)
        x = x + self.out(torch.softmax(x @ keys.mT, -1) @ values)
        return {"logits": self.head(x), "past_key_values": cache}


def tokens() -> Any:
    from odd_models import Words

    torch.manual_seed(0)
    ids = torch.randint(3, WORDS, (2, 7))
    return Words(input_ids=ids, attention_mask=torch.ones_like(ids))


@pytest.mark.slow
def test_the_cache_is_off_for_the_trace_and_on_for_the_user() -> None:
    model, off = Language(), Language()
    off.config = SimpleNamespace(use_cache=False)
    before = copy.deepcopy(model.config)
    certificate = ps.verify(model, kwargs=tokens())
    assert certificate.holds
    assert certificate.units == ps.trace(off, kwargs=tokens()).num_units > 8
    assert model.config == before
    with pytest.raises(ps.CaptureError):
        ps.trace(model, torch.randn(2, 7))
    assert model.config == before
    # who asks for the cache gets a statement about it: keys and values are fixed
    assert ps.trace(model, kwargs={**tokens(), "use_cache": True}).num_units < certificate.units


@pytest.mark.slow
@pytest.mark.parametrize("given", ["keywords", "position"])
def test_what_a_tokenizer_returns_is_taken_everywhere(given: str) -> None:
    model = Language().eval()
    args, kwargs = ((tokens(),), None) if given == "position" else ((), tokens())
    graph = ps.trace(model, *args, kwargs=kwargs)
    judged = check(ps.proof(graph.skeleton(), "language"), None, model, args, kwargs)
    assert judged.accepted and judged.compared == "outputs", judged.reason
    chain = MarkovChain.trace(model, *args, kwargs=kwargs)
    assert len(chain) == 1
    assert chain.observe(lambda outputs, _: outputs["logits"].square().mean(), tokens(), None)
    assert signal(model, *args, kwargs=kwargs, jvp=False).to_dicts()
    assert cost(model, *args, kwargs=kwargs).parameters
    page = report(model, *args, kwargs=kwargs)
    absent = {name: part["absent"] for name, part in page.facts.items() if "absent" in part}
    assert not {"certificate", "chain", "signal"} & set(absent), absent
    trained = penalise_(model, *args, kwargs=kwargs, tau=1e-3)
    trained(**tokens())["logits"].sum().backward()
    assert model.config.use_cache is True


def test_a_filled_cache_is_an_input_and_stays_as_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=40,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(**tokens(), past_key_values=cache)
    length = cache.get_seq_length()
    step = {"input_ids": torch.tensor([[3], [4]]), "past_key_values": cache}
    certificate = ps.verify(model, kwargs=step)
    assert certificate.holds
    assert cache.get_seq_length() == length == 7
