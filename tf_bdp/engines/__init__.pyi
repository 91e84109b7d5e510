from .base import ENGINES as ENGINES
from .base import Engine as Engine
from .base import Round as Round
from .base import create as create
from .in_process import InProcessEngine as InProcessEngine
from .in_process import (
  compute_clients_in_parallel as compute_clients_in_parallel,
)
from .tff import TffEngine as TffEngine
