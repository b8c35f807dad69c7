"""Networks as somebody trained them: their loaders give the networks that the packages mean."""

from __future__ import annotations

import pytest
import torch
from zoo.packaged import available, folder
from zoo.signals import ANTIBODY, RATE, face, scene, tone, voice
from zoo.trained import TRAINED, antibody_tokens, load, params


@pytest.mark.parametrize("name", params())
def test_loads_with_all_its_weights(name: str) -> None:
    model, _, _ = load(name)
    assert sum(p.numel() for p in model.parameters()) == TRAINED[name].weights
    assert not model.training


@torch.no_grad()
@pytest.mark.parametrize("name", params("crepe-tiny"))
def test_crepe_hears_the_pitch_of_notes(name: str) -> None:
    model, inputs, _ = load(name)
    heard = 10 * 2 ** ((20 * model(*inputs).argmax(1) + 1997.3794084376191) / 1200)
    torch.testing.assert_close(heard, torch.tensor([110.0, 220.0, 330.0, 523.25]), rtol=0.01, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", params("mtcnn-pnet", "mtcnn-rnet", "mtcnn-onet"))
def test_mtcnn_tells_a_face_from_a_landscape(name: str) -> None:
    model, size = load(name)[0], {"p": 12, "r": 24, "o": 48}[name[6]]
    pictures = torch.cat([face(size), scene(size)])
    seen = model((pictures * 255 - 127.5) / 128)[-1].reshape(2, 2)[:, 1]
    assert seen[0] > 0.8 and seen[1] < 0.1


@torch.no_grad()
@pytest.mark.parametrize("name", params("silero-vad"))
def test_silero_hears_a_voice_and_no_other_sound(name: str) -> None:
    model = load(name)[0]

    def heard(wave: torch.Tensor) -> float:
        state, found = None, []
        for chunk in wave.unfold(0, 576, 512):
            probability, state = model(chunk[None], state)
            found.append(float(probability))
        return max(found)

    assert heard(voice(RATE)) > 0.9
    assert max(heard(0.1 * tone(1000.0, RATE, 1).float()), heard(torch.zeros(RATE))) < 0.1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", params("silero-vad"))
def test_silero_is_the_network_of_the_package(name: str) -> None:
    model, inputs, _ = load(name)
    original = torch.jit.load(str(folder("silero_vad") / "data" / "silero_vad.jit"))._model
    # (the compiled file holds a later training of the same network)
    weights = dict(original.named_parameters()) | dict(original.named_buffers())
    names = {"stft_conv.weight": "stft.forward_basis_buffer"}
    for part in ("weight", "bias"):
        names |= {f"conv{i + 1}.{part}": f"encoder.{i}.reparam_conv.{part}" for i in range(4)}
        names[f"final_conv.{part}"] = f"decoder.decoder.2.{part}"
        names |= {f"lstm_cell.{part}_{kind}": f"decoder.rnn.{part}_{kind}" for kind in ("ih", "hh")}
    model.load_state_dict({name: weights[source] for name, source in names.items()})
    for found, expected in zip(model(*inputs), original(*inputs), strict=True):
        torch.testing.assert_close(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", params("voice-encoder"))
def test_speaker_encoder_keeps_voices_apart(name: str) -> None:
    model, inputs, _ = load(name)
    likeness = model(*inputs) @ model(*inputs).T
    assert likeness[0, 2] < likeness[0, 1] < 0.95
    torch.testing.assert_close(likeness.diagonal(), torch.ones(3))


@torch.no_grad()
@pytest.mark.skipif(not available("antiberty"), reason="needs antiberty (tests/trained.txt)")
def test_antiberty_knows_the_masked_residues() -> None:
    model = load("antiberty")[0]
    places = [5, 23, 47, 95]
    tokens = antibody_tokens(*[f"{ANTIBODY[:i]}_{ANTIBODY[i + 1 :]}" for i in places])
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).prediction_logits
    truth = antibody_tokens(ANTIBODY)[0]
    assert [int(logits[row, i + 1].argmax()) for row, i in enumerate(places)] == [int(truth[i + 1]) for i in places]


@torch.no_grad()
@pytest.mark.parametrize("name", params("efficientnet-lite0"))
def test_lite0_sees_a_ball(name: str) -> None:
    # of the thousand classes: croquet ball, ping-pong ball, pool table
    assert set(load(name)[0](2 * scene(224, 2) - 1).argmax(1).tolist()) <= {522, 722, 736}
