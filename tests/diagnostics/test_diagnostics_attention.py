"""Attention matrices as Markov chains, against power iteration and torch's own attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from zoo import load

from pathspace.diagnostics.signal.attention import analyse, attention_matrices, rollout
from pathspace.errors import InputError, UnsupportedError


def random_chain(size: int = 7, seed: int = 0) -> np.ndarray:
    p = np.random.default_rng(seed).random((size, size)) ** 3
    return p / p.sum(1, keepdims=True)


def test_stationary_gap_and_mixing_against_power_iteration() -> None:
    p = random_chain()
    chain = analyse(p)
    assert np.abs(np.linalg.matrix_power(p, 200)[0] - chain.stationary).max() < 1e-12
    start = np.eye(7)[0]
    early, late = (
        np.abs(start @ np.linalg.matrix_power(p, n) - chain.stationary).sum() for n in (20, 24)
    )
    assert (late / early) ** 0.25 == pytest.approx(1 - chain.gap, rel=0.2)
    steps = chain.mixing_time()
    assert steps is not None
    power = np.linalg.matrix_power(p, steps)
    assert 0.5 * np.abs(power - chain.stationary).sum(1).max() <= 0.25
    assert (
        steps == 1
        or 0.5 * np.abs(np.linalg.matrix_power(p, steps - 1) - chain.stationary).sum(1).max() > 0.25
    )
    assert chain.caveat == "" and len(chain.closed_classes) == 1


def test_dobrushin_contracts_and_bounds_the_second_eigenvalue() -> None:
    for seed in range(5):
        p = random_chain(seed=seed)
        chain = analyse(p)
        a, b = np.random.default_rng(seed).dirichlet(np.ones(7), 2)
        assert np.abs((a - b) @ p).sum() <= chain.dobrushin * np.abs(a - b).sum() + 1e-12
        assert 1 - chain.gap <= chain.dobrushin + 1e-9


def test_causal_and_block_masks() -> None:
    p = np.tril(random_chain())
    chain = analyse(p / p.sum(1, keepdims=True))
    assert chain.caveat.startswith("causal") and chain.stationary[0] == pytest.approx(1)
    block = np.kron(np.eye(2), random_chain(3))
    chain = analyse(block)
    assert "2 closed classes" in chain.caveat and chain.gap == pytest.approx(0, abs=1e-9)
    assert chain.mixing_time() is None
    assert np.abs(chain.stationary @ block - chain.stationary).max() < 1e-12
    # two documents packed into one causal sequence: either has an absorbing first token
    packed = analyse(np.kron(np.eye(2), np.tril(np.ones((2, 2))) / [[1], [2]]))
    assert packed.closed_classes == ((0,), (2,)) and packed.caveat.startswith(
        "block mask: 2 closed classes"
    )
    assert analyse(np.eye(3)).caveat.startswith("block mask: 3") and analyse(np.eye(1)).caveat == ""
    periodic = analyse(np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert periodic.gap == pytest.approx(0) and periodic.mixing_time() is None


@pytest.mark.parametrize(
    "name", ["vit_small", "swin_small", "hf_gpt2", "hf_gpt2_eager", "hf_bert", "torch_encoder_relu"]
)
def test_matrices_of_real_layers(name: str) -> None:
    model, args, kwargs = load()[name].make("eval")
    with torch.no_grad():
        before = model(*args, **kwargs)
    matrices = attention_matrices(model, *args, kwargs=kwargs)
    with torch.no_grad():
        after = model(*args, **kwargs)
    assert len(matrices) == {"swin_small": 4}.get(name, 2)
    for p in matrices:
        assert p.ndim == 4 and p.shape[-1] == p.shape[-2]
        assert float((p.sum(-1) - 1).abs().max()) < 1e-5 and float(p.min()) >= 0
    same = (
        torch.equal(before, after)
        if isinstance(before, torch.Tensor)
        else torch.equal(before[0], after[0])
    )
    assert same
    causal = name in ("hf_gpt2", "hf_gpt2_eager", "torch_encoder_relu")
    assert analyse(matrices[0][0, 0]).caveat.startswith("causal") == causal


def test_both_implementations_agree() -> None:
    torch.manual_seed(0)
    sdpa, _, kwargs = load()["hf_gpt2"].make("eval")
    eager, *_ = load()["hf_gpt2_eager"].make("eval")
    eager.load_state_dict(sdpa.state_dict())
    for a, b in zip(
        attention_matrices(sdpa, kwargs=kwargs),
        attention_matrices(eager, kwargs=kwargs),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-6)


def test_weights_of_multihead_attention_are_torchs() -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(3, 5, 8)

    class Wrap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x, x, x, need_weights=False)[0]

    with torch.no_grad():
        want = layer(x, x, x, average_attn_weights=False)[1]
    assert torch.allclose(attention_matrices(Wrap(), x)[0], want.double(), atol=1e-6)


def test_rollout() -> None:
    a, b = torch.from_numpy(random_chain()), torch.from_numpy(random_chain(seed=1))
    eye = torch.eye(7, dtype=torch.float64)
    assert torch.allclose(rollout([a, b]), (eye + b) / 2 @ ((eye + a) / 2))
    bare = rollout([a, b] * 2, residual=False)
    assert torch.allclose(bare, b @ a @ b @ a) and torch.allclose(
        bare.sum(1), torch.ones(7, dtype=torch.float64)
    )
    assert analyse(bare).dobrushin < analyse(rollout([a, b] * 2)).dobrushin


def test_bad_input() -> None:
    with pytest.raises(InputError, match="expected \\(T, T\\)"):
        analyse(np.ones((2, 3)))
    with pytest.raises(InputError, match="not distributions"):
        analyse(np.ones((2, 2)))
    with pytest.raises(
        InputError, match="1 of 2 rows of the matrix are not finite, the first is 1"
    ):
        analyse(np.array([[0.5, 0.5], [np.nan, np.nan]]))
    with pytest.raises(InputError, match="no matrix"):
        rollout([])
    with pytest.raises(UnsupportedError, match="No attention"):
        attention_matrices(nn.Linear(2, 2), torch.ones(1, 2))


def test_a_chain_is_watched_for_ten_thousand_steps() -> None:
    """Two states: the distance after n steps is half the n-th power of the second eigenvalue."""
    for steps, expected in ((9_999.5, 10_000), (10_000.5, None)):
        stay = (1 + 0.5 ** (1 / steps)) / 2
        assert analyse(np.array([[stay, 1 - stay], [1 - stay, stay]])).mixing_time() == expected


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 4, 5, 3)])
def test_attention_of_three_dimensions_is_that_of_one_head(shape: tuple[int, ...]) -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

    torch.manual_seed(0)
    model, x = Read().double(), torch.randn(shape, dtype=torch.float64)
    (found,) = attention_matrices(model, x)
    scores = (model.q(x) @ model.k(x).transpose(-1, -2) / 3**0.5).softmax(-1)
    torch.testing.assert_close(found, scores.detach().view_as(found), rtol=1e-10, atol=1e-12)


def test_a_sample_without_a_batch_has_matrices_of_one_batch() -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).double().eval(), torch.randn(5, 8)
    x = x.double()
    (alone,) = attention_matrices(layer, x, x, x)
    (batched,) = attention_matrices(layer, x[None], x[None], x[None])
    assert alone.shape == (1, 2, 5, 5)
    torch.testing.assert_close(alone, batched)
