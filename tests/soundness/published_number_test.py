"""Why the number of participants is secret.

Whether a client was drawn shows in how many were. The divergence of a round is
computed here by quadrature, once of what is released and once of that together
with the number n of participants. tests/reporting/run_report_test.py holds that
nothing meant for publication has n.
"""

import numpy as np
import pytest
from scipy import stats

from tf_bdp import mechanisms
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.mechanisms import measurements

_DELTA = 1e-3
_CLIENTS, _CHANCE, _NOISE = 20, 0.5, 1.5


def _divergence(epsilon, published):
  """Returns δ at ε of adding and of removing a client, the larger one.

  The others send zeros, and the client a 1, so that the sum is 0 or 1.
  """
  points = np.linspace(-12 * _NOISE, 12 * _NOISE + 1, 20_001)
  absent, present = (
    stats.norm.pdf(points, mean, _NOISE) for mean in (0.0, 1.0)
  )
  number = np.arange(_CLIENTS + 1)
  others = stats.binom.pmf(number, _CLIENTS - 1, _CHANCE)
  one_more = stats.binom.pmf(number - 1, _CLIENTS - 1, _CHANCE)
  with_client = (1 - _CHANCE) * np.outer(others, absent) + _CHANCE * np.outer(
    one_more, present
  )
  without = np.outer(others, absent)
  if not published:
    with_client, without = (
      np.sum(part, axis=0, keepdims=True) for part in (with_client, without)
    )
  step = points[1] - points[0]
  return max(
    step * np.sum(np.maximum(one - np.exp(epsilon) * other, 0.0))
    for one, other in ((with_client, without), (without, with_client))
  )


def _claimed():
  """Returns what is claimed of one round."""
  mechanism = mechanisms.ClientMechanism(
    'sum', _NOISE, 1.0, _CHANCE, _CHANCE * _CLIENTS
  )
  nobody = np.zeros(0), np.zeros(0, bool)
  event = mechanism.event(measurements.Measurements(10, 0, 1.0, *nobody))
  accountant = accountant_lib.BayesianAccountant().compose(event)
  return accountant.get_dp_epsilon(_DELTA)


def test_the_claim_holds_if_the_number_of_participants_is_secret():
  assert _divergence(_claimed(), published=False) == pytest.approx(
    _DELTA, rel=1e-3
  )


def test_it_does_not_if_the_number_is_published():
  assert _divergence(_claimed(), published=True) > 4 * _DELTA
