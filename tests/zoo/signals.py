"""Inputs that mean something to trained networks: tones, a voice, a scene, a protein."""

from __future__ import annotations

import math

import torch
from torch import Tensor

RATE = 16_000
# the variable domain of an antibody's heavy chain
ANTIBODY = "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAKDYWGQGTLVTVSS"  # noqa: E501
# fundamental, and the first two formants of a, i, u (Hz)
PITCH, VOWELS = 120.0, ((730.0, 1090.0), (270.0, 2290.0), (300.0, 870.0))


def tone(frequency: float, samples: int, harmonics: int = 8) -> Tensor:
    """A note: harmonics that fall off as 1/k."""
    time = torch.arange(samples, dtype=torch.float64) / RATE
    waves = [torch.sin(2 * math.pi * frequency * k * time + k) / k for k in range(1, harmonics + 1)]
    return torch.stack(waves).sum(0)


def frames(*frequencies: float) -> Tensor:
    """One window of 1,024 samples for each note, with mean 0 and standard deviation 1."""
    windows = torch.stack([tone(frequency, 1024) for frequency in frequencies])
    windows = windows - windows.mean(1, keepdim=True)
    return (windows / windows.std(1, keepdim=True)).float()


def voice(samples: int, pitch: float = PITCH, syllable: float = 0.25) -> Tensor:
    """Vowels in turn: harmonics of a gliding pitch under two formants, in syllables."""
    time = torch.arange(samples, dtype=torch.float64) / RATE
    glide = pitch * (1 + 0.1 * torch.sin(2 * math.pi * 1.3 * time))
    phase = 2 * math.pi * torch.cumsum(glide, 0) / RATE
    count = (time / syllable).long()
    formants = torch.tensor(VOWELS, dtype=torch.float64)[count % len(VOWELS)]
    wave = torch.zeros_like(time)
    for k in range(1, 32):
        gain = sum(torch.exp(-(((k * glide - formants[:, i]) / 150) ** 2)) for i in range(2)) + 0.02
        wave += gain * torch.sin(k * phase) / math.sqrt(k)
    envelope = torch.sin(math.pi * (time / syllable - count)).clamp_min(0) ** 0.5
    wave = wave * envelope
    return (0.3 * wave / wave.abs().max()).float()


def mel(wave: Tensor, bands: int = 40) -> Tensor:
    """Power of `bands` mel bands every 10 ms: `(samples // 160 + 1, bands)`."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    bank = mel_filter_bank(201, bands, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    power = spectrogram(
        wave.numpy(), window_function(400, "hann"), 400, 160, power=2.0, mel_filters=bank
    )
    return torch.from_numpy(power).float().T.contiguous()


def scene(size: int, count: int = 1) -> Tensor:
    """`(count, 3, size, size)` in `[0, 1]`: a sky, a field, a sun and a bright ball, a
    little different each time.
    """
    y, x = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
    images = []
    for i in range(count):
        sky = torch.stack([0.4 + 0.3 * y, 0.6 + 0.2 * y, 0.95 - 0.1 * y])
        field = torch.stack(
            [0.2 + 0.1 * torch.sin(40 * x), 0.5 + 0.2 * torch.sin(23 * y + i), 0.15 + 0 * x]
        )
        image = torch.where(y > 0.6 + 0.05 * torch.sin(6 * x + i), field, sky)
        sun = ((x - 0.8) ** 2 + (y - 0.2) ** 2) < 0.01
        distance = ((x - 0.35 - 0.1 * i) ** 2 + (y - 0.7) ** 2) / 0.02
        ball = torch.stack([0.9 - 0.4 * distance, 0.3 - 0.1 * distance, 0.2 - 0.1 * distance])
        image = torch.where(sun, torch.tensor([1.0, 0.95, 0.6])[:, None, None], image)
        images.append(torch.where(distance < 1, ball, image).clamp(0, 1))
    return torch.stack(images)


def face(size: int, count: int = 1) -> Tensor:
    """`(count, 3, size, size)` in `[0, 1]`: an oval of skin with eyes, brows, nose and mouth."""
    y, x = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
    images = []
    for i in range(count):
        light = 1 - 0.25 * (x - 0.3 - 0.1 * i).abs()
        image = torch.tensor([0.35, 0.4, 0.45])[:, None, None] * torch.ones(3, size, size)
        hair = ((x - 0.5) / 0.42) ** 2 + ((y - 0.45) / 0.48) ** 2 < 1
        skin = ((x - 0.5) / 0.34) ** 2 + ((y - 0.54) / 0.42) ** 2 < 1
        image = torch.where(hair, torch.tensor([0.2, 0.13, 0.1])[:, None, None], image)
        image = torch.where(skin, torch.tensor([0.85, 0.65, 0.55])[:, None, None] * light, image)
        for side in (0.34, 0.66):
            brow = ((x - side) / 0.1) ** 2 + ((y - 0.36) / 0.02) ** 2 < 1
            white = ((x - side) / 0.08) ** 2 + ((y - 0.43) / 0.035) ** 2 < 1
            pupil = ((x - side) / 0.035) ** 2 + ((y - 0.43) / 0.035) ** 2 < 1
            for where, colour in ((brow, 0.15), (white, 0.95), (pupil, 0.05)):
                image = torch.where(where, torch.full((3, 1, 1), colour), image)
        nose = ((x - 0.5) / 0.05) ** 2 + ((y - 0.6) / 0.05) ** 2 < 1
        mouth = ((x - 0.5) / 0.15) ** 2 + ((y - 0.75) / 0.04) ** 2 < 1
        image = torch.where(nose, image * 0.8, image)
        images.append(torch.where(mouth, torch.tensor([0.7, 0.25, 0.25])[:, None, None], image))
    return torch.stack(images)
