"""Recipes for AWQ and SmoothQuant, judged by the rule that these tools apply."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pathspace as ps

yaml = pytest.importorskip("yaml")


def mappings(model, *inputs):
    """(writer, readers) of every pair that the recipe of form awq hands to the tool."""
    pairs = ps.smoothing_pairs(ps.trace(model, *inputs))
    exact = [pair for pair in pairs if pair.exact]
    return [(m["prev_op"], m["layers"]) for m in json.loads(ps.smoothing_recipe(exact, "awq"))]


def matrix(module):
    """The weight as (outputs, inputs), also of the Conv1D of transformers."""
    return module.weight.t() if type(module).__name__ == "Conv1D" else module.weight


def logits(model, *inputs):
    with torch.no_grad():
        found = model(*inputs)
    return getattr(found, "logits", found)


@torch.no_grad()
def changed(model, writer, readers, *inputs):
    """Change of the outputs when the tools' rule is applied: one scale for each input column of the
    readers, by which the last that many rows of the writer are divided."""
    twin = copy.deepcopy(model)
    before, first = twin.get_submodule(writer), twin.get_submodule(readers[0])
    count = matrix(first).shape[1]
    s = torch.exp(0.5 * torch.randn(count, generator=torch.Generator().manual_seed(0)))
    weight = before.weight if before.weight.dim() == 1 else matrix(before)
    if weight.shape[0] < count:
        return float("inf")
    weight[-count:].div_(s if weight.dim() == 1 else s[:, None])
    if getattr(before, "bias", None) is not None:
        before.bias[-count:].div_(s)
    for name in readers:
        matrix(twin.get_submodule(name)).mul_(s)
    old, new = logits(model, *inputs), logits(twin, *inputs)
    return float((new - old).abs().max() / old.abs().max())


def worst(model, *inputs):
    """The mappings under which the outputs change, with the change."""
    with torch.no_grad():
        [p.mul_(4) for p in model.parameters() if p.dim() > 1]
    found = {}
    for writer, readers in mappings(model, *inputs):
        change = changed(model, writer, readers, *inputs)
        if change > 1e-4:
            found[writer] = change
    return found


def language_model(name, config, **settings):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = getattr(transformers, config)(vocab_size=32, use_cache=False, **settings)
    return getattr(transformers, name)(made).eval(), torch.randint(0, 32, (2, 5))


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


BIGCODE = {"n_embd": 32, "n_layer": 1, "n_head": 4, "multi_query": True}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Phi3", SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}),
        ("GPTNeoX", SIZES),
        ("GPTBigCode", BIGCODE),
        ("Llama", SIZES | {"num_key_value_heads": 2}),
    ],
)
def test_mappings_keep_the_function_of_fused_shared_and_interleaved_heads(family, sizes):
    model, ids = language_model(f"{family}ForCausalLM", f"{family}Config", **sizes)
    assert not worst(model, ids)


# --- patterns


class Head(nn.Module):
    """A transformer with names like those of timm: norm at the top, q_norm inside."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.embed, self.norm, self.head = (
            nn.Linear(6, width),
            nn.LayerNorm(width),
            nn.Linear(width, 3),
        )
        self.heads, self.norm1 = heads, nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = (nn.LayerNorm(width // heads) for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        n, t, d = x.shape
        parts = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        h = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.head(self.norm(x + self.proj(h.transpose(1, 2).reshape(n, t, d))))


def resolved(model, *inputs):
    """Modules that the names of each mapping match: those of the writer and of the readers."""
    pairs = ps.smoothing_pairs(ps.trace(model, *inputs))
    recipe = yaml.safe_load(ps.smoothing_recipe(pairs))
    names = [name for name, _ in model.named_modules() if name]

    def match(text):
        exact = not text.startswith("re:")
        return {n for n in names if (n == text if exact else re.match(text[3:], n))}

    rules = recipe["default_stage"]["default_modifiers"]["AWQModifier"]["mappings"]
    found = [
        (match(rule["smooth_layer"]), [match(text) for text in rule["balance_layers"]])
        for rule in rules
    ]
    meant = [(p.writers[0], set(p.readers)) for p in pairs if len(p.writers) == 1]
    return found, meant


def test_a_pattern_matches_no_other_modules():
    found, meant = resolved(Head(), torch.randn(2, 5, 6))
    writers = {writer for writer, _ in meant}
    assert all(matched <= writers for matched, _ in found)
    assert any(matched == {"norm"} for matched, _ in found)


def test_a_sequential_gets_the_names_of_its_layers():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    found, meant = resolved(model, torch.randn(3, 4))
    assert [(min(w), {min(r) for r in readers}) for w, readers in found] == meant
    assert all(len(w) == 1 and all(len(r) == 1 for r in readers) for w, readers in found)


class Mixed(nn.Module):
    """Two kinds of layers under one norm's name: dense first, gated later."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict() for _ in range(3))
        for number, layer in enumerate(self.layers):
            layer["norm"], layer["down"] = nn.LayerNorm(8), nn.Linear(12, 8)
            layer["up"] = nn.Linear(8, 12)
            if number:
                layer["gate"] = nn.Linear(8, 12)

    def forward(self, x):
        for layer in self.layers:
            y = layer["norm"](x)
            h = layer["up"](y)
            x = x + layer["down"](F.silu(layer["gate"](y)) * h if "gate" in layer else F.relu(h))
        return x


def test_layers_of_two_kinds_get_patterns_of_their_own():
    model = Mixed()
    found, meant = resolved(model, torch.randn(2, 8))
    wanted = dict(meant)
    for writers, readers in found:
        allowed = set().union(*(wanted[writer] for writer in writers))
        assert set().union(*readers) == allowed
        assert len({frozenset(r.rpartition(".")[2] for r in wanted[w]) for w in writers}) == 1


def test_modules_without_a_weight_are_left_out():
    model = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True).eval()
    names = [
        name for pair in mappings(model, torch.randn(2, 5, 16)) for name in (pair[0], *pair[1])
    ]
    assert all(
        isinstance(getattr(model.get_submodule(n), "weight", None), nn.Parameter) for n in names
    )


class TwoWriters(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.c(torch.relu(self.a(x) + self.b(x)))


def test_a_pair_that_is_left_out_of_a_recipe_is_mentioned():
    pairs = ps.smoothing_pairs(ps.trace(TwoWriters(), torch.randn(3, 4)))
    assert any(set(pair.writers) == {"a", "b"} and pair.exact for pair in pairs)
    comments = [line for line in ps.smoothing_recipe(pairs).splitlines() if "#" in line]
    assert any("a" in line and "b" in line for line in comments)
