"""diagnostics: how does this network behave?

Markov chain: :class:`MarkovChain`, the residual additions of a model as a learnable chain; :class:`ChainRecord`.
Conservation: :func:`conserved`, the quantities that gradient flow keeps constant, one per unit.
Signal: :func:`signal` and :func:`gradients` by layer, :func:`jacobian` and its spectrum (:func:`trace_k`,
:func:`top_singular`, :func:`spectrum`), order and chaos (:func:`growth_exponent`, :func:`sweep`,
:func:`critical_point`), :func:`residual_control`.
Parameters: :func:`degeneracy`, growing a model (:func:`predict_growth`, :func:`rank_growths`, :func:`widen`,
:func:`deepen`), :func:`cost` and :func:`compare_costs`, :func:`suggest_decay`.
Page: :func:`report` looks at a model from all sides and returns a :class:`Report`, one self-contained HTML page;
:func:`versus` puts two of them side by side.
Together: :func:`diagnose`, on your own checkpoint, data and loss.
Training: :func:`watching` measures a training loop (:class:`Watching`) and raises each :class:`Alarm` with its cause.
Results: :class:`Table` and :class:`Estimate`; :func:`compare` for two runs or checkpoints.
"""

from pathspace.diagnostics.chain import MarkovChain
from pathspace.diagnostics.conservation import conserved
from pathspace.diagnostics.control import residual_control
from pathspace.diagnostics.cost import compare_costs, cost, depth_or_width
from pathspace.diagnostics.criticality import critical_point, growth_exponent, sweep
from pathspace.diagnostics.degeneracy import degeneracy
from pathspace.diagnostics.diagnosis import Diagnosis, diagnose
from pathspace.diagnostics.efficiency import ChainRecord
from pathspace.diagnostics.gradients import gradients
from pathspace.diagnostics.growth import deepen, predict_growth, rank_growths, widen
from pathspace.diagnostics.noise import suggest_decay
from pathspace.diagnostics.report import Report, report
from pathspace.diagnostics.report.versus import Comparison, versus
from pathspace.diagnostics.run.alarms import Alarm
from pathspace.diagnostics.run.callbacks import fabric_callback, lightning_callback, transformers_callback
from pathspace.diagnostics.run.watching import Watching, watching
from pathspace.diagnostics.signal import signal
from pathspace.diagnostics.spectra import jacobian, spectrum, top_singular, trace_k
from pathspace.diagnostics.tables import Estimate, Table, compare
from pathspace.namespace import keep_functions

__all__ = [
    "Alarm",
    "ChainRecord",
    "Comparison",
    "Diagnosis",
    "Estimate",
    "MarkovChain",
    "Report",
    "Table",
    "Watching",
    "compare",
    "compare_costs",
    "conserved",
    "cost",
    "critical_point",
    "deepen",
    "degeneracy",
    "depth_or_width",
    "diagnose",
    "fabric_callback",
    "gradients",
    "growth_exponent",
    "jacobian",
    "lightning_callback",
    "predict_growth",
    "rank_growths",
    "report",
    "residual_control",
    "signal",
    "spectrum",
    "suggest_decay",
    "sweep",
    "top_singular",
    "trace_k",
    "transformers_callback",
    "versus",
    "watching",
    "widen",
]
keep_functions(__name__, __all__)
