"""The figures that the paper prints, to set ours beside them.

Triastcyn and Faltings (2019), "Federated Learning with Bayesian Differential
Privacy", Tables I to IV.
"""

from typing import NamedTuple


class ClientCell(NamedTuple):
  """A row of Tables I to III: accuracies and (ε, δ)."""

  clients: int
  baseline: float
  dp_accuracy: float
  bdp_accuracy: float
  dp_epsilon: float
  bdp_epsilon: float
  delta: float

  @property
  def name(self) -> str:
    """As files and settings know it."""
    return str(self.clients)


class JointCell(NamedTuple):
  """A row of Table IV, with 100 clients; ε of examples is 0.1 at δ = 1e-5."""

  name: str
  baseline: float
  dp_accuracy: float
  bdp_accuracy: float
  client_epsilon: float
  client_delta: float = 1e-3
  example_epsilon: float = 0.1
  example_delta: float = 1e-5
  clients: int = 100


CLIENT_TABLES = {
  1: (
    ClientCell(100, 0.97, 0.78, 0.88, 8.0, 4.0, 1e-3),
    ClientCell(1000, 0.98, 0.95, 0.96, 3.0, 1.5, 1e-5),
    ClientCell(10000, 0.99, 0.96, 0.97, 1.0, 0.6, 1e-6),
  ),
  2: (
    ClientCell(100, 0.97, 0.86, 0.92, 8.0, 2.0, 1e-3),
    ClientCell(1000, 0.98, 0.97, 0.97, 3.0, 1.0, 1e-5),
    ClientCell(10000, 0.99, 0.97, 0.98, 1.0, 0.5, 1e-6),
  ),
  3: (
    ClientCell(100, 0.70, 0.60, 0.65, 8.0, 2.1, 1e-3),
    ClientCell(1000, 0.71, 0.67, 0.68, 2.0, 0.5, 1e-5),
    ClientCell(10000, 0.72, 0.68, 0.69, 1.0, 0.2, 1e-6),
  ),
}
JOINT_TABLE = (
  JointCell('aptos', 0.70, 0.42, 0.64, 1.0),
  JointCell('mnist_iid', 0.97, 0.15, 0.74, 2.0),
  JointCell('mnist_shards', 0.97, 0.12, 0.62, 4.0),
)
TITLES = {
  1: 'MNIST, non-i.i.d., client privacy',
  2: 'MNIST, i.i.d., client privacy',
  3: 'APTOS 2019, i.i.d., client privacy',
  4: 'Joint privacy, 100 clients',
}
