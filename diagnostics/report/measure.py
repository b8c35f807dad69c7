"""The measurements of the page: one function per part, returning plain values or the
reason why there are none.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.checker import check
from pathspace.errors import PathspaceError
from pathspace.evidence.explain import Explanation
from pathspace.evidence.proof import proof
from pathspace.evidence.verify import verify
from pathspace.paths.norms import log_factors
from pathspace.paths.skeleton import Skeleton

from ..chain.chain import MarkovChain
from ..chain.efficiency import ChainRecord
from ..chain.first_steps import first_steps
from ..parameters.degeneracy import degeneracy
from ..parameters.gradients import gradients, imbalance
from ..run.examine import examine
from ..shared.subject import Subject
from ..signal.signal import signal

Facts = dict[str, Any]

MOST_SIGNAL = 300_000_000
MOST_DEGENERACY = 200_000
MOST_PROOF = 200_000
# (each row is a backward pass: the whole page may cost sixty forward passes)
DEGENERACY_ROWS = 24
EXACT_DEGENERACY = 1_000
BINS = 48
_FINE = 0.02


def attempt(what: str, measure: Callable[[], Facts]) -> Facts:
    """Measure, or return the reason for a failure, so that the other parts of
    the page are still written.

    Args:
        what: the part, as the start of the sentence.
        measure: a function that returns the measurements.

    Returns:
        The measurements, or ``{"absent": sentence}``.

    Example:
        >>> attempt("The chain", lambda: {"length": 1 // 0})
        {'absent': 'The chain was not measured: ZeroDivisionError (integer division or modulo by zero).'}
    """  # noqa: E501
    try:
        return measure()
    except PathspaceError as error:
        return {"absent": f"{what} was not measured: {_shortened(error)}"}
    except MemoryError:
        return {
            "absent": f"{what} was not measured: the memory was exhausted; give smaller inputs."
        }
    except Exception as error:  # a user's model or loss may raise anything
        return {
            "absent": (
                f"{what} was not measured: {type(error).__name__}"
                f" ({_shortened(error).rstrip('.')})."
            )
        }


def _shortened(error: Exception) -> str:
    return textwrap.shorten(str(error), 400, placeholder=" ...")


def model_facts(subject: Subject, explanation: Explanation) -> Facts:
    """Name, size, mode and inputs of the model, and the numbers of parameters
    inside and outside path space.
    """
    model, graph = subject.model, explanation.graph
    shapes = [
        f"{'x'.join(map(str, leaf.shape)) or 'scalar'} {str(leaf.dtype).removeprefix('torch.')}"
        for leaf in pytree.tree_leaves((subject.args, subject.kwargs))
        if isinstance(leaf, Tensor)
    ]
    return {
        "name": type(model).__name__,
        "tensors": len(explanation.parameters),
        "total": sum(graph.parameters[entry.name].numel() for entry in explanation.parameters),
        **explanation.totals,
        "units": graph.num_units,
        "units_exact": graph.num_exact_units,
        "approximate": graph.num_units - graph.num_exact_units,
        "dimension": graph.dimension,
        "dimension_exact": graph.exact_dimension,
        "has_cuts": graph.has_cuts,
        "training": model.training,
        "inputs": shapes,
        "norm_eps": graph.norm_eps,
    }


def parameter_table(explanation: Explanation) -> Facts:
    """All parameters, and all operations that fixed a scale."""
    return {
        "parameters": [
            {**asdict(entry), "status": entry.status} for entry in explanation.parameters
        ],
        "pins": [asdict(pin) for pin in explanation.graph.pinned],
    }


def certificate_facts(subject: Subject, options: Mapping[str, Any]) -> Facts:
    """The verdicts of :func:`pathspace.verify` with their evidence."""
    certificate = verify(subject.model, *subject.args, kwargs=subject.kwargs, **options)
    return certificate.to_dict()


def proof_facts(skeleton: Skeleton, name: str) -> Facts:
    """The proof of Theorem 3, and the verdict of the independent checker."""
    units = skeleton.graph.num_units
    if units > MOST_PROOF:
        return {
            "absent": (
                f"The proof was not written: the page judges proofs of up to {MOST_PROOF:,} units,"
                f" and there are {units:,}; 'pathspace verify --proof' writes it."
            )
        }
    document = proof(skeleton, name)
    judgement = check(document)
    return {
        "accepted": judgement.accepted,
        "reason": judgement.reason,
        "weights": judgement.weights,
        "units": judgement.units,
        "dimension": judgement.dimension,
        "digest": document["digest"],
    }


def path_value_facts(skeleton: Skeleton) -> Facts:
    """Histograms of ``log10 |path value|`` and of ``log10`` of the learning rate's
    multiplier, over all basis paths.
    """
    values, multipliers = Tally(), Tally()
    for weights, scales in log_factors(skeleton, zeros=True):
        values.add((weights + scales) / math.log(10))
        multipliers.add(-2 * scales / math.log(10))
    found = {"values": values.to_dict(), "multipliers": multipliers.to_dict()}
    return {"rule": skeleton.rule, **found, "dead": len(skeleton.dead)}


class Tally:
    """A histogram of numbers that arrive in pieces: fine bins while counting,
    coarse bins in the result.

    Example:
        >>> tally = Tally()
        >>> tally.add(np.array([0.0, 1.0, 1.0, -np.inf]))
        >>> tally.to_dict()["count"], tally.to_dict()["zeros"], tally.to_dict()["median"]
        (3, 1, 1.0)
    """

    def __init__(self) -> None:
        self.zeros = self.count = self.not_finite = 0
        self.fine: Counter[int] = Counter()
        self.total = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, numbers: np.ndarray) -> None:
        """Count logarithms; minus infinity is the logarithm of a zero."""
        kept, zeros = numbers[np.isfinite(numbers)], int(np.isneginf(numbers).sum())
        self.zeros += zeros
        self.not_finite += len(numbers) - len(kept) - zeros
        if not len(kept):
            return
        self.count += len(kept)
        self.total += float(kept.sum())
        self.low, self.high = min(self.low, float(kept.min())), max(self.high, float(kept.max()))
        # (counted, not sorted: there may be as many numbers as weights)
        keys = np.floor(kept / _FINE).astype(np.int64)
        first = int(keys.min())
        counts = np.bincount(keys - first)
        for place in np.flatnonzero(counts).tolist():
            self.fine[first + place] += int(counts[place])

    def to_dict(self) -> Facts:
        """Bins of equal width with their counts, mean, range, and quantiles to within
        a hundredth of a decade.
        """
        found = {"count": self.count, "zeros": self.zeros, "not_finite": self.not_finite}
        if not self.count:
            return {**found, "edges": [], "counts": []}
        first, span = min(self.fine), max(self.fine) - min(self.fine) + 1
        most = min(BINS, max(8, math.isqrt(self.count)))
        each = max(1, -(-span // most))
        counts = [0] * -(-span // each)
        for key, count in self.fine.items():
            counts[(key - first) // each] += count
        return {
            **found,
            "edges": [round((first + i * each) * _FINE, 6) for i in range(len(counts) + 1)],
            "counts": counts,
            "mean": self.total / self.count,
            "smallest": self.low,
            "largest": self.high,
            "q05": self._quantile(0.05),
            "median": self._quantile(0.5),
            "q95": self._quantile(0.95),
        }

    def _quantile(self, q: float) -> float:
        seen, wanted = 0, q * self.count
        for key in sorted(self.fine):
            seen += self.fine[key]
            if seen >= wanted:
                # the middle of the fine bin, within the range of the data
                return min(max((key + 0.5) * _FINE, self.low), self.high)
        return self.high


def chain_facts(subject: Subject) -> Facts:
    """The residual additions as a Markov chain, observed on all batches."""
    chain = MarkovChain.trace(subject.model, *subject.args, kwargs=subject.kwargs)
    if not len(chain):
        return {"absent": chain.sentence()}
    record = ChainRecord.merge(chain.observe(subject.loss, *batch) for batch in subject.batches)
    started = first_steps(chain, record, subject.loss, subject.batches)
    more = {} if started is None else started.to_dict()
    return {
        "sentence": chain.sentence(),
        **record.to_dict(),
        **more,
        "dismissed": len(chain.dismissed),
    }


def alarm_facts(subject: Subject, explanation: Explanation) -> Facts:
    """Problems of the model on its batches, by the rules for watched runs."""
    return {"alarms": [asdict(alarm) for alarm in examine(subject, explanation.graph)]}


def signal_facts(subject: Subject) -> Facts:
    """Variance and gains of every layer."""
    if subject.weights > MOST_SIGNAL:
        return {
            "absent": (
                "Signal propagation was not measured: the page measures models of up to"
                f" {MOST_SIGNAL:,} weights, and this one has {subject.weights:,}; call"
                " diagnostics.signal with names= for some layers."
            )
        }
    table = signal(subject.model, *subject.args, kwargs=subject.kwargs, jvp=False)
    layers = dict(subject.model.named_modules())
    rows = [
        {
            "layer": row.layer or row.kind,
            "kind": row.kind,
            "mean": row.mean,
            "variance": row.variance,
            "zeros": row.zeros,
            "units": row.units,
            "dead": row.dead,
            "vjp_gain": None if row.vjp_gain is None else row.vjp_gain.value,
            "vjp_error": None if row.vjp_gain is None else row.vjp_gain.error,
            "expected_gain": row.expected_gain,
            "output_gain": None if row.output_gain is None else row.output_gain.value,
            "weights": any(p.dim() > 1 for p in layers[row.layer.split(" (")[0]].parameters()),
            "finite": row.finite,
        }
        for row in table
    ]
    return {"rows": rows, "notes": list(table.notes)}


def gradient_facts(subject: Subject) -> Facts:
    """Gradient RMS of every parameter tensor, over all batches."""
    if subject.weights > MOST_SIGNAL:
        return {
            "absent": (
                f"Gradients were not measured: the page measures models of up to {MOST_SIGNAL:,}"
                f" weights, and this one has {subject.weights:,}; call"
                " pathspace.diagnostics.gradients with"
                " names= for some parameters."
            )
        }
    table = gradients(subject.model, subject.loss, subject.batches)
    rows = [{"parameter": row.parameter, "rms": row.rms, "relative": row.relative} for row in table]
    notes = [note for note in table.notes if not note.startswith("Gradient noise")]
    return {"rows": rows, "imbalance": imbalance(table), "notes": notes}


def degeneracy_facts(subject: Subject, explanation: Explanation) -> Facts:
    """Directions of parameter space that do not change the outputs on the batch, by cause."""
    trainable = sum(p.numel() for p in subject.model.parameters() if p.requires_grad)
    if trainable > MOST_DEGENERACY:
        return {
            "absent": (
                "Degeneracy was not measured: the page looks at models of up to"
                f" {MOST_DEGENERACY:,} trainable scalars, and this one has {trainable:,}; call"
                " pathspace.diagnostics.degeneracy on a part of it."
            )
        }
    found = degeneracy(
        subject.model,
        *subject.args,
        kwargs=subject.kwargs,
        graph=explanation.graph,
        max_rows=DEGENERACY_ROWS if trainable > EXACT_DEGENERACY else 2000,
        max_exact=EXACT_DEGENERACY,
    )
    tensors = [asdict(row) for row in found.tensors if row.dead or (row.gauge or 0) > 0.005]
    return {**asdict(found), "tensors": tensors, "bounded_by_sample": found.bounded_by_sample}
