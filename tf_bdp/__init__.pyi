from . import accounting as accounting
from . import aggregators as aggregators
from . import engines as engines
from . import learning as learning
from . import mechanisms as mechanisms
from . import ops as ops
from . import reporting as reporting
from . import training as training

__version__: str
