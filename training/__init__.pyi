"""The public names and where they live; the package imports each when it is first used."""

from .init_skeleton import init_skeleton_ as init_skeleton_
from .optim import GSGD as GSGD
from .optim import GAdam as GAdam
from .optim import GaugeFixed as GaugeFixed
from .optim import PathSpace as PathSpace
from .path_norm import PathNorm as PathNorm
from .path_sgd import PathSGD as PathSGD
from .penal import penalise_ as penalise_
from .suggest import Advice as Advice
from .suggest import suggest as suggest
