"""What 16 bits leave of the penalty: `penalise_` and the explicit loss, against the
explicit loss in float32.

``PYTHONPATH=tests python -m benchmarks.penal_bf16`` measures (one minute on one core) and writes
``docs/data/penal-bf16.json`` and the table of ``docs/markov-chain.md``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.figures import keep, markdown, write
from benchmarks.penalty import Encoder, residual_cnn
from pathspace.diagnostics import MarkovChain
from pathspace.diagnostics.chain.addition_hooks import Addition, Sites
from pathspace.training import penalise_

NAME, PAGE = "penal-bf16", "markov-chain.md"
TAUS, SEEDS = (3e-4, 3e-3), range(6)
Loss = Callable[[nn.Module], Tensor]


def gpt2() -> tuple[nn.Module, Tensor]:
    """Four blocks of width 64."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    sizes = {"vocab_size": 101, "n_positions": 32, "n_embd": 64, "n_layer": 4, "n_head": 4}
    config = GPT2Config(**sizes, **off, bos_token_id=None, eos_token_id=None)
    return GPT2LMHeadModel(config), torch.randint(0, 101, (4, 32))


def llama() -> tuple[nn.Module, Tensor]:
    """Four blocks of width 64."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=101, num_attention_heads=4, use_cache=False, **sizes)
    return LlamaForCausalLM(config), torch.randint(0, 101, (4, 32))


def encoder() -> tuple[nn.Module, Tensor]:
    """Four pre-norm blocks of width 64."""
    model = nn.Sequential(*(Encoder(64, 4) for _ in range(4)), nn.Linear(64, 10))
    return model, torch.randn(4, 32, 64)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "pre-norm encoder": encoder,
    "residual CNN": residual_cnn,
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of language models, or the cross-entropy of a classification by position."""
    if not x.is_floating_point():
        return model(input_ids=x, labels=x).loss  # type: ignore[no-any-return]
    weight = next(model.parameters()).dtype
    scores = model(x.to(weight)).float().flatten(0, -2)
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)) % 10)


def gradient(
    model: nn.Module, x: Tensor, cast: bool, chain: MarkovChain | None = None, tau: float = 0.0
) -> Tensor:
    """All gradients in one vector; with a chain, the penalty is written into the loss."""
    known, squares = chain.by_site() if chain else {}, [torch.zeros(())]

    def note(addition: Addition) -> Tensor:
        if addition.site in known:
            node = known[addition.site]
            squares.append((node.scale * node.split(addition)[1].clone()).square().sum().float())
        return addition.run()

    with torch.autocast("cpu", torch.bfloat16, enabled=cast), Sites(note).following(model):
        loss = loss_of(model, x)
    found = torch.autograd.grad(
        loss + tau / 2 * torch.stack(squares).sum(), list(model.parameters())
    )
    return torch.cat([value.double().flatten() for value in found])


def compared(part: Tensor, exact: Tensor) -> tuple[float, float]:
    """Cosine with the exact part, and how much of it is there."""
    product = float(part @ exact)
    return product / float(part.norm() * exact.norm()), product / float(exact @ exact)


def measured(name: str) -> list[dict[str, Any]]:
    """The lines of one model, means over seeds, and by how much `penalise_` is closer."""
    found: dict[tuple[str, float], list[tuple[float, ...]]] = {}
    for seed, cast in product(SEEDS, (False, True)):
        torch.manual_seed(seed)
        model, x = MODELS[name]()
        chain = MarkovChain.trace(model, x)
        low = copy.deepcopy(model) if cast else copy.deepcopy(model).bfloat16()
        plain = gradient(low, x, cast)
        ours = penalise_(
            copy.deepcopy(low), x if cast or not x.is_floating_point() else x.bfloat16(), tau=0.0
        )
        for tau in TAUS:
            exact = gradient(model, x, False, chain, tau) - gradient(model, x, False)
            explicit = gradient(low, x, cast, chain, tau) - plain
            ours.penal_connection.tau = tau  # type: ignore[union-attr]
            share = float(exact.norm() / plain.norm())
            by_hand = compared(explicit, exact)
            line = share, *by_hand, *compared(gradient(ours, x, cast) - plain, exact)
            found.setdefault(("autocast" if cast else "bfloat16", tau), []).append(line)
    names = ("part", "explicit_cosine", "explicit_kept", "penalize_cosine", "penalize_kept")
    rows = []
    for (mode, tau), lines in found.items():
        means = dict(zip(names, map(mean, zip(*lines, strict=True)), strict=True))
        row = {"model": name, "mode": mode, "tau": tau, **means}
        closer = [line[3] - line[1] for line in lines]
        rows.append({**row, "closer": mean(closer), "error": stdev(closer) / len(closer) ** 0.5})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    head = (
        "model | mode | tau | share of the gradient | explicit: cosine | kept | ours: cosine | kept"
        " | closer by"
    )
    lines = []
    for row in rows:
        cells = [row["model"], row["mode"], f"{row['tau']:g}", f"{row['part']:.2g}"]
        cells += [f"{row[key]:.3f}" for key in list(row)[4:8]]
        lines.append([*cells, f"{row['closer']:+.1e} ± {row['error']:.0e}"])
    return markdown(head, lines, texts=2)


def main() -> None:
    """Measure, and write the data and the table."""
    torch.set_num_threads(1)
    rows = [row for name in MODELS for row in measured(name)]
    keep(NAME, rows)
    write(PAGE, NAME, table(rows))


if __name__ == "__main__":
    main()
