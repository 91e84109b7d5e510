"""Bayesian privacy accounting, without TensorFlow."""

from tf_bdp.accounting.accountant import (
  DEFAULT_ORDERS as DEFAULT_ORDERS,
)
from tf_bdp.accounting.accountant import (
  BayesianAccountant as BayesianAccountant,
)
from tf_bdp.accounting.claims import (
  CLAIMS as CLAIMS,
)
from tf_bdp.accounting.conversion import (
  attack_success_bound as attack_success_bound,
)
from tf_bdp.accounting.events import (
  BayesianGaussianEvent as BayesianGaussianEvent,
)
from tf_bdp.accounting.events import (
  ParallelEvent as ParallelEvent,
)
from tf_bdp.accounting.events import (
  ReportedCostEvent as ReportedCostEvent,
)
from tf_bdp.accounting.individual_filter import (
  IndividualFilter as IndividualFilter,
)
from tf_bdp.accounting.mean_bounds import (
  bernstein as bernstein,
)
from tf_bdp.accounting.mean_bounds import (
  betting as betting,
)
from tf_bdp.accounting.mean_bounds import (
  student_t as student_t,
)
from tf_bdp.accounting.sampled_gaussian import log_moments as log_moments
