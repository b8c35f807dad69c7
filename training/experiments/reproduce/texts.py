"""``language`` and ``translation``: the path-space paper's Figure 4; the Markov-chain paper's Table 1 and Figure 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from pathspace.training.experiments.reproduce.experiment import Experiment, Setting
from pathspace.training.experiments.reproduce.holm import judge, positive
from pathspace.training.experiments.reproduce.paired_comparison import (
    PERCENT,
    PairedComparison,
    Show,
    draw_paired_comparison,
    hold,
)
from pathspace.training.experiments.reproduce.pictures import draw_curves, legend, panels
from pathspace.training.experiments.reproduce.record import Record, Table, judged
from pathspace.training.experiments.reproduce.trial import Trial
from pathspace.training.experiments.reproduce.tuning import Arm, versus

TAU = 3e-4
# task, epochs, examples per batch, learning rates, options
Options = tuple[tuple[str, Any], ...]
LANGUAGE_SCALES: dict[str, tuple[str, int, int, tuple[float, ...], Options]] = {
    "embedded": (
        "text-characters", 8, 32, (0.03, 0.1, 0.3, 1.0), (("hidden", 32), ("layers", 4), ("limit", 1000)),
    ),
    "fetched": ("bible-characters", 1, 64, (0.7, 2.0, 6.0), (("hidden", 64), ("layers", 1), ("limit", 24_000))),
    "full": ("enwik8", 100, 128, (10.0, 5.0, 2.5, 1.0, 0.5, 0.1), (("hidden", 1550),)),
}  # fmt: skip
LANGUAGE_DIFFERS: dict[str, tuple[str, ...]] = {
    "embedded": (
        "Data: documentation topics of Python in place of PTB, WikiText-2 and enwik8, 1000 pieces of 32 characters.",
        "Model: 4 layers of 32 units in place of 1550.",
    ),
    "fetched": (
        "Data: the King James Bible in place of PTB, WikiText-2 and enwik8: 24 000 pieces of 64 characters.",
        "Model: one layer of 64 units in place of 4 of 1550.",
        "Gradients are clipped to a norm of 1, and the learning rate falls to zero step by step, for both arms.",
    ),
    "full": (),
}


def language(setting: Setting) -> Record:
    """A stacked ReLU RNN on text, with G-SGD and with SGD."""
    scale = setting.scale
    task, epochs, batch, rates, options = LANGUAGE_SCALES[scale]
    base = Trial(task, "sgd", 0, 0, setting.budget(epochs), batch, init="unit-skeleton", options=options)
    if scale == "full":
        base = replace(base, options=(*options, ("data", str(setting.data))))
    if scale == "fetched":
        base = replace(base, schedule="linear", clip=1.0)
    arms = [
        Arm("G-SGD", replace(base, optimizer="gsgd"), rates),
        Arm("SGD", base, rates),
    ]
    record, _ = hold(
        setting,
        arms,
        [PairedComparison("G-SGD needs fewer bits per character than SGD", "G-SGD", "SGD")],
        name="language",
        title="Language model: a stack of four ReLU recurrent layers",
        source="Path space for recurrent neural networks with ReLU activations, Figure 4",
        paper=Table(
            ("data", "finding"),
            (
                ("PTB, WikiText-2 (perplexity)", "G-SGD below SGD and Path-SGD"),
                ("PTB-c, enwik8 (bits per character)", "G-SGD below SGD and Path-SGD"),
            ),
        ),
        differs=(
            "The paper's Figure 4 gives its numbers as bars only, so no size of the effect is put on trial.",
            *LANGUAGE_DIFFERS[scale],
            *(
                ()
                if scale == "full"
                else (f"Passes over the data: {base.epochs}; no dropout, states not carried over.",)
            ),
            "Embedding and read-out are in path space, too; the paper has only its recurrent layers there. Path-SGD is "
            "left out: its scaling is defined for inputs that can be set to one, which tokens cannot.",
            "Both arms start from the same ±1 skeleton.",
        ),
        caption="Training loss and validation bits per character, mean over seeds and range",
        show=Show("bits per character", 1.0, ".3f"),
    )
    return record


def translation(setting: Setting) -> Record:
    """A transformer that translates, without and with the penal connection, and the efficiency of its chain."""
    full = setting.scale == "full"
    epochs = setting.budget(200 if full else 15)
    task, batch = ("wmt16", 1024) if full else ("number-words", 32)
    options: tuple[tuple[str, Any], ...] = (
        (("hidden", 512), ("layers", 6), ("data", str(setting.data))) if full else (("hidden", 32), ("limit", 600))
    )
    rates = (0.0001, 0.0003, 0.001) if full else (0.002, 0.005, 0.01)
    arms = [
        Arm(label, Trial(task, "adam", 0, 0, epochs, batch, tau=tau, options=options, efficiency=True), rates)
        for label, tau in (("transformer", 0.0), ("Markov chain", TAU))
    ]
    record, by = hold(
        setting,
        arms,
        # Claimed below, together with the efficiency.
        [],
        name="translation",
        title="Translation with and without the penal connection, and the efficiency of the chain",
        source="Rethinking skip connection model as a learnable Markov chain, Table 1 and Figure 4",
        paper=Table(
            ("task", "accuracy in %, transformer", "Markov chain", "perplexity, transformer", "Markov chain"),
            (
                ("WMT-16 DE/EN (200 epochs)", "36.4", "70.0", "33.3", "7.9"),
                ("WMT-16 DE/EN (2000 epochs)", "66.4", "70.4", "17.3", "11.3"),
                ("WMT-16 EN/DE (200 epochs)", "43.1", "71.8", "31.8", "6.3"),
                ("WMT-16 EN/DE (2000 epochs)", "68.7", "72.8", "13.4", "8.5"),
            ),
        ),
        differs=(
            *(
                ()
                if full
                else (
                    "Data: 600 numbers in words, English to German, made by the languages' rules, in place of "
                    "WMT-16. No "
                    "package this library depends on ships a German message catalogue.",
                    f"Model: one encoder and one decoder layer of 32 features in place of 6 of 512; {epochs} epochs.",
                )
            ),
            f"tau = {TAU:g} as in the paper; its strength against a mean loss depends on the batch, {batch} here.",
            "A constant learning rate, no warm-up, no decay of weights, no dropout; the norms are inside the branches.",
            "Error is one minus the accuracy of the next token, the true ones before it being given. Efficiency is the "
            "mean cosine per example with the gradient of the loss alone, on 64 validation pairs; the paper's "
            "average is "
            "not stated.",
        ),
        caption="Validation error, and efficiency of the chain, against epochs: mean over seeds and range",
        show=PERCENT,
    )
    final = {label: [o.efficiencies[-1] if o.efficiencies else 0.0 for o in m.outcomes] for label, m in by.items()}
    plain, penal = final["transformer"], final["Markov chain"]
    raised = positive(
        "the penal connection makes the chain more efficient (difference after the last epoch)",
        [b - a for a, b in zip(plain, penal, strict=True)],
        pattern="+.3f",
    )
    error = versus("the penal connection errs less", by["Markov chain"], by["transformer"], (28.2, 56.9))
    record.data["final_efficiency"] = final
    return replace(record, claims=judged(judge([error, raised])))


def draw_translation(record: Record) -> Figure:
    """Draw error and efficiency against epochs, as in the paper's Figure 4."""
    with panels(2) as (figure, axes):
        for place, arm in enumerate(record.data["arms"]):
            scaled = [[None if v is None else 100 * v for v in line] for line in arm["valid_metrics"]]
            draw_curves(axes[0], place, arm["label"], scaled)
            draw_curves(axes[1], place, arm["label"], arm["efficiencies"], first=0)
        axes[0].set(title="validation error in %", xlabel="epoch")
        axes[1].set(title="efficiency of the chain", xlabel="epoch")
        axes[1].axhline(0, color="black", linewidth=0.6)
        legend(figure, axes[0])
        return figure


LANGUAGE = Experiment(
    "language",
    "stacked ReLU RNN on text with G-SGD and SGD",
    4,
    "enwik8",
    language,
    draw_paired_comparison,
    fetched=True,
)
TRANSLATION = Experiment(
    "translation",
    "transformer with and without the penal connection",
    6,
    "WMT-16's parallel text (train.en, train.de, ...)",
    translation,
    draw_translation,
)
