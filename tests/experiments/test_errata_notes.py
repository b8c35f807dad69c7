"""What the page of errata and the list of statements say of the notes on the
evolution of neural networks.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.stats import skew
from torch import nn
from torch.nn import functional as F


def test_xor_needs_a_hidden_layer() -> None:
    points = np.array(list(itertools.product((0, 1), repeat=2)))
    for target, separable in (((0, 1, 1, 0), False), ((0, 0, 0, 1), True), ((0, 1, 1, 1), True)):
        signs = np.where(target, 1, -1)
        # signs (w x + b) >= 1 for some w, b: what a step at zero can tell apart
        rows = -signs[:, None] * np.c_[points, np.ones(4)]
        assert linprog(np.zeros(3), rows, -np.ones(4), bounds=(None, None)).success is separable
    step = lambda x: (x >= 0).astype(int)  # noqa: E731
    hidden = step(points @ np.array([[1, 1], [1, 1]]) + np.array([-0.5, -1.5]))
    assert step(hidden @ np.array([1, -2]) - 0.5).tolist() == [0, 1, 1, 0]


@pytest.mark.slow
def test_gradients_are_orthogonal_where_the_test_loss_turns() -> None:
    """Along ``dw/dt = -grad L_D`` the test loss changes by ``-grad L_T grad
    L_D``, zero where it turns.
    """
    curvature = torch.diag(torch.tensor([1.0, 0.05])).double()
    best, other = torch.tensor([1.0, 3.0]).double(), torch.tensor([1.2, 1.0]).double()
    flow = lambda t: best + torch.linalg.matrix_exp(-t * curvature) @ -best  # noqa: E731
    train = lambda w: curvature @ (w - best)  # noqa: E731
    held = lambda w: w - other  # noqa: E731
    product = lambda t: float(train(flow(t)) @ held(flow(t)))  # noqa: E731
    times = np.linspace(0.1, 40, 4000)
    losses = [float((flow(t) - other).square().sum()) for t in times]
    turn = times[int(np.argmin(losses))]
    assert times[0] < turn < times[-1]
    assert abs(product(turn)) < 1e-2 * abs(product(0.0))


def test_random_symmetric_matrices_are_rarely_definite() -> None:
    random, shares = np.random.default_rng(0), []
    for size in (1, 2, 3, 5):
        draws = random.normal(size=(20_000, size, size))
        values = np.linalg.eigvalsh(draws + draws.transpose(0, 2, 1))
        shares.append(float((values > 0).all(1).mean()))
        # as often positive as negative
        assert abs(float((values > 0).mean()) - 0.5) < 0.01
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.45 and shares[-1] < 0.002


def test_slips_of_algebra_in_the_notes() -> None:
    # 2.3.1: M / (M + H), printed as 1 + H / M
    for m, h in ((10, 100), (3, 7)):
        assert m / (m + h) == pytest.approx(1 / (1 + h / m)) and m / (m + h) != pytest.approx(
            1 + h / m
        )
    # 2.3.2: the order of U_0 is the root of that of its variance
    weight = nn.init.xavier_normal_(torch.empty(40, 4000))
    assert float(weight.std()) == pytest.approx(math.sqrt(2 / 4040), rel=0.02)
    # 3.7.3: entries of variance one, a norm of the root of their number
    z = F.layer_norm(torch.randn(5, 400), (400,))
    torch.testing.assert_close(z.norm(dim=1), torch.full((5,), 20.0), rtol=1e-3, atol=1e-3)


def test_adamw_adds_nothing_to_the_loss() -> None:
    """Adam on the loss with a penalty and AdamW part ways: the decay is no
    gradient of either norm.
    """
    start, pull, rate, decay = torch.tensor([3.0, -0.5]), torch.tensor([1.0, 2.0]), 0.01, 0.1
    first, second = (nn.Parameter(start.clone()) for _ in range(2))
    adamw = torch.optim.AdamW([first], lr=rate, weight_decay=decay)
    adam = torch.optim.Adam([second], lr=rate)
    for _ in range(20):
        for w, optimizer, penalty in ((first, adamw, 0.0), (second, adam, decay / 2)):
            optimizer.zero_grad()
            ((w * pull).sum() + penalty * w.square().sum()).backward()
            optimizer.step()
    assert not torch.allclose(first, second, atol=1e-3)
    # what L2 regularisation adds is the squared norm: its gradient is the weight, that
    # of the norm has size one
    for power, size in ((2, 2 * float(start.norm())), (1, 1.0)):
        (slope,) = torch.autograd.grad(second.norm() ** power, second)
        assert float(slope.norm()) == pytest.approx(size, rel=0.2) and (power == 2 or size == 1.0)


def test_the_loss_of_masked_words_is_cross_entropy() -> None:
    vectors, table, words = (
        torch.randn(6, 5).double(),
        torch.randn(11, 5).double(),
        torch.tensor([0, 3, 3, 10, 7, 1]),
    )
    scores = torch.exp(vectors @ table.T)
    printed = -(scores[range(6), words] / scores.sum(1)).log().mean()
    torch.testing.assert_close(printed, F.cross_entropy(vectors @ table.T, words))


def test_more_terms_of_a_taylor_series_can_err_more() -> None:
    """The sine at 5: within its radius, which is infinite, the error grows before it falls."""
    terms = [(-1) ** k * 5 ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(20)]
    errors = [abs(sum(terms[: k + 1]) - math.sin(5)) for k in range(20)]
    assert errors[:4] == pytest.approx([5.96, 14.87, 11.17, 4.33], abs=0.01)
    assert errors[1] > errors[0] and errors[2:12] == sorted(errors[2:12], reverse=True)
    assert errors[-1] < 1e-9


PRINTED = """
def rescale_gradient(loss_gradient, initial_theta_list, decay_factor, learning_rate, steps):
    theta_list = [theta for theta in initial_theta_list]
    g_list = [np.zeros(np.shape(theta)) for theta in theta_list]
    for t in range(steps):
        for i, theta in enumerate(theta_list):
            g = decay_factor * g + (1-decay_factor) * loss_gradient(theta)
            theta_list[i] = theta - learning_rate * g / np.std(g)
    return theta_list
"""


def test_the_printed_code_of_the_rescaled_gradient_does_not_run() -> None:
    found: dict[str, object] = {"np": np}
    exec(PRINTED, found)
    start = [np.array([1.0, -2.0]), np.array([3.0, 0.5])]
    with pytest.raises(UnboundLocalError, match="'g'"):
        found["rescale_gradient"](lambda theta: theta, start, 0.5, 0.1, 2)  # type: ignore[operator]
    # with its averages read and kept, every step has the size of the rate
    code = PRINTED.replace("factor * g +", "factor * g_list[i] +")
    exec(code.replace("            g = ", "            g = g_list[i] = "), found)
    after = found["rescale_gradient"](lambda theta: theta, start, 0.5, 0.1, 1)  # type: ignore[operator]
    for old, new in zip(start, after, strict=True):
        assert np.std(new - old) == pytest.approx(0.1)


def test_weights_of_the_moving_average_do_not_sum_to_one() -> None:
    for decay in (0.0, 0.5, 0.9, 1.0):
        average, steps = np.zeros(30), 30
        for t in range(steps):
            average = decay * average + (1 - decay) * np.eye(steps)[t]
        # recent gradients weigh more, but the zero at the start has a weight, too
        assert average.sum() == pytest.approx(1 - decay**steps)
        assert (np.diff(average) >= 0).all()
    # with a decay of 1 nothing is averaged and nothing moves
    assert not average.any()


def test_the_variance_of_glorots_start() -> None:
    """It is 2 / (M + H); the printed 6 is that of the square of the uniform bound."""
    size, both = (300, 500), 800
    for start in (nn.init.xavier_uniform_, nn.init.xavier_normal_):
        weight = start(torch.empty(size))
        assert float(weight.var()) == pytest.approx(2 / both, rel=0.02)
        assert float(weight.var()) != pytest.approx(6 / both, rel=0.5)
    uniform = nn.init.xavier_uniform_(torch.empty(size))
    assert float(uniform.abs().max()) ** 2 == pytest.approx(6 / both, rel=0.01)


def test_a_tensor_of_one_element_has_no_deviation() -> None:
    single = nn.Parameter(torch.tensor([1.0]))
    single.grad = torch.tensor([0.3])
    assert not float(single.grad.std(correction=0))
    # divided by the RMS, a step has the size of the rate
    rms = single.grad.square().mean().sqrt()
    assert float((single - 0.1 * single.grad / rms).detach()) == pytest.approx(0.9)


def test_the_sum_over_the_inputs_index_is_the_jvp() -> None:
    matrix, x = torch.randn(3, 5), torch.zeros(5)
    forward = torch.func.jvp(lambda one: matrix @ one, (x,), (torch.ones(5),))[1]
    torch.testing.assert_close(forward, matrix.sum(1))
    (backward,) = torch.func.vjp(lambda one: matrix @ one, x)[1](torch.ones(3))
    torch.testing.assert_close(backward, matrix.sum(0))


def test_the_row_is_the_query_and_scores_are_scaled() -> None:
    tokens, query, key = (torch.randn(n, 16).double() for n in (7, 16, 16))
    reference = F.scaled_dot_product_attention(tokens @ query, tokens @ key, tokens)
    scores = (tokens @ query) @ (tokens @ key).T
    assert torch.allclose(torch.softmax(scores / 4, 1) @ tokens, reference)
    assert not torch.allclose(torch.softmax(scores, 1) @ tokens, reference)
    assert not torch.allclose(torch.softmax(scores.T / 4, 1) @ tokens, reference)


def test_the_variance_of_a_mean_needs_independence_and_no_limit() -> None:
    """Two signs: half the variance, exactly, and nothing like a normal distribution."""
    signs = list(itertools.product((-1, 1), repeat=2))
    means = [(a + b) / 2 for a, b in signs]
    assert np.var(means) == 1 / 2 and sorted(set(means)) == [-1, 0, 1]
    # the same sign twice
    assert np.var([(a + a) / 2 for a, _ in signs]) == 1


def test_means_of_small_batches_are_as_skewed_as_the_root_of_their_size_allows() -> None:
    losses = np.random.default_rng(0).exponential(size=(200_000, 64))
    for batch in (1, 4, 16, 64):
        means = losses[:, :batch].mean(1)
        # the skewness of one such loss is 2, that of a normal distribution 0
        assert skew(means) == pytest.approx(2 / math.sqrt(batch), rel=0.15)


def test_eigenvalues_of_symmetric_matrices_fill_a_semicircle_and_of_others_none() -> None:
    """The singular values of weights fill a quarter of a circle: some are near 0, none is 0."""
    size = 600
    draws = np.random.default_rng(0).normal(size=(size, size)) / math.sqrt(size)
    values = np.linalg.eigvalsh((draws + draws.T) / math.sqrt(2))
    below = lambda x: 0.5 + (x * math.sqrt(4 - x * x) / 4 + math.asin(x / 2)) / math.pi  # noqa: E731
    for x in (-1.5, -0.5, 0.0, 1.0, 1.8):
        assert float((values < x).mean()) == pytest.approx(below(x), abs=0.01)
    assert np.mean(abs(np.linalg.eigvals(draws).imag) > 1e-9) > 0.9
    singular = np.linalg.svd(draws, compute_uv=False)
    for x in (0.2, 1.0, 1.8):
        assert float((singular < x).mean()) == pytest.approx(2 * below(x) - 1, abs=0.01)
    assert singular.min() > 0
    # a layer of fewer units than inputs has directions that it does not see
    assert np.linalg.matrix_rank(draws[:400]) == 400 < size


def test_definite_matrices_become_rarer_than_exponentially() -> None:
    """The logarithm of their share falls by more with every dimension."""
    random = np.random.default_rng(1)
    logs = []
    for size in (1, 2, 3, 4):
        draws = random.normal(size=(300_000, size, size))
        values = np.linalg.eigvalsh(draws + draws.transpose(0, 2, 1))
        logs.append(math.log((values[:, 0] > 0).mean()))
    falls = -np.diff(logs)
    assert (np.diff(falls) > 0.3).all()
    # about as exp(-ln 3 / 4 n^2)
    assert np.diff(falls).mean() == pytest.approx(math.log(3) / 2, rel=0.15)


def test_rmsprop_is_of_lectures_by_hinton() -> None:
    said = str(torch.optim.RMSprop.__doc__)
    assert "lecture notes" in said and "Hinton" in said and "tijmen" in said
    assert "Martens" not in said and "Sutskever" not in said


def test_softmax_is_positive_and_nothing_of_it_definite() -> None:
    scores = torch.tensor([0.0, -50.0, 3.0]).double()
    for one in (scores, torch.zeros(3).double()):
        assert (torch.softmax(one, 0) > 0).all()
    slopes = torch.func.jacrev(lambda x: torch.softmax(x, 0))(scores)
    # one more to all scores changes nothing
    assert float((slopes @ torch.ones(3).double()).norm()) < 1e-12


def test_gates_weigh_and_omit_nothing() -> None:
    """The cell of an LSTM hands on the product of its forget gates; a highway layer mixes."""
    cell, inputs = nn.LSTMCell(3, 4).double(), torch.randn(6, 1, 3).double()
    nn.init.zeros_(cell.weight_hh)
    first = torch.randn(1, 4).double().requires_grad_()
    state, kept = (torch.zeros(1, 4).double(), first), torch.ones(4).double()
    for x in inputs:
        gates = x @ cell.weight_ih.T + cell.bias_ih + cell.bias_hh
        kept = kept * torch.sigmoid(gates[0, 4:8])
        state = cell(x, state)
    (slopes,) = torch.autograd.grad(state[1].sum(), first)
    torch.testing.assert_close(slopes[0], kept)
    assert (slopes > 0).all() and (slopes < 1).all()
    layer, gate, x = nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), torch.randn(1, 4).double()
    open_, hidden = torch.sigmoid(gate(x)), torch.tanh(layer(x))
    (slope,) = torch.autograd.grad((open_ * hidden + (1 - open_) * x).sum(), hidden)
    torch.testing.assert_close(slope, open_)
    assert (open_ > 0).all() and (open_ < 1).all()


def test_printed_norms_are_torchs_without_eps() -> None:
    z = torch.randn(7, 5).double()
    printed = (z - z.mean(0)) / z.var(0, correction=0).sqrt()
    torch.testing.assert_close(printed, F.batch_norm(z, None, None, training=True, eps=1e-300))
    by_layer = (z - z.mean(1, keepdim=True)) / z.var(1, correction=0, keepdim=True).sqrt()
    torch.testing.assert_close(by_layer, F.layer_norm(z, (5,), eps=0.0))
    # of a layer, without a batch
    torch.testing.assert_close(by_layer[:1], F.layer_norm(z[:1], (5,), eps=0.0))
    # a component that is constant over the batch has no deviation to divide by
    z[:, 0] = 3.0
    assert ((z - z.mean(0)) / z.var(0, correction=0).sqrt()).isnan()[:, 0].all()
    assert F.batch_norm(z, None, None, training=True).isfinite().all()


def test_residual_blocks_of_2015_have_norms_behind_and_a_relu_after_the_sum() -> None:
    layers = pytest.importorskip("transformers.models.resnet.modeling_resnet")
    block = layers.ResNetBasicLayer(4, 4).double().eval()
    first, second = (one.convolution for one in block.layer)
    norms = [one.normalization for one in block.layer]
    for norm in norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    x = torch.randn(2, 4, 6, 6).double()
    branch = norms[1](second(torch.relu(norms[0](first(x)))))
    result = block(x.clone())
    torch.testing.assert_close(result, torch.relu(x + branch))
    before = x + second(torch.relu(norms[1](first(torch.relu(norms[0](x))))))
    assert not torch.allclose(result, before, atol=0.1)


def test_a_sum_over_sampled_words_is_not_the_sum_over_all() -> None:
    """Footnote 4.2: with ``k`` of ``n`` words the sum is too small by ``k / n``, and what is
    divided by it can pass 1; times ``n / k`` its mean is right, and its logarithm is low by half
    the relative variance.
    """
    words, sampled, draws = 2000, 100, 4000
    scores = torch.randn(words).double()
    whole = scores.exp().sum()
    parts = torch.stack([scores[torch.randperm(words)[:sampled]].exp().sum() for _ in range(draws)])
    naive, scaled = parts.log() - whole.log(), parts * words / sampled / whole
    assert float(naive.mean()) == pytest.approx(math.log(sampled / words), abs=0.05)
    assert float(scaled.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(scaled.log().mean()) == pytest.approx(-float(scaled.var()) / 2, rel=0.3)
    # a target that the model is sure of, and that the sample has missed
    target = math.exp(8)
    assert target / (whole + target) < 1 < float((target / parts).min())
    # it belongs into the sum, and then no probability passes 1
    assert float((target / (parts + target)).max()) < 1


def test_rows_of_the_read_out_are_not_the_vectors_nearest_to_contexts() -> None:
    """A vector added to all rows of ``U`` leaves all probabilities and moves every distance."""
    rows, contexts = torch.randn(12, 4).double(), torch.randn(50, 4).double()
    chosen = (contexts @ rows.T).argmax(1)

    def nearest(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cdist(v, u).argmin(1)

    shifted = rows + 5 * rows[0]
    same = (contexts @ shifted.T).softmax(1)
    assert torch.allclose(same, (contexts @ rows.T).softmax(1))
    found = [nearest(each, contexts) for each in (rows, shifted)]
    assert not torch.equal(*found) and all(bool((each != chosen).any()) for each in found)
    # among rows of one length the most probable word is the nearest row
    unit = F.normalize(rows, dim=1)
    assert torch.equal(nearest(unit, contexts), (contexts @ unit.T).argmax(1))


def test_moving_average_is_torchs_from_a_zero_buffer() -> None:
    """``v <- b v + (1 - b) g`` is the heavy ball at a rate that is ``1 - b`` times as large."""
    generator = torch.Generator().manual_seed(0)
    first, second = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    torchs = torch.optim.SGD([first], lr=0.1, momentum=0.9, dampening=0.9)
    torchs.state[first]["momentum_buffer"] = torch.zeros_like(first)
    heavy_ball = torch.optim.SGD([second], lr=0.1 * (1 - 0.9), momentum=0.9)
    weight, v = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for _ in range(5):
        first.grad = second.grad = torch.randn(3, dtype=torch.float64, generator=generator)
        v = 0.9 * v + (1 - 0.9) * first.grad
        weight = weight - 0.1 * v
        torchs.step(), heavy_ball.step()
        assert torch.allclose(first, weight) and torch.allclose(second, weight)


def test_sign_descent_without_memory_is_adam_without_memory() -> None:
    first, second = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    adam = torch.optim.Adam([first], lr=0.1, betas=(0.0, 0.0), eps=0.0)
    for turn in range(3):
        first.grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) * (turn + 1)
        adam.step()
        second.data -= 0.1 * first.grad.sign()
        assert torch.allclose(first, second)
