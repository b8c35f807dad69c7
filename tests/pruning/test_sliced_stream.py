"""The residual stream cut to its principal components."""

from __future__ import annotations

import pytest
import torch
from rotations.test_spaces import Llama
from torch import Tensor, nn

import pathspace as ps
from pathspace.errors import InputError, UnsupportedError

WORDS = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Llama().double()


def test_nothing_is_cut_if_all_stays() -> None:
    whole = model()
    torch.testing.assert_close(ps.slice_stream(whole, WORDS, keep=1.0)(WORDS), whole(WORDS))


def low_rank() -> nn.Module:
    """A model whose stream has 5 of 8 dimensions, in a basis that nobody sees."""
    torch.manual_seed(0)
    net = Llama().double()
    basis = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0][:, :5]
    plane = basis @ basis.T
    with torch.no_grad():
        net.table.weight.copy_(net.table.weight @ plane)
        for writer in (net.o, net.down):
            writer.weight.copy_(plane @ writer.weight)
            writer.bias.copy_(plane @ writer.bias)
        for norm in (net.norm, net.last):
            norm.weight.uniform_(0.5, 2)
            norm.eps = 0.0
    return net


def test_a_stream_of_fewer_dimensions_is_cut_without_a_loss() -> None:
    net = low_rank()
    small = ps.slice_stream(net, WORDS, keep=5 / 8)
    assert small.table.weight.shape == (11, 5)
    assert small.q.weight.shape == (8, 5)
    torch.testing.assert_close(small(WORDS), net(WORDS))
    # (without components that matter it is another function)
    assert not torch.allclose(ps.slice_stream(net, WORDS, keep=0.5)(WORDS), net(WORDS))


def test_calibration_decides_what_stays() -> None:
    net = low_rank()
    batches = [{"words": WORDS[:3]}, {"words": WORDS[3:]}]
    small = ps.slice_stream(net, WORDS, keep=5 / 8, calibration=batches)
    torch.testing.assert_close(small(WORDS), net(WORDS))


def test_a_model_of_a_library_is_saved_with_its_new_size(tmp_path: object) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, tie_word_embeddings=True,
    )  # fmt: skip
    net, words = transformers.LlamaForCausalLM(config).eval(), torch.arange(9)[None]
    small = ps.slice_stream(net, kwargs={"input_ids": words}, keep=20 / 24)
    assert small.config.hidden_size == 20
    small.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(words).logits, small(words).logits)


class Rigid(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match="no space of the group O in Rigid"):
        ps.slice_stream(Rigid(), torch.randn(2, 3))
    for wrong in (0.0, 1.5):
        with pytest.raises(InputError, match="expected a share"):
            ps.slice_stream(model(), WORDS, keep=wrong)
    with pytest.raises(InputError, match="leaves none of 8 features"):
        ps.slice_stream(model(), WORDS, keep=0.01)


def test_a_size_in_the_code_is_refused() -> None:
    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](nn.functional.rms_norm(self[0](x), (4,)))

    net = Net(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(UnsupportedError, match="a number that does not follow"):
        ps.slice_stream(net, torch.randn(5, 3), keep=0.5)


@pytest.mark.parametrize("form", ["product", "einsum"])
def test_a_stream_that_no_module_reads(form: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.rms_norm(x @ self.a.T, self.a.shape[:1])
            return y @ self.b.T if form == "product" else torch.einsum("ni,oi->no", y, self.b)

    if form == "product":
        assert ps.slice_stream(Net(), torch.randn(5, 3)).b.shape == (2, 3)
    else:
        with pytest.raises(UnsupportedError, match=r"no product of 'a' with a weight"):
            ps.slice_stream(Net(), torch.randn(5, 3))
