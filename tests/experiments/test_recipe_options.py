"""What the papers' settings need of models and optimizers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pathspace.errors import InputError
from pathspace.training.experiments.models import DeepResNet, Translator, swin
from pathspace.training.experiments.recipe import Recipe, prepare
from pathspace.training.experiments.reproduce.trial import Trial, run_trial
from pathspace.training.experiments.tasks import Task, load_task


@pytest.fixture(scope="module")
def task() -> Task:
    return load_task("digits-rows", hidden=4)


@pytest.mark.parametrize("kind", ["adam", "gadam", "AdamW"])
def test_decay_rates_of_moments_reach_the_optimizer(kind: str, task: Task) -> None:
    _, optimizer = prepare(task, Recipe(kind, betas=(0.9, 0.98), eps=1e-9))
    assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {
        ((0.9, 0.98), 1e-9)
    }
    _, plain = prepare(task, Recipe(kind))
    assert {(group["betas"], group["eps"]) for group in plain.param_groups} == {
        ((0.9, 0.999), 1e-8)
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"optimizer": "sgd", "betas": (0.9, 0.98)}, "sgd has no betas; leave it out"),
        (
            {"optimizer": "adam", "betas": (0.9, 1.0)},
            "found betas=1.0, expected a number of at least 0",
        ),
        ({"optimizer": "adam", "eps": 0.0}, "found eps=0.0, expected a positive number"),
    ],
)
def test_wrong_moments_are_told_in_one_sentence(
    wrong: dict[str, object], words: str, task: Task
) -> None:
    with pytest.raises(InputError, match=words):
        prepare(task, Recipe(**wrong))  # type: ignore[arg-type]


def test_the_original_transformer_is_that_of_its_paper() -> None:
    """65 million weights with 37,000 tokens: 512 wide, 2048 inside, 6 layers, 8 heads."""
    with torch.device("meta"):
        model = Translator(37_000, 100, 512, 8, 2048, 6, 100, 0.1, original=True)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(63e6, rel=0.01)
    assert model.readout.weight is model.embedding.weight and model.readout.bias is None
    assert not any(layer.norm_first for layer in (*model.encoder, *model.decoder))
    assert not list(model.encoder_norm.parameters())


@pytest.mark.parametrize(
    ("depth", "weights"),
    [(18, 11_689_512), (50, 25_557_032)],
)
def test_deep_residual_networks_have_the_published_sizes(depth: int, weights: int) -> None:
    with torch.device("meta"):
        model = DeepResNet(depth)
    assert sum(p.numel() for p in model.parameters()) == weights
    kernels = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1)]
    assert model.stem(torch.zeros(1, 3, 224, 224, device="meta")).shape[2:] == (56, 56)
    assert kernels[0].kernel_size == (7, 7)
    with pytest.raises(InputError, match="of 20 layers does not exist; give one of: 18, 34"):
        DeepResNet(20)


def photographs(folder: Path, count: int = 3) -> Path:
    """Write the four files of an ImageNet of a few images."""
    drawn = np.random.default_rng(0)
    for part in ("train", "val"):
        np.save(
            folder / f"{part}-images.npy",
            drawn.integers(0, 256, (count, 3, 224, 224), dtype=np.uint8),
        )
        np.save(folder / f"{part}-labels.npy", drawn.integers(0, 1000, count))
    return folder


def test_photographs_stay_on_the_disk_and_are_trained_on(tmp_path: Path) -> None:
    data = (("data", str(photographs(tmp_path))), ("hidden", 2), ("depth", 18))
    trial = Trial("imagenet", "momentum", 0.1, 0, 1, 2, tau=1e-3, options=data, augment="crop-flip")
    outcome = run_trial(trial)
    assert not outcome.diverged and len(trial.key) == 20
    mapped = load_task("imagenet", **dict(data)).train.inputs
    assert mapped.dtype == torch.uint8
    before = np.load(tmp_path / "train-images.npy")
    mapped += 1
    assert (np.load(tmp_path / "train-images.npy") == before).all()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("val-images.npy", None, r"val-images\.npy"),
        ("train-images.npy", np.zeros((3, 3, 32, 32), np.uint8), r"expected uint8 of shape"),
        ("train-labels.npy", np.zeros(2, np.int64), r"and N classes from 0"),
        ("val-labels.npy", np.full(3, 1000), r"from 0 to 999"),
        ("val-labels.npy", b"no array", r"are not arrays of numpy"),
    ],
)
def test_photographs_that_do_not_fit_are_refused_in_one_sentence(
    file: str, content: object, words: str, tmp_path: Path
) -> None:
    path = photographs(tmp_path) / file
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=words):
        load_task("imagenet", data=str(tmp_path))
    with pytest.raises(InputError, match=r"--data DIR; ImageNet-1k comes from image-net\.org"):
        load_task("imagenet")


def test_a_swin_transformer_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="width = 40 and layers = 24; give a multiple of 32"):
        swin(40)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="needs the package transformers, which is not installed"):
        swin()
