"""``image``, ``depth`` and ``rcnn``: convolutional networks on small images.

The Markov-chain paper's Tables 2 and 3 (penal connection or not) and the path-space paper's Table 2 (G-SGD or SGD).
"""

from __future__ import annotations

from typing import Any

from pathspace.training.experiments.reproduce.experiment import Experiment, Setting
from pathspace.training.experiments.reproduce.paired_comparison import PairedComparison, draw_paired_comparison, hold
from pathspace.training.experiments.reproduce.record import Record, Table
from pathspace.training.experiments.reproduce.trial import Trial
from pathspace.training.experiments.reproduce.tuning import Arm

MARKOV = "Rethinking skip connection model as a learnable Markov chain"
PATHS = "Path space for recurrent neural networks with ReLU activations"
BATCH = 64
RATES, ADAM_RATES = (0.01, 0.03, 0.1), (0.003, 0.01, 0.03)
DEPTH_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
TAUS = (3e-7, 3e-5, 3e-3)
DEPTHS = (8, 20)
# ResNet50 in the paper's Table 2: errors with 3e-9, 3e-8, 3e-7, 3e-6, each beside the baseline's.
PRINTED = ((21.0, 20.8), (20.6, 20.8), (20.8, 20.8), (20.7, 20.8))
DIGITS = "Data: scikit-learn's 1797 digits of 8 × 8 pixels in place of {}."
SMALL = "{} epochs at a constant learning rate, batches of 64, momentum 0.9, no decay and no augmentation."


def image(setting: Setting) -> Record:
    """A residual network without the penal connection, and with three strengths of it."""
    differs: tuple[str, ...]
    if setting.scale == "full":
        arms, differs = (
            _cifar(setting, (56,), (3e-9, 3e-8, 3e-7, 3e-6)),
            (
                "CIFAR-10 and a residual network of 56 layers in place of ImageNet, which this command does not "
                "attempt.",
            ),
        )
        taus: tuple[float, ...] = (3e-9, 3e-8, 3e-7, 3e-6)
        plain = "56 layers"
    else:
        epochs, taus, plain = setting.budget(10), TAUS, "baseline"
        options: tuple[tuple[str, Any], ...] = (("hidden", 8), ("network", "residual"), ("depth", 3))
        arms = [
            Arm(
                _label(plain, tau),
                Trial("digits-images", "adam", 0, 0, epochs, BATCH, tau=tau, options=options),
                ADAM_RATES,
            )
            for tau in (0.0, *taus)
        ]
        differs = (
            DIGITS.format("ImageNet"),
            "Model: three residual blocks of 8 channels without norms in place of ResNet50, ViT, DeiT and Swin.",
            SMALL.format(epochs).replace("momentum 0.9", "Adam"),
            "tau: 3e-7, 3e-5 and 3e-3 in place of 3e-9 to 3e-6; how strong one is depends on batch, sizes and loss.",
        )
    record, _ = hold(
        setting,
        arms,
        [
            PairedComparison(
                f"tau = {tau:g} errs less than the baseline", _label(plain, tau), _label(plain, 0.0), printed
            )
            for tau, printed in zip(taus, PRINTED if setting.scale == "full" else (None,) * len(taus), strict=True)
        ],
        name="image",
        title="Image classification with and without the penal connection",
        source=f"{MARKOV}, Table 2",
        paper=Table(
            ("accuracy in %", "baseline", "tau 3e-9", "3e-8", "3e-7", "3e-6"),
            (
                ("ResNet50", "79.2", "79.0", "79.4", "79.2", "79.3"),
                ("ViT-S/16-224", "77.8", "78.0", "78.1", "78.0", "77.8"),
                ("DeiT-S/16-224", "79.9", "79.9", "80.1", "80.0", "79.8"),
                ("Swin-S/4-7-224", "83.3", "83.2", "83.5", "83.3", "83.1"),
            ),
        ),
        differs=(
            *differs,
            "The paper's last column takes the best of four strengths on its test set, without repeated seeds; here "
            "each strength is a claim of its own, and p-values are corrected for their number.",
        ),
        caption="Training loss and validation error, mean over seeds and range",
    )
    return record


def depth(setting: Setting) -> Record:
    """Residual networks of growing depth, without and with the penal connection."""
    if setting.scale == "full":
        depths: tuple[int, ...] = (20, 32, 44, 56)
        tau = 3e-9
        arms = _cifar(setting, depths, (tau,))
        differs: tuple[str, ...] = (
            "A constant learning rate in place of steps of ten at epochs 100 and 150; no decay.",
        )
    else:
        epochs, depths, tau = setting.budget(8), DEPTHS, 3e-4
        arms = [
            Arm(
                _label(f"{layers} layers", strength),
                Trial(
                    "digits-images",
                    "momentum",
                    0,
                    0,
                    epochs,
                    BATCH,
                    tau=strength,
                    options=(("hidden", 4), ("network", "resnet"), ("depth", layers)),
                ),
                DEPTH_RATES,
            )
            for layers in depths
            for strength in (0.0, tau)
        ]
        differs = (
            DIGITS.format("CIFAR-10, CIFAR-100 and ImageNet"),
            "Model: the same residual networks with 4 channels in the first stage in place of 16, 8 and 20 layers.",
            SMALL.format(epochs),
            f"tau = {tau:g} in place of 3e-9; smaller strengths were not tried here.",
        )
    printed = {20: (7.7, 7.9), 32: (6.8, 7.4), 44: (6.6, 6.8), 56: (6.6, 7.8)}
    record, _ = hold(
        setting,
        arms,
        [
            PairedComparison(
                f"{layers} layers: the penal connection errs less",
                _label(f"{layers} layers", tau),
                _label(f"{layers} layers", 0.0),
                printed.get(layers),
            )
            for layers in depths
        ],
        name="depth",
        title="Residual networks over depth, with and without the penal connection",
        source=f"{MARKOV}, Table 3",
        paper=Table(
            ("accuracy in % on CIFAR-10, layers", "20", "32", "44", "56"),
            (("ResNet", "92.1", "92.6", "93.2", "92.2"), ("Markov chain", "92.3", "93.2", "93.4", "93.4")),
        ),
        differs=differs,
        caption="Training loss and validation error, mean over seeds and range",
    )
    return record


def rcnn(setting: Setting) -> Record:
    """A recurrent convolutional network with G-SGD and with SGD, both with momentum."""
    full = setting.scale == "full"
    epochs = setting.budget(200 if full else 10)
    width, layers = (96, 4) if full else (8, 2)
    task = "cifar10" if full else "digits-images"
    data: tuple[tuple[str, Any], ...] = (("data", str(setting.data)),) if full else ()
    options = (("hidden", width), ("network", "recurrent"), ("depth", layers), *data)
    arms = [
        Arm(label, Trial(task, kind, 0, 0, epochs, BATCH, init="unit-skeleton", options=options), RATES)
        for label, kind in (("G-SGD", "gmomentum"), ("SGD", "momentum"))
    ]
    record, _ = hold(
        setting,
        arms,
        [PairedComparison("G-SGD errs less than SGD", "G-SGD", "SGD", (7.38, 7.47) if full else (0.36, 0.38))],
        name="rcnn",
        title="Recurrent convolutional network, unfolded three times, with G-SGD and with SGD",
        source=f"{PATHS}, Table 2",
        paper=Table(
            ("error in %", "MNIST 32", "64", "96", "CIFAR-10 96", "128", "160", "CIFAR-100 96", "128", "160"),
            (
                ("G-SGD", "0.36", "0.31", "0.31", "7.38", "6.61", "6.52", "31.52", "29.64", "28.78"),
                ("SGD", "0.38", "0.37", "0.39", "7.47", "7.53", "7.54", "33.34", "31.51", "29.67"),
            ),
        ),
        differs=(
            *(
                ()
                if full
                else (
                    DIGITS.format("MNIST, CIFAR-10 and CIFAR-100"),
                    f"Model: {layers} recurrent layers of {width} maps in place of 4 of 32 to 160.",
                )
            ),
            SMALL.format(epochs),
            "Both arms start from the same ±1 skeleton. Momentum of G-SGD is that of path values. With batch norm, "
            "the norm's weights are part of the paths, as this library reads them; the paper does not say how "
            "it treats them.",
        ),
        caption="Training loss and validation error, mean over seeds and range",
    )
    return record


def _label(plain: str, tau: float) -> str:
    return f"{plain}, tau {tau:g}" if tau else plain


def _cifar(setting: Setting, depths: tuple[int, ...], taus: tuple[float, ...]) -> list[Arm]:
    epochs = setting.budget(200)
    return [
        Arm(
            _label(f"{layers} layers", tau),
            Trial(
                "cifar10",
                "momentum",
                0,
                0,
                epochs,
                128,
                tau=tau,
                options=(("hidden", 16), ("network", "resnet"), ("depth", layers), ("data", str(setting.data))),
            ),
            RATES,
        )
        for layers in depths
        for tau in (0.0, *taus)
    ]


IMAGE = Experiment(
    "image",
    "residual network with and without the penal connection",
    4,
    "CIFAR-10's python batches",
    image,
    draw_paired_comparison,
)
DEPTH = Experiment(
    "depth",
    "residual networks of growing depth, penal connection or not",
    4,
    "CIFAR-10's python batches",
    depth,
    draw_paired_comparison,
)
RCNN = Experiment(
    "rcnn",
    "recurrent convolutional network with G-SGD and SGD",
    3,
    "CIFAR-10's python batches",
    rcnn,
    draw_paired_comparison,
)
