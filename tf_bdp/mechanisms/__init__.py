"""What a round releases, and what that costs whom: pure arithmetic."""

from tf_bdp.mechanisms.adaptive_clipping import (
  AdaptiveClipping as AdaptiveClipping,
)
from tf_bdp.mechanisms.base import LEVELS as LEVELS
from tf_bdp.mechanisms.base import Facts as Facts
from tf_bdp.mechanisms.base import Mechanism as Mechanism
from tf_bdp.mechanisms.base import register as register
from tf_bdp.mechanisms.client import ClientMechanism as ClientMechanism
from tf_bdp.mechanisms.instance import InstanceMechanism as InstanceMechanism
from tf_bdp.mechanisms.joint import JointMechanism as JointMechanism
from tf_bdp.mechanisms.measurements import Measurements as Measurements
from tf_bdp.mechanisms.split import SplitMechanism as SplitMechanism
