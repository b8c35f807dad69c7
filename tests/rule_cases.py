"""Arguments for every registered operation: which activations, parameters and
constants its small network reads.

``TELLING`` holds operations whose scales are not those of their first operand in the same order,
``COPYING`` those for which copying is right, ``CREATED`` those that make no activation. Variants
take the case of the operation they vary.
"""

from __future__ import annotations

from typing import Any

import torch
from operations import Act, Par, packet_of

import pathspace  # noqa: F401  (registers the rules)
from pathspace.inference.registry import RULES

aten = torch.ops.aten
Case = tuple[tuple[Any, ...], dict[str, Any]]


def act(*shape: int, low: float = -2.0, high: float = 2.0, **more: Any) -> Act:
    """An activation."""
    return Act(shape, low, high, **more)


def given(*rows: Any, **more: Any) -> Act:
    """An activation with these values."""
    values = torch.tensor(rows, dtype=torch.float64)
    return Act(tuple(values.shape), values=values, **more)


def par(*shape: int) -> Par:
    """A parameter."""
    return Par(shape)


def whole(*numbers: Any) -> torch.Tensor:
    """Whole numbers."""
    return torch.tensor(numbers)


def real(*numbers: Any) -> torch.Tensor:
    """Real constants."""
    return torch.tensor(numbers, dtype=torch.float64)


def asked(*shape: int) -> Act:
    """A condition that data decides."""
    return Act(shape, through=((aten.gt.Scalar, 0),))


H, G, E = act(2, 3), act(2, 3), act(2, 3)
POSITIVE, INSIDE = act(2, 3, low=0.2, high=0.9), act(2, 3, low=-0.9, high=0.9)
S, R = act(3, 3), act(3, 3)
F, D = act(4), act(4)
V, IMAGE, C3 = act(1, 2, 4), act(1, 2, 4, 4), act(1, 1, 4, 4, 4)
Z, Q = Act((2, 3, 2), through=((aten.view_as_complex.default,),)), act(2, 3, 2)
B, BB = act(2, 2, 2), act(2, 2, 2)
ODD, ONE = act(5), act(1)
SPREAD = given([1.5, 0.2, 0.3], [0.1, -1.4, 0.2], [0.3, 0.2, 1.6])
DEFINITE = given([3.0, 0.5, 0.2], [0.5, 2.0, 0.4], [0.2, 0.4, 4.0])
TRUE, CLASSES = whole(1, 0), real([1.0, 0.0, 1.0], [0.0, 1.0, 1.0])
MASK = torch.tensor([[True, False, True], [False, True, True]])
Q4, K4, V4 = act(1, 1, 2, 3), act(1, 1, 2, 3), act(1, 1, 2, 3)
T3 = act(1, 2, 4)


def infinite(*more: tuple[Any, ...]) -> Act:
    """An activation that is infinite at one place."""
    return given([0.0, 1.0], through=((aten.abs.default,), (aten.reciprocal.default,), *more))


def recurrent(gates: int, *states: Any) -> tuple[Any, ...]:
    """Three steps of two features into two units."""
    weights = [par(2 * gates, 2), par(2 * gates, 2), par(2 * gates), par(2 * gates)]
    state = list(states) if len(states) > 1 else states[0]
    return act(3, 1, 2), state, weights, True, 1, 0.0, False, False, False


def cell(gates: int, *states: Any) -> tuple[Any, ...]:
    """One step of two features into two units."""
    state = list(states) if len(states) > 1 else states[0]
    return act(1, 2), state, par(2 * gates, 2), par(2 * gates, 2), par(2 * gates), par(2 * gates)


TABLE: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    # sums and comparisons
    ("add sub maximum minimum fmax fmin hypot rsub subtract gt lt ge le greater less atan2 arctan2",
     (H, G), {}),
    ("eq isclose", (H, H), {}),
    ("ne not_equal", (H, G), {}),
    ("lerp", (H, G, 0.3), {}),
    ("where", (MASK, H, G), {}),
    ("masked_fill", (H, MASK, 2.0), {}),
    # products and powers
    ("mul div multiply divide true_divide floor_divide copysign", (H, G), {}),
    ("addcmul addcdiv", (H, G, E), {}),
    ("square reciprocal", (H,), {}),
    ("sqrt rsqrt", (POSITIVE,), {}),
    ("pow float_power", (H, 2), {}),
    ("prod cumprod", (H, 1), {}),
    # signs
    ("sign sgn signbit angle", (H,), {}),
    ("isfinite", (H,), {}),
    ("logical_not", (given([0.0, 1.0], [2.0, 0.0]),), {}),
    ("nonzero", (given([1.0, 0.0], [-1.0, 2.0]),), {}),
    ("isnan", (given([float("nan"), 1.0]),), {}),
    ("isinf isposinf", (infinite(),), {}),
    ("isneginf", (infinite((aten.neg.default,)),), {}),
    ("logical_and logical_or logical_xor", (H, G), {}),
    ("count_nonzero all any", (H,), {}),
    # reductions
    ("sum mean amax amin nansum nanmean cumsum argmax argmin argsort max min", (H, 1), {}),
    ("msort", (H,), {}),
    ("median nanmedian cummax cummin sort mode unbind", (H, 1), {}),
    ("kthvalue topk", (H, 2), {}),
    ("quantile nanquantile", (H, 0.3, 1), {}),
    ("aminmax", (H,), {"dim": 1}),
    ("diff", (H,), {}),
    ("linalg_vector_norm norm linalg_norm", (H, 2, [1]), {}),
    ("frobenius_norm", (H, [1]), {}),
    ("linalg_matrix_norm", (B,), {}),
    ("nuclear_norm", (B, [1, 2]), {}),
    ("var std var_mean std_mean", (H, [1]), {}),
    ("cdist", (H, G), {}),
    ("_cdist_forward", (H, G, 2.0, None), {}),
    ("pdist _pdist_forward", (act(3, 2),), {}),
    ("pairwise_distance", (H, G, 2.0, 0.0), {}),
    ("cosine_similarity", (H, G, 1, 0.0), {}),
    ("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", (H,), {}),
    ("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2", (H,), {}),
    ("fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn", (H,), {}),
    ("_fft_r2c", (H, [1], 0, True), {}),
    ("_fft_c2r", (Z, [1], 0, 4), {}),
    ("_fft_c2c", (Z, [1], 0, True), {}),
    ("istft", (Act((2, 3, 4, 2), through=((aten.view_as_complex.default,),)), 4, 1), {}),
    ("fft_fftshift fft_ifftshift", (ODD,), {}),
    # elementwise functions that are not homogeneous
    ("gelu silu tanh sigmoid elu selu celu mish softplus relu6 hardswish hardsigmoid exp exp2 expm1", (H,), {}),  # noqa: E501
    ("sin cos tan atan sinh cosh asinh sinc erf erfc special_expit special_erf special_i0 i0 deg2rad", (H,), {}),  # noqa: E501
    ("log_sigmoid log_sigmoid_forward hardshrink softshrink special_ndtr special_log_ndtr", (H,),
     {}),
    ("round floor ceil trunc fix frac", (H,), {}),
    ("log log2 log10 log1p lgamma digamma special_entr logit", (POSITIVE,), {}),
    ("asin acos atanh erfinv", (INSIDE,), {}),
    ("acosh", (act(2, 3, low=1.5, high=4.0),), {}),
    ("polygamma", (1, POSITIVE), {}),
    ("polygamma_", (POSITIVE, 1), {}),
    ("logaddexp logaddexp2", (H, G), {}),
    ("xlogy special_xlogy", (H, POSITIVE), {}),
    ("fmod remainder", (H, 0.7), {}),
    ("fake_quantize_per_tensor_affine", (H, 0.1, 0, -128, 127), {}),
    ("hardtanh", (H,), {}),
    ("clamp clip", (H, -1.0, 1.0), {}),
    ("clamp_min clamp_max", (H, 0.5), {}),
    ("threshold", (H, 0.5, 0.5), {}),
    ("glu", (act(2, 4), 1), {}),
    ("prelu _prelu_kernel", (ONE, ONE), {}),
    ("alpha_dropout feature_alpha_dropout", (H, 0.5, True), {}),
    # normalised exponentials
    ("softmax log_softmax logsumexp logcumsumexp _safe_softmax", (H, 1), {}),
    ("_softmax _log_softmax", (H, 1, False), {}),
    # losses
    ("cross_entropy_loss nll_loss nll_loss_nd multi_margin_loss", (H, TRUE), {}),
    ("nll_loss_forward", (H, TRUE, None, 1, -100), {}),
    ("nll_loss2d", (act(1, 3, 2, 2), whole([[0, 1], [2, 0]])), {}),
    ("nll_loss2d_forward", (act(1, 3, 2, 2), whole([[0, 1], [2, 0]]), None, 1, -100), {}),
    ("binary_cross_entropy", (POSITIVE, CLASSES), {}),
    ("binary_cross_entropy_with_logits kl_div soft_margin_loss", (H, CLASSES), {}),
    ("poisson_nll_loss", (H, CLASSES, True, False, 1e-8, 1), {}),
    ("huber_loss smooth_l1_loss mse_loss l1_loss", (H, G), {}),
    ("hinge_embedding_loss", (H, CLASSES * 2 - 1), {}),
    ("margin_ranking_loss", (H, G, CLASSES * 2 - 1, 0.3), {}),
    ("triplet_margin_loss", (H, G, E), {}),
    ("multilabel_margin_loss", (H, whole([0, 2, -1], [1, -1, -1])), {}),
    ("ctc_loss", (act(4, 1, 3), whole([1, 2]), [4], [2]), {}),
    # counting and drawing
    ("bucketize", (H, real(-1.0, 0.0, 1.0)), {}),
    ("searchsorted", (given(-1.0, 0.0, 1.0), H), {}),
    ("histc", (H, 4), {}),
    ("multinomial", (POSITIVE, 2), {}),
    ("bernoulli", (POSITIVE,), {}),
    # matrix functions
    ("linalg_inv inverse linalg_svd linalg_qr linalg_eig linalg_det linalg_slogdet linalg_pinv",
     (SPREAD,), {}),
    ("linalg_matrix_exp matrix_exp linalg_lu linalg_lu_factor", (SPREAD,), {}),
    ("linalg_cholesky cholesky linalg_eigh det logdet", (DEFINITE,), {}),
    ("linalg_solve linalg_lstsq", (SPREAD, R), {}),
    ("linalg_solve_triangular", (DEFINITE, R), {"upper": False}),
    ("triangular_solve", (R, DEFINITE), {}),
    ("linalg_householder_product", (S, act(3)), {}),
    # products of matrices
    ("mm matmul linalg_matmul", (S, R), {}),
    ("chain_matmul", ([S, R],), {}),
    ("bmm", (B, BB), {}),
    ("mv", (S, act(3)), {}),
    ("dot vdot", (F, D), {}),
    ("inner", (H, G), {}),
    ("outer ger", (F, D), {}),
    ("addmm", (S, act(3, 3), R), {}),
    ("addmv", (act(3), S, act(3)), {}),
    ("baddbmm", (B, BB, act(2, 2, 2)), {}),
    ("addbmm", (act(2, 2), B, BB), {}),
    ("linear", (H, par(2, 3), par(2)), {}),
    ("einsum", ("ij,kj->ik", [H, G]), {}),
    ("tensordot", (H, G, [1], [1]), {}),
    ("bilinear", (H, act(2, 2), par(2, 3, 2), par(2)), {}),
    ("_trilinear", (H, G, E, [], [], [], [1]), {}),
    # convolutions and attention
    ("conv1d", (V, par(2, 2, 2), par(2)), {}),
    ("conv2d", (IMAGE, par(2, 2, 2, 2), par(2)), {}),
    ("conv3d", (C3, par(2, 1, 2, 2, 2), par(2)), {}),
    ("convolution", (V, par(2, 2, 2), par(2), [1], [0], [1], False, [0], 1), {}),
    ("_convolution", (V, par(2, 2, 2), par(2), [1], [0], [1], True, [0], 1, False, False, True,
                      True), {}),
    ("conv_transpose1d", (V, par(2, 2, 3), par(2), [2]), {}),
    ("conv_transpose2d", (act(1, 2, 2, 2), par(2, 2, 2, 2), par(2)), {}),
    ("conv_transpose3d", (act(1, 1, 2, 2, 2), par(1, 2, 2, 2, 2), par(2)), {}),
    ("scaled_dot_product_attention _scaled_dot_product_attention_math", (Q4, K4, V4), {}),
    ("_native_multi_head_attention", (T3, T3, T3, 4, 2, par(12, 4), par(12), par(4, 4), par(4)),
     {}),
    ("_transformer_encoder_layer_fwd", (T3, 4, 2, par(12, 4), par(12), par(4, 4), par(4), False,
                                        True, 0.0, par(4),
                                        par(4), par(4), par(4), par(6, 4), par(6), par(4, 6),
                                        par(4)), {}),
    # recurrent layers
    ("rnn_relu rnn_tanh", recurrent(1, act(1, 1, 2)), {}),
    ("gru", recurrent(3, act(1, 1, 2)), {}),
    ("lstm", recurrent(4, act(1, 1, 2), act(1, 1, 2)), {}),
    ("rnn_relu_cell rnn_tanh_cell", cell(1, act(1, 2)), {}),
    ("gru_cell", cell(3, act(1, 2)), {}),
    ("lstm_cell", cell(4, act(1, 2), act(1, 2)), {}),
    # normalisation
    ("batch_norm", (act(3, 2), par(2), par(2), None, None, True, 0.1, 0.0, False), {}),
    ("native_batch_norm", (act(3, 2), par(2), par(2), None, None, True, 0.1, 0.0), {}),
    ("_native_batch_norm_legit", (act(3, 2), par(2), par(2), real(0.0, 0.0), real(1.0, 1.0), True,
                                  0.1, 0.0), {}),
    ("_native_batch_norm_legit_functional",
     (act(3, 2), par(2), par(2), real(0.5, 0.5), real(1.0, 1.0), True, 0.1, 0.0),
     {}),
    ("_native_batch_norm_legit_no_training",
     (act(3, 2), par(2), par(2), real(0.5, 0.5), real(1.0, 1.0), 0.1, 0.0), {}),
    ("group_norm", (V, 1, par(2), par(2), 0.0, False), {}),
    ("native_group_norm", (V, par(2), par(2), 1, 2, 4, 1, 0.0), {}),
    ("instance_norm", (V, par(2), par(2), None, None, True, 0.1, 0.0, False), {}),
    ("layer_norm", (H, [3], par(3), par(3), 0.0), {}),
    ("native_layer_norm", (H, [3], par(3), par(3), 0.0), {}),
    ("rms_norm _fused_rms_norm", (H, [3], par(3), 0.0), {}),
    ("_weight_norm _weight_norm_interface", (H, act(2, 1)), {}),
    # pooling
    ("max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d", (V, [2]), {}),
    ("max_pool1d_with_indices", (V, [2]), {}),
    ("max_pool2d avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d max_pool2d_with_indices",  # noqa: E501
     (IMAGE, [2, 2]), {}),
    ("max_pool3d avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d max_pool3d_with_indices",  # noqa: E501
     (C3, [2, 2, 2]), {}),
    # images
    ("upsample_nearest1d _upsample_nearest_exact1d", (V, [6]), {}),
    ("upsample_nearest2d _upsample_nearest_exact2d", (IMAGE, [6, 6]), {}),
    ("upsample_nearest3d _upsample_nearest_exact3d", (C3, [5, 5, 5]), {}),
    ("upsample_linear1d", (V, [6], False), {}),
    ("upsample_bilinear2d upsample_bicubic2d", (IMAGE, [6, 6], False), {}),
    ("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", (IMAGE, [6, 6], False), {}),
    ("upsample_trilinear3d", (C3, [5, 5, 5], False), {}),
    ("grid_sampler grid_sampler_2d", (IMAGE, act(1, 2, 2, 2, low=-0.9, high=0.9), 0, 0, False), {}),
    ("grid_sampler_3d", (C3, act(1, 2, 2, 2, 3, low=-0.9, high=0.9), 0, 0, False), {}),
    ("affine_grid_generator", (act(1, 2, 3), [1, 1, 2, 2], False), {}),
    ("im2col", (IMAGE, [2, 2], [1, 1], [0, 0], [1, 1]), {}),
    ("im2col", (IMAGE, [2, 2], [2, 1], [1, 0], [1, 2]), {}),
    ("col2im", (act(1, 4, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), {}),
    ("col2im", (act(1, 4, 9), [4, 4], [2, 2], [1, 1], [1, 1], [2, 2]), {}),
    ("col2im", (act(1, 6, 6), [5, 3], [3, 2], [2, 1], [1, 0], [1, 1]), {}),
    # movement
    ("t numpy_T mT mH adjoint matrix_H fliplr flipud rot90", (H,), {}),
    ("transpose movedim moveaxis swapaxes swapdims", (H, 0, 1), {}),
    ("permute", (H, [1, 0]), {}),
    ("select", (H, 1, 1), {}),
    ("slice", (H, 1, 1, 3), {}),
    ("narrow", (H, 1, 1, 2), {}),
    ("diagonal diag_embed diag", (H,), {}),
    ("unfold", (H, 1, 2, 1), {}),
    ("pixel_shuffle", (act(1, 4, 1, 2), 2), {}),
    ("pixel_unshuffle", (IMAGE, 2), {}),
    ("channel_shuffle native_channel_shuffle", (act(1, 4, 2, 2), 2), {}),
    ("as_strided", (H, [2, 2], [3, 1], 1), {}),
    ("flip", (H, [1]), {}),
    ("roll", (H, [1], [1]), {}),
    ("repeat tile", (H, [1, 2]), {}),
    ("repeat_interleave", (H, 2, 1), {}),
    ("expand broadcast_to expand_copy", (act(2, 1), [2, 3]), {}),
    ("expand_as", (act(2, 1), H), {}),
    ("split unsafe_split tensor_split chunk unsafe_chunk split_copy", (H, 2, 1), {}),
    ("split_with_sizes unsafe_split_with_sizes split_with_sizes_copy", (H, [1, 2], 1), {}),
        ("vsplit hsplit", (H, [1]), {}),
    ("dsplit", (B, [1]), {}),
    ("unbind_copy", (H, 1), {}),
    ("cat concat concatenate stack hstack vstack dstack column_stack meshgrid", ([H, G],), {}),
    ("meshgrid", ([act(2), act(3)],), {}),
    ("constant_pad_nd", (H, [1, 1], 2.0), {}),
    ("pad", (H, [1, 1], "constant", 2.0), {}),
    *((f"{kind}_pad{rank}d", (x, [1] * 2 * rank), {}) for kind in ("reflection", "replication")
      for rank, x in ((1, V), (2, IMAGE), (3, C3))),
    ("slice_scatter", (H, act(2, 2), 1, 0, 2), {}),
    ("select_scatter", (H, act(2), 1, 1), {}),
    ("diagonal_scatter", (H, act(2)), {}),
    ("as_strided_scatter", (H, act(2, 2), [2, 2], [3, 1], 1), {}),
    ("copy", (H, G), {}),
    ("tril triu", (H,), {}),
    ("nan_to_num", (H, 0.0, 1.0, -1.0), {}),
    # other types
    ("view_as_complex", (Q,), {}),
    ("view_as_real view_as_real_copy", (Z,), {}),
    ("complex", (H, G), {}),
    ("polar", (H, H), {}),
    # positions
    ("index _unsafe_index", (H, [whole(1, 0, 1)]), {}),
    ("index_select", (H, 1, whole(2, 0)), {}),
    ("gather", (H, 1, whole([2, 0], [1, 1])), {}),
    ("take_along_dim", (H, whole([2, 0], [1, 1]), 1), {}),
    ("take", (H, whole(2, 0, 5)), {}),
    ("masked_select", (H, MASK), {}),
    ("masked_scatter", (H, MASK, G), {}),
    ("embedding", (act(4, 2), whole(1, 3, 1)), {}),
    ("embedding_bag _embedding_bag _embedding_bag_forward_only",
     (act(4, 2), whole(1, 3, 1, 2), whole(0, 2)), {}),
    ("scatter scatter_add", (H, 1, whole([2], [0]), G), {}),
    ("scatter_reduce", (H, 1, whole([2], [0]), G, "sum"), {}),
    ("index_add index_copy", (H, 1, whole(2, 0), act(2, 2)), {}),
    ("index_reduce", (H, 1, whole(2, 0), act(2, 2), "amax"), {}),
    ("index_fill", (H, 1, whole(2, 0), 2.0), {}),
    ("index_put _unsafe_index_put _index_put_impl", (H, [whole(1)], act(3)), {}),
    ("fill", (H, 2.0), {}),
    ("linspace logspace", (act(), act(), 4), {"dtype": torch.float64}),
]  # fmt: skip

KEPT: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("relu abs neg clone detach alias contiguous positive negative absolute lift_fresh lift_fresh_copy", (H,), {}),  # noqa: E501
    ("leaky_relu", (H, 0.1), {}),
    ("rrelu", (H,), {}),
    ("rrelu_with_noise rrelu_with_noise_functional",
     (H, torch.ones(2, 3, dtype=torch.float64), 0.1, 0.3, False), {}),
    ("dropout feature_dropout", (H, 0.5, False), {}),
    ("native_dropout", (H, 0.5, True), {}),
    ("real imag conj _conj resolve_conj resolve_neg", (Z,), {}),
    ("requires_grad_", (H, False), {}),
    ("squeeze squeeze_copy", (act(2, 1, 3),), {}),
    ("unsqueeze", (H, 1), {}),
    ("atleast_1d atleast_2d atleast_3d", (H,), {}),
    ("view reshape _unsafe_view view_copy", (H, [3, 2]), {}),
    ("_reshape_alias", (H, [3, 2], [2, 1]), {}),
    ("flatten ravel", (H,), {}),
    ("unflatten", (H, 1, [3, 1]), {}),
    ("view_as reshape_as", (H, torch.ones(3, 2)), {}),
    ("to", (H, torch.float64), {}),
    ("_to_copy", (H,), {"dtype": torch.float64}),
    ("type_as", (H, real(1.0)), {}),
    ("detach_", (Act((2, 3), through=((aten.clone.default,),)),), {}),
]  # fmt: skip


# what is made, and not computed: only sizes, types or numbers are read
MADE: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("zeros ones empty rand randn", ([2, 3],), {}),
    ("full", ([2, 3], 2.0), {}),
    ("zeros_like ones_like empty_like rand_like randn_like zero", (H,), {}),
    ("new_zeros new_ones new_empty", (H, [3, 2]), {}),
    ("full_like", (H, 2.0), {}),
    ("new_full", (H, [3, 2], 2.0), {}),
    ("scalar_tensor", (2.0,), {}),
    ("new_empty_strided", (H, [2, 3], [3, 1]), {}),
    ("empty_strided", ([2, 3], [3, 1]), {}),
    ("empty_permuted", ([2, 3], [0, 1]), {}),
    ("randint", (5, [2, 3]), {}),
    ("randint_like", (H, 5), {}),
    ("randperm arange eye hann_window", (4,), {}),
    ("uniform normal_ exponential random", (H,), {}),
    ("normal_functional", (H, 0.0, 1.0), {}),
    ("size numel", (H,), {}),
    ("sym_size", (H, 1), {}),
    ("sym_numel", (H,), {}),
    ("equal", (H, G), {}),
    ("_assert_tensor_metadata", (H,), {}),
    ("_assert_async", (real(1.0),), {}),
    ("_assert_scalar", (True, "said"), {}),
    ("sym_constrain_range_for_size sym_constrain_range", (3,), {}),
]  # fmt: skip

# torch takes whole numbers alone, which have no scale
WHOLE = ("__and__", "__or__", "bitwise_and", "bitwise_or")

# operations with the rule of another one, of which nothing can be run here: they run on other
# devices, or return tensors that are not laid out in rows and columns
DEVICES = {"cudnn_grid_sampler": "grid_sampler"}
MATRIX = torch.eye(3, dtype=torch.float64).to_sparse()
FULL = torch.ones(3, 3, dtype=torch.float64)
SPARSE: dict[str, tuple[str, tuple[torch.Tensor, ...]]] = {
    "_sparse_mm": ("mm", (MATRIX, FULL)),
    "_sparse_addmm": ("addmm", (FULL, MATRIX, FULL)),
}


# other forms of operations, which have to be sound, and for some of which it is known
# how many units there are
FORMS: list[tuple[str, tuple[Any, ...], dict[str, Any], int | None]] = [
    ("diag", (par(3),), {}, None),
    ("diag_embed", (par(3),), {}, None),
    ("diag", (act(3),), {}, 3),
    ("fft_ifftshift", (H,), {}, 6),
    ("fft_fftshift", (H, [1]), {}, 6),
    ("fft_fft", (H, 4, 0), {}, 3),
    ("fft_irfft", (H,), {"dim": 0}, 3),
    ("cdist", (H, G, 1.0), {}, 1),
    ("pdist", (S, 0.0), {}, None),
    ("pdist", (S, 1.0), {}, None),
    ("pairwise_distance", (H, G, 0.0, 0.0), {}, None),
    ("as_strided", (Act((2, 3), through=((aten.t.default,),)), [2, 2], [3, 1], 1), {}, None),
    ("_native_batch_norm_legit", (act(3, 2), par(2), par(2), True, 0.1, 0.0), {}, None),
    ("nanmedian", (H,), {}, 1),
    ("median", (H,), {}, 1),
    ("sort", (H,), {}, 2),
    ("sort", (H,), {"stable": True, "dim": 0, "descending": False}, 3),
    ("argsort", (H,), {"stable": True, "dim": 0, "descending": False}, None),
    ("mode", (H,), {}, 2),
    ("topk", (H, 1, 0), {}, 3),
    ("kthvalue", (H, 1, 0), {}, 3),
    ("quantile", (H, 0.3, 0), {"interpolation": "midpoint"}, 3),
    ("nanquantile", (H, 0.4), {}, 1),
    ("max", (H,), {}, 1),
    ("max", (H, G), {}, 6),
    ("aminmax", (H,), {}, 1),
    ("var", (H,), {}, 1),
    ("var", (H, False), {}, 1),
    ("std", (H, [0]), {"correction": 0}, 3),
    ("var_mean", (H, [0]), {"keepdim": True}, 3),
    ("norm", (H, 0), {}, None),
    ("norm", (H, float("inf"), [0]), {}, 3),
    ("linalg_vector_norm", (H, 0, [0]), {}, None),
    ("linalg_norm", (B, "nuc", [0, 1]), {}, None),
    ("linalg_matrix_norm", (B, 1, [0, 1]), {}, 2),
    ("sum", (H,), {}, 1),
    ("cumsum", (H, 0), {}, 3),
    ("diff", (H, 1, 0), {}, 3),
    ("diff", (H, 1, -1, act(2, 1)), {}, 2),
    ("prod", (H,), {}, None),
    ("roll", (H, [1]), {}, 6),
    ("repeat_interleave", (H, 2), {}, 6),
    ("tensor_split", (H, [1, 2], 1), {}, 6),
    ("pad", (V, [1, 1], "circular"), {}, 8),
    ("pad", (V, [1, 1], "reflect"), {}, 8),
    ("constant_pad_nd", (H, [1, 0]), {}, 6),
    ("constant_pad_nd", (H, [-1, 1], 1.0), {}, 4),
    ("upsample_nearest1d", (V, [3]), {}, None),
    ("scatter", (H, 1, whole([2], [0]), 1.5), {}, None),
    ("scatter", (H, 1, Act((2, 1), through=((aten.gt.Scalar, 0), (aten.to.dtype, torch.int64))), G),
     {}, None),
    ("scatter_reduce", (H, 1, whole([2, 2], [0, 0]), G, "prod"), {}, None),
    ("scatter_reduce", (H, 1, whole([2, 1], [0, 0]), G, "amax"), {"include_self": False}, None),
    ("index_put", (H, [whole(1)], act(3), True), {}, None),
    ("index_put", (H, [MASK], act()), {}, None),
    ("index_put", (H, [asked(2, 3)], act()), {}, None),
    ("index", (H, [None, whole(2, 0)]), {}, 4),
    ("index", (H, [MASK]), {}, 4),
    ("take_along_dim", (H, whole([2, 0, 1, 1, 3, 5])), {}, None),
    ("take", (H, whole(2, 0, 5)), {}, 3),
    ("masked_select", (H, asked(2, 3)), {}, None),
    ("masked_scatter", (H, MASK, G), {}, 6),
    ("masked_scatter", (H, asked(2, 3), G), {}, None),
    ("pairwise_distance", (H, G, 2.0, 0.0), {}, 2),
    ("pairwise_distance", (H, G, 2.0, 0.5), {}, 0),
    ("gather", (H, 1, Act((2, 2), through=((aten.gt.Scalar, 0), (aten.to.dtype, torch.int64)))), {},
     6),
    ("masked_fill", (H, MASK, act()), {}, None),
    ("masked_fill", (H, asked(2, 3), 0.0), {}, None),
    ("where", (asked(2, 3), H, G), {}, None),
    ("pow", (H, -1), {}, 6),
    ("pow", (POSITIVE, 0.5), {}, 6),
    ("pow", (POSITIVE, G), {}, None),
    ("pow", (2.0, G), {}, None),
    ("div", (H, G), {"rounding_mode": "floor"}, None),
    ("add", (H, 1.0), {}, None),
    ("add", (H, act(3)), {}, None),
    ("mul", (H, act(2, 1)), {}, None),
    ("clamp", (H, act(2, 3), None), {}, None),
    ("clamp", (H, 0.0), {}, 6),
    ("clamp_max", (H, 0.0), {}, 6),
    ("threshold", (H, 0.0, 0.0), {}, 6),
    ("threshold", (H, 0.0, 1.0), {}, None),
    ("elu", (H, 0.0), {}, 6),
    ("softshrink", (H, 0.0), {}, 6),
    ("hardshrink", (H, 0.0), {}, 6),
    ("istft", (Act((2, 3, 4, 2), through=((aten.view_as_complex.default,),)), 4, 1, 4,
               act(4, low=0.5)), {}, None),
    ("lerp", (H, G, E), {}, None),
    ("nan_to_num", (Act((2, 3), through=((aten.reciprocal.default,),)),), {}, None),
    ("addmm", (act(3), S, R), {"beta": 0}, None),
    ("addmm", (S, act(3, 3), R), {"beta": 2, "alpha": 3}, None),
    ("einsum", ("ii->i", [S]), {}, 3),
    ("einsum", ("ij,jk,kl->il", [S, R, S]), {}, None),
    ("inner", (act(3), act(3)), {}, 4),
    ("matmul", (B, act(2)), {}, None),
    ("glu", (act(2, 4),), {}, 4),
    ("prelu", (H, par(3)), {}, 6),
    ("prelu", (H, par(1)), {}, 6),
    ("conv1d", (V, par(2, 1, 2), None, [2], [1], [1], 2), {}, None),
    ("conv1d", (V, act(2, 2, 2)), {}, None),
    ("avg_pool1d", (V, [3], [1], [1]), {}, 2),
    ("max_pool1d", (V, [2], [2], [0], [1], True), {}, 4),
    ("adaptive_avg_pool1d", (V, [3]), {}, 2),
    ("alpha_dropout", (H, 0.5, False), {}, 6),
    ("dropout", (H, 0.5, True), {}, 6),
    ("rrelu", (H, 0.1, 0.3, True), {}, 6),
    ("bernoulli", (H, 0.5), {}, None),
    ("fill", (H, act()), {}, 1),
    ("cat", ([H, torch.ones(2, 1)], 1), {}, 6),
    ("stack", ([H, G], 1), {}, 12),
    ("embedding", (par(4, 2), whole(1, 3, 1)), {}, None),
    ("embedding_bag", (par(4, 2), whole(1, 3, 1), whole(0, 2), False, 0, False, act(3)), {}, None),
    ("layer_norm", (H, [2, 3], None, None, 0.0), {}, None),
    ("instance_norm", (V, None, None, None, None, True, 0.1, 0.0, False), {}, None),
    ("group_norm", (act(1, 4, 2), 2, par(4), par(4), 0.0, False), {}, None),
    ("scaled_dot_product_attention", (Q4, K4, V4, act(2, 2)), {}, None),
    ("grid_sampler", (IMAGE, act(1, 2, 2, 2), 0, 1, True), {}, None),
    # conversions to integers, before or after the operation, and to booleans
    ("to", (H, torch.int64), {}, 0),
    ("to", (H, torch.bool), {}, None),
    ("_to_copy", (H,), {"dtype": torch.int32}, 0),
    ("type_as", (H, whole(1)), {}, 0),
    ("sum", (H, [1]), {"dtype": torch.int64}, 0),
    ("sum", (H, [1]), {"dtype": torch.bool}, None),
    ("nansum", (H, [1]), {"dtype": torch.int64}, 0),
    ("cumsum", (H, 1), {"dtype": torch.int64}, 0),
    ("prod", (H, 1), {"dtype": torch.int64}, 0),
    ("cumprod", (H, 1), {"dtype": torch.int64}, 0),
    ("copy", (whole([1, 2, 3], [4, 5, 6]), H), {}, 0),
    ("fill", (whole(1, 2), act()), {}, 0),
    ("linspace", (act(), act(), 4), {"dtype": torch.int64}, 0),
]  # fmt: skip


def spelled(table: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> dict[str, Case]:
    """One case for each name."""
    return {name: (args, kwargs) for names, args, kwargs in table for name in names.split()}


def exists(name: str) -> bool:
    """Whether this version of torch has an operation."""
    try:
        packet_of(name)
    except AttributeError:
        return False
    return True


def variants(cases: dict[str, Case]) -> dict[str, Case]:
    """The cases of all registered operations in a table, in place and copied ones too."""
    found = {}
    for name in filter(exists, NAMES):
        # (an operation with a case of its own comes before what it is a variant of)
        for base in (name, name.removesuffix("_"), name.removesuffix("_copy")):
            if base in cases and not (base != name and name in ELSEWHERE):
                found[name] = cases[base]
                break
    return found


# every name that has a rule of this library, without the namespace of torch
NAMES = sorted(
    name.removeprefix("aten.")
    for name, rule in RULES.items()
    if rule.__module__.partition(".")[0] == "pathspace"
)
ELSEWHERE = {name for table in (TABLE, KEPT, MADE) for name in spelled(table)}
# operations of the tables without a rule: torch knows smaller steps, or they are pinned
TAKEN_APART: dict[str, Case] = {
    name: case
    for table in (TABLE, KEPT)
    for name, case in spelled(table).items()
    if name not in NAMES and exists(name)
}
TELLING = variants(spelled(TABLE))
COPYING = variants(spelled(KEPT))
CREATED = variants(spelled(MADE))
