"""Rounding a real language model in other bases of its features.

SmolLM2-135M-Instruct (135 million weights, see ``real_models``): perplexity on the first 768 tokens
of Python's own manual on its statements, and of the GNU General Public License (which comes with
python-flint), with weights of linear layers rounded with one step per tensor, or their inputs with
one step per token. The bases: as trained; random and Hadamard matrices where they are orthogonal
(:func:`pathspace.rotate_`); those that :func:`pathspace.choose_gauge` takes on other text for what
is rounded; and a rotation of the stream and of value features with the places written by hand, as
QuaRot does.

``python -m benchmarks.rotations`` (with ``tests`` in the path) keeps the figures in
``docs/data/rotations.json`` and writes the table of the page.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from real_models import TOKENS, Llama, perplexity
from torch import Tensor, nn

import pathspace as ps
from benchmarks.figures import keep, markdown, write
from benchmarks.measure import alone, peak
from pathspace.rotations.elements import hadamard

NAME, PAGE = "rotations", "rotations.md"
TEXTS = ("manual", "licence")


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """All linear layers but the head."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    ]


def rounded(x: Tensor, bits: int, dim: int | None = None) -> Tensor:
    """Symmetric rounding, one step for all or for each row."""
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    step = largest.clamp_min(1e-12) / (2 ** (bits - 1) - 1)
    return (x / step).round() * step


@contextmanager
def rounded_weights(model: nn.Module, bits: int) -> Iterator[None]:
    kept = [layer.weight.data for layer in linear_layers(model)]
    for layer in linear_layers(model):
        layer.weight.data = rounded(layer.weight.data, bits)
    yield
    for layer, old in zip(linear_layers(model), kept, strict=True):
        layer.weight.data = old


@contextmanager
def rounded_inputs(model: nn.Module, bits: int) -> Iterator[None]:
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: (rounded(args[0], bits, -1),))
        for layer in linear_layers(model)
    ]
    yield
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def by_hand(model: Any, seed: int = 0) -> nn.Module:
    """What QuaRot does to a Llama, without the rotations that cost time when the model runs."""
    generator = torch.Generator().manual_seed(seed)
    stream = hadamard(model.config.hidden_size, generator)
    table = model.model.embed_tokens.weight
    model.lm_head.weight = nn.Parameter(table.detach().clone())
    model.config.tie_word_embeddings = False

    def turn(weight: Tensor, matrix: Tensor, gain: Tensor | None = None) -> None:
        own = weight.double() if gain is None else weight.double() * gain.double()
        weight.copy_(own @ matrix.T)

    for block in model.model.layers:
        attention, inner = block.self_attn, block.mlp
        readers = {
            block.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
            block.post_attention_layernorm: (inner.up_proj, inner.gate_proj),
        }
        for norm, layers in readers.items():
            for reader in layers:
                turn(reader.weight, stream, norm.weight)
            norm.weight.fill_(1)
        for writer in (attention.o_proj, inner.down_proj):
            writer.weight.copy_(stream @ writer.weight.double())
        head = hadamard(attention.head_dim, generator)
        values = attention.v_proj.weight.double().unflatten(0, (-1, attention.head_dim))
        attention.v_proj.weight.copy_((head @ values).flatten(0, 1))
        outs = attention.o_proj.weight.double().unflatten(1, (-1, attention.head_dim))
        attention.o_proj.weight.copy_((outs @ head.T).flatten(1))
    turn(model.lm_head.weight, stream, model.model.norm.weight)
    model.model.norm.weight.fill_(1)
    turn(table, stream)
    return model  # type: ignore[no-any-return]


def read(text: str) -> Tensor:
    """The first tokens of a text."""
    if text == "manual":
        return Llama().held_out
    files = importlib.metadata.files("python-flint") or []
    path = next(path for path in files if path.match("gmp-*/COPYING"))
    words = path.locate().read_text(encoding="utf-8")
    return Llama().words(words, return_tensors="pt").input_ids[:, :TOKENS]  # type: ignore[no-any-return]


# what is rounded: bits of weights, and of activations
ROUNDED = {
    "weights, 8 bits": (8, None),
    "activations, 8 bits": (None, 8),
    "weights, 6 bits": (6, None),
    "activations, 6 bits": (None, 6),
    "both, 8 bits": (8, 8),
}


def row(
    model: nn.Module, texts: Mapping[str, Tensor], kinds: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Text -> perplexities of one basis."""
    found = {text: {"float32": perplexity(model, tokens)} for text, tokens in texts.items()}
    for kind in kinds:
        weights, inputs = ROUNDED[kind]
        with (
            rounded_weights(model, weights) if weights else nullcontext(),
            rounded_inputs(model, inputs) if inputs else nullcontext(),
        ):
            for text, tokens in texts.items():
                found[text][kind] = perplexity(model, tokens)
    return found


def chosen(model: nn.Module, found: Any, noise: ps.Noise) -> nn.Module:
    """The basis with the least noise on text of other pages of the manual."""
    batches = [{"input_ids": batch} for batch in Llama().rows[:16].reshape(8, 1, -1)]
    return ps.rotate_(model, found, ps.choose_gauge(model, found, noise, batches))


def random(model: nn.Module, found: Any) -> nn.Module:
    lengths = {space.name: "random" for space in found.free if space.group == "O"}
    values = {s.name: "hadamard" for s in found.free if s.group == "GL" and s.size > 1}
    return ps.rotate_(model, found, lengths | values)


BASES: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "as trained": lambda model, _: model,
    "random": random,
    "Hadamard": lambda model, found: ps.rotate_(model, found, "hadamard"),
    "by hand": lambda model, _: by_hand(model),
}
# the basis is chosen for the rounding of these rows
CHOSEN = {
    ps.Noise(bits=6): ("weights, 8 bits", "weights, 6 bits"),
    ps.Noise(bits=None, activations=8): ("activations, 8 bits", "activations, 6 bits"),
    ps.Noise(bits=8, activations=8): ("both, 8 bits",),
}


def measured(basis: str | ps.Noise) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Perplexities of a basis; processor time and the largest memory until it was there."""
    torch.set_num_threads(1)
    model, texts = Llama().model(), {text: read(text) for text in TEXTS}
    found = ps.spaces(model, kwargs={"input_ids": texts["manual"][:, :16]})
    start = time.process_time()
    if isinstance(basis, str):
        kinds, other = tuple(ROUNDED), BASES[basis](model, found)
    else:
        kinds, other = CHOSEN[basis], chosen(model, found, basis)
    cost = {"processor time, s": time.process_time() - start, "memory, GB": peak() / 1e9}
    return row(other, texts, kinds), cost


def main() -> None:
    rows: dict[str, dict[str, dict[str, float]]] = {text: {} for text in TEXTS}
    costs: dict[str, dict[str, float]] = {}
    for basis in (*BASES, *CHOSEN):
        name = basis if isinstance(basis, str) else "chosen"
        found, cost = alone(measured, basis)
        for text in TEXTS:
            rows[text].setdefault(name, {}).update(found[text])
        # (of several choices the dearest)
        costs[name] = max(costs.get(name, cost), cost, key=lambda one: one["processor time, s"])
        keep(NAME, {"tokens": TOKENS, "rows": rows, "costs": costs})
    write(PAGE, NAME, table(rows, costs))


def table(
    rows: Mapping[str, Mapping[str, Mapping[str, float]]],
    costs: Mapping[str, Mapping[str, float]],
) -> str:
    """Perplexities and costs as a table, a column for each basis."""
    lines = [
        [text, kind, *(f"{found[kind]:.2f}" for found in rows[text].values())]
        for text in rows
        for kind in ("float32", *ROUNDED)
    ]
    lines += [
        ["", kind, *(f"{costs[name][kind]:.1f}" for name in rows["manual"])]
        for kind in ("processor time, s", "memory, GB")
    ]
    return markdown(" | ".join(["text", "rounding", *rows["manual"]]), lines, texts=2)


if __name__ == "__main__":
    main()
