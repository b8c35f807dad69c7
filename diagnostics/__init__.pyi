"""The public names and where they live; the package imports each when it is first used."""

from .chain.chain import MarkovChain as MarkovChain
from .chain.efficiency import ChainRecord as ChainRecord
from .parameters.conservation import conserved as conserved
from .parameters.cost import cost as cost
from .parameters.degeneracy import degeneracy as degeneracy
from .parameters.gradients import gradients as gradients
from .report.diagnosis import Diagnosis as Diagnosis
from .report.diagnosis import diagnose as diagnose
from .report.page import Report as Report
from .report.page import report as report
from .report.versus import versus as versus
from .run.alarms import Alarm as Alarm
from .run.callbacks import fabric_callback as fabric_callback
from .run.callbacks import lightning_callback as lightning_callback
from .run.callbacks import transformers_callback as transformers_callback
from .run.watching import Watching as Watching
from .run.watching import watching as watching
from .shared.tables import Estimate as Estimate
from .shared.tables import Table as Table
from .signal.signal import signal as signal
from .signal.spectra import jacobian as jacobian
from .signal.spectra import spectrum as spectrum
from .signal.spectra import top_singular as top_singular
from .signal.spectra import trace_k as trace_k
