"""Rounding a real language model in other bases of its features.

SmolLM2-135M-Instruct (135 million weights, see ``real_models``): perplexity on the first 768 tokens
of Python's own manual on its statements, with weights of linear layers rounded with one step per
tensor, or their inputs with one step per token. The bases: as trained; random and Hadamard matrices
where they are orthogonal (:func:`pathspace.rotate_`); those that :func:`pathspace.choose_gauge`
takes on other text; and a rotation of the stream and of value features with the places written by
hand, as QuaRot does.

``python -m benchmarks.rotations`` (with ``tests`` in the path) keeps the figures in
``docs/data/rotations.json`` and writes the table of the page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch
from real_models import TOKENS, Llama, perplexity
from torch import Tensor, nn

import pathspace as ps
from benchmarks.checkpoint import peak
from benchmarks.figures import keep, markdown, write
from pathspace.rotations.elements import hadamard

NAME, PAGE = "rotations", "rotations.md"


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
        for norm, readers in (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.post_attention_layernorm, (inner.up_proj, inner.gate_proj)),
        ):
            for reader in readers:
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


def row(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Perplexities of one basis."""
    found = {"float32": perplexity(model, tokens)}
    for bits in (8, 6):
        with rounded_weights(model, bits):
            found[f"weights, {bits} bits"] = perplexity(model, tokens)
        with rounded_inputs(model, bits):
            found[f"activations, {bits} bits"] = perplexity(model, tokens)
    with rounded_weights(model, 8), rounded_inputs(model, 8):
        found["both, 8 bits"] = perplexity(model, tokens)
    return found


def chosen(model: nn.Module, found: Any) -> nn.Module:
    """The basis that rounds weights and activations to 8 bits with least noise, on other text."""
    tokens = Llama().rows[:16].reshape(8, 1, -1)
    batches = [{"input_ids": batch} for batch in tokens]
    noise = ps.Noise(bits=8, activations=8, weights="fisher")
    return ps.rotate_(model, found, ps.choose_gauge(model, found, noise, batches))


def random(model: nn.Module, found: Any) -> nn.Module:
    lengths = {space.name: "random" for space in found.free if space.group == "O"}
    values = {s.name: "hadamard" for s in found.free if s.group == "GL" and s.size > 1}
    return ps.rotate_(model, found, lengths | values)


BASES: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "as trained": lambda model, _: model,
    "random": random,
    "Hadamard": lambda model, found: ps.rotate_(model, found, "hadamard"),
    "chosen": chosen,
    "by hand": lambda model, _: by_hand(model),
}


def measured(name: str) -> tuple[dict[str, float], dict[str, float]]:
    """Perplexities of a basis; processor time and the largest memory until it was there."""
    torch.set_num_threads(1)
    model, tokens = Llama().model(), Llama().held_out
    found = ps.spaces(model, kwargs={"input_ids": tokens[:, :16]})
    start = time.process_time()
    other = BASES[name](model, found)
    cost = {"processor time, s": time.process_time() - start, "memory, GB": peak()}
    return row(other, tokens), cost


def main() -> None:
    rows, costs = {}, {}
    # (each in a process of its own, whose memory is its own)
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in BASES:
            rows[name], costs[name] = pool.apply(measured, (name,))
            keep(NAME, {"tokens": TOKENS, "rows": rows, "costs": costs})
    write(PAGE, NAME, table(rows, costs))


def table(rows: Mapping[str, Mapping[str, float]], costs: Mapping[str, Mapping[str, float]]) -> str:
    """Perplexities and costs as a table, a column for each basis."""
    lines = [
        [kind, *(f"{found[kind]:.{digits}f}" for found in every.values())]
        for every, digits in ((rows, 2), (costs, 1))
        for kind in next(iter(every.values()))
    ]
    return markdown(" | ".join(["rounding", *rows]), lines)


if __name__ == "__main__":
    main()
