"""The public names and where they live; the package imports each when it is first used."""

from .optim import EMASGD as EMASGD
from .optim import GSGD as GSGD
from .optim import GAdam as GAdam
from .optim import GaugeFixed as GaugeFixed
from .optim import PathNorm as PathNorm
from .optim import PathSGD as PathSGD
from .optim import RescaleSGD as RescaleSGD
from .optim import SignProp as SignProp
from .optim import init_skeleton as init_skeleton
from .penal import penalize as penalize
from .suggest import Advice as Advice
from .suggest import suggest as suggest
from .trainer import Trainer as Trainer
