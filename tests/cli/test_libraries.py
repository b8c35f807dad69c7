"""Targets that name models of libraries."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import pathspace as ps
from pathspace.cli import libraries
from pathspace.cli.main import app
from pathspace.cli.target import load_target
from pathspace.diagnostics import report

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 30,
    "intermediate_size": 24,
}
T5 = {"d_model": 16, "d_ff": 20, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 30}
CONFIGURATIONS = {
    "bert": (SMALL | {"max_position_embeddings": 12}, "BertModel"),
    "t5": (T5 | {"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
    "vit": (SMALL | {"image_size": 8, "patch_size": 4, "num_channels": 1}, "ViTModel"),
}


BERT = '{"model_type": "bert", "hidden_size": 16, "num_attention_heads": 2, "architectures": %s}'
PICTURES = SMALL | {"image_size": 8, "patch_size": 4}
TEXT = SMALL | {"max_position_embeddings": 12, "eos_token_id": 2}
# model type, entries and class; shapes of the inputs
INPUTS: list[tuple[str, dict[str, Any], str, dict[str, tuple[int, ...]]]] = [
    (
        "clip", {"text_config": TEXT, "vision_config": PICTURES, "projection_dim": 8}, "CLIPModel",
        {"input_ids": (2, 8), "pixel_values": (2, 3, 8, 8)},
    ),
    (
        "llava", {"text_config": TEXT | {"model_type": "llama"}, "vision_config": PICTURES},
        "LlavaModel", {"input_ids": (2, 8)},
    ),
    (
        "videomae", PICTURES | {"num_frames": 2, "tubelet_size": 2}, "VideoMAEModel",
        {"pixel_values": (2, 2, 3, 8, 8)},
    ),
    (
        "vision-encoder-decoder",
        {
            "encoder": PICTURES | {"model_type": "vit"},
            "decoder": TEXT | {"model_type": "bert", "is_decoder": True,
                               "add_cross_attention": True},
        },
        "VisionEncoderDecoderModel", {"pixel_values": (2, 3, 8, 8), "decoder_input_ids": (2, 8)},
    ),
    (
        # (an infinite number as transformers writes it)
        "mamba2",
        SMALL | {"head_dim": 8, "num_heads": 4, "n_groups": 1,
                 "time_step_limit": [0.0, {"__float__": "Infinity"}]},
        "Mamba2Model", {"input_ids": (2, 8)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "entries", "name", "shapes"), INPUTS, ids=[entry[0] for entry in INPUTS]
)
def test_models_run_on_the_inputs_that_are_made(
    kind: str,
    entries: dict[str, Any],
    name: str,
    shapes: dict[str, tuple[int, ...]],
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, "architectures": [name]} | entries))
    target = load_target(f"transformers:{path}")
    assert type(target.model).__name__ == name
    assert {name: tuple(value.shape) for name, value in target.kwargs.items()} == shapes
    with torch.no_grad():
        target.model(**target.kwargs)


def test_inputs_of_other_kinds_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "time_series_transformer", "prediction_length": 2, "d_model": 8})
    )
    with pytest.raises(ps.InputError, match=r"past_values.*no example inputs.*give --input"):
        load_target(f"transformers:{path}")


def written(folder: Path, kind: str, **more: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGURATIONS[kind][0] | {"model_type": kind} | more))
    return path


@pytest.mark.parametrize("architectures", [None, "ViTModel", ["ViTModel"]])
def test_data_types_of_a_configuration_do_not_matter(
    architectures: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(
        tmp_path, "vit", architectures=architectures, torch_dtype="bfloat16", dtype="float16"
    )
    target = load_target(f"transformers:{path}")
    assert type(target.model).__name__ == "ViTModel"
    assert ("model without a head" in capsys.readouterr().err) == (architectures is None)
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.float32}
    target.model(**target.kwargs)
    # (the parts of a model may have types of their own)
    parts = {
        "text_config": TEXT | {"model_type": "llama", "dtype": "float16"},
        "vision_config": PICTURES,
    }
    path.write_text(json.dumps({"model_type": "llava", "architectures": ["LlavaModel"]} | parts))
    target = load_target(f"transformers:{path}")
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_configurations_name_architecture_and_inputs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, kind)
    target = load_target(f"transformers:{path}")
    assert type(target.model).__name__ == CONFIGURATIONS[kind][1] and not target.model.training
    target.model(*target.args, **target.kwargs)
    monkeypatch.setattr(libraries, "LARGE", 0)
    bare = load_target(f"transformers:{path.parent}")
    assert all(parameter.is_meta for parameter in bare.model.parameters())
    if kind == "bert":
        graphs = [
            ps.trace(each.model, kwargs=each.kwargs, sizes="given") for each in (target, bare)
        ]
        assert len({(graph.num_units, graph.num_weights) for graph in graphs}) == 1


def test_commands_take_a_model_without_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "LARGE", 0)
    held = SimpleNamespace(list_models=lambda: ["net"], create_model=lambda name, pretrained: Net())
    monkeypatch.setitem(sys.modules, "timm", held)
    target = "timm:net"
    model = load_target(target)
    graph = ps.trace(model.model, *model.args)
    for command, name in (("draw", "graph.svg"), ("masks", "masks.safetensors")):
        result = CliRunner().invoke(app, [command, target, "-o", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    page = report(model.model, *model.args)
    assert "without values" in page.facts["signal"]["absent"]
    assert page.facts["certificate"]["theorem3"]["holds"]
    assert "nothing was measured" in page.sentences["certificate"]
    for part, who in (("gradients", "gradients"), ("alarms", "a pass on the batches")):
        assert f"{who} found '0.weight' and others without values" in page.facts[part]["absent"]
    masks = load_file(tmp_path / "masks.safetensors")
    expected = graph.skeleton()
    assert masks.keys() == {
        f"{part}/{block.name}" for part in ("incoming", "outgoing") for block in graph.blocks
    }
    assert all(
        torch.equal(masks[f"incoming/{name}"], mask) for name, mask in expected.incoming.items()
    )
    assert all(
        torch.equal(masks[f"outgoing/{name}"], mask) for name, mask in expected.outgoing.items()
    )
    result = CliRunner().invoke(app, ["verify", target, "--json", "-"])
    found = json.loads(result.output)
    assert result.exit_code == 0 and found["units"] == graph.num_units
    assert found["theorem3"]["holds"] and found["invariance"]["holds"] is None
    assert CliRunner().invoke(app, ["explain", target]).exit_code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "There is no configuration"),
        ("{", "not a configuration of a transformers model: .*expected JSON"),
        ("{}", "not a configuration .*model_type"),
        ("[]", "not a configuration .*model_type"),
        ('{"model_type": "llamma"}', "llamma"),
        ('{"model_type": "own", "auto_map": {}}', "name a function"),
        (json.dumps(SMALL | {"model_type": "llama", "num_attention_heads": 3}), "not a multiple"),
        (
            BERT % '["BertModle"]',
            r"architecture 'BertModle', which is not a model.*\(did you mean BertModel",
        ),
        (
            BERT % '["AutoConfig", "PreTrainedModel"]',
            "architecture 'AutoConfig', which is not a model",
        ),
        (
            BERT % '["LlamaModel"]',
            "cannot build the model of .*: 'BertConfig' object has no attribute",
        ),
    ],
)
def test_bad_configurations_are_one_sentence(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ps.InputError, match=words) as caught:
        load_target(f"transformers:{path}")
    assert "\n" not in str(caught.value)


def test_packages_that_are_missing_or_know_no_such_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("timm", "torchvision"):
        name = "torchvision.models" if library == "torchvision" else library
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(
            ps.InputError, match=f"needs the package {library}.*pip install {library}"
        ):
            load_target(f"{library}:resnet50")
        held = SimpleNamespace(
            list_models=lambda: ["resnet50"],
            create_model=lambda name, pretrained: Net(),
            get_model=lambda name, weights: Net(),
        )
        monkeypatch.setitem(sys.modules, name, held)
        if library == "torchvision":
            monkeypatch.setitem(
                sys.modules, "torchvision", SimpleNamespace(models=held, __path__=[])
            )
        target = load_target(f"{library}:resnet50")
        assert ps.trace(target.model, *target.args).num_units == 4
        with pytest.raises(ps.InputError, match=r"no model 'resnet5' \(did you mean .*resnet50"):
            load_target(f"{library}:resnet5")


def test_targets_that_nearly_name_a_library_or_a_configuration(tmp_path: Path) -> None:
    path = written(tmp_path, "bert")
    for spec in (str(path), str(tmp_path)):
        with pytest.raises(ps.InputError, match=r"or transformers:path/to/config.json"):
            load_target(spec)
    with pytest.raises(ps.InputError, match=r"no module 'tim' .*timm"):
        load_target("tim:resnet50")


class TwoPictures(nn.Module):
    """Takes two pictures, as models of optical flow do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, first: torch.Tensor, second: torch.Tensor, updates: int = 1) -> torch.Tensor:
        return self.net(first) * self.net(second)


class Video(nn.Conv3d):
    """Takes a video."""

    def __init__(self) -> None:
        super().__init__(3, 2, 1)


class RunsWhileBuilt(nn.Module):
    """Looks at the outputs of a part while it is built, as SSDs do."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 4, 3)
        self.second = nn.Conv2d(self.first(torch.zeros(1, 3, 8, 8)).shape[1], 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).mean((2, 3))


def test_models_of_other_inputs_and_other_ways_to_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned() -> nn.Module:
        warnings.warn("The initialisation will change.", FutureWarning, stacklevel=2)
        return Net()

    makers = {
        "raft": TwoPictures,
        "r3d": Video,
        "ssd": RunsWhileBuilt,
        "net": warned,
        "no": lambda: RunsWhileBuilt(1),
    }
    held = SimpleNamespace(
        list_models=lambda: list(makers), get_model=lambda name, weights: makers[name]()
    )
    monkeypatch.setattr(Video, "__module__", "torchvision.models.video.resnet")
    monkeypatch.setitem(sys.modules, "torchvision.models", held)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=held, __path__=[]))
    side = libraries.SIDE
    with warnings.catch_warnings(action="error"):
        targets = {name: load_target(f"torchvision:{name}") for name in makers if name != "no"}
    assert [tuple(each.shape) for each in targets["raft"].args] == [(2, 3, side, side)] * 2
    assert [tuple(each.shape) for each in targets["r3d"].args] == [(2, 3, 16, side, side)]
    assert ps.trace(targets["ssd"].model, *targets["ssd"].args).num_units == 4
    with pytest.raises(
        ps.InputError, match=r"torchvision cannot build the model of 'no': .*; build it"
    ):
        load_target("torchvision:no")


def test_models_of_timm_may_be_named_with_the_data_of_their_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []
    held = SimpleNamespace(
        list_models=lambda: ["net", "net_gn"],
        create_model=lambda name, pretrained: names.append(name) or Net(),
    )
    monkeypatch.setitem(sys.modules, "timm", held)
    load_target("timm:net.a1_in1k")
    assert set(names) == {"net.a1_in1k"}
    with pytest.raises(ps.InputError, match=r"no model 'timm/net\.a1_in1k' \(did you mean net or"):
        load_target("timm:timm/net.a1_in1k")


class Net(nn.Sequential):
    """In place of a model of a library."""

    def __init__(self) -> None:
        layers = [
            nn.Conv2d(3, 4, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        ]
        super().__init__(*layers)
        self.default_cfg = {"input_size": (3, 8, 8)}
