"""Accountants, events and rounds that the tests of this folder share."""

import contextlib
import copy
import json

import attr
import dp_accounting
import numpy as np
import pytest
from hypothesis import strategies as st

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import (
  conversion,
  events,
  mean_bounds,
  privacy_profiles,
  worst_case,
)

DELTA = 1e-5
ORDERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
FEW_ORDERS = (1, 2, 4, 8, 16)
COMPOSITIONS = accountant_lib.COMPOSITIONS
CONVERSIONS = conversion.CONVERSIONS
ESTIMATORS = tuple(mean_bounds.ESTIMATORS)

every_kind = pytest.mark.parametrize(
  'composition, estimator', [(c, e) for c in COMPOSITIONS for e in ESTIMATORS]
)
# The tests' lists of orders are short.
ignore_best_order = pytest.mark.filterwarnings('ignore:The best order')

compositions = st.sampled_from(COMPOSITIONS)
estimators = st.sampled_from(ESTIMATORS)
conversions = st.sampled_from(CONVERSIONS)


@pytest.fixture(autouse=True, scope='module')
def moments_alone():
  """For tests about moments: no figure is replaced by that of exact DP."""
  with pytest.MonkeyPatch.context() as patch:
    unbounded = privacy_profiles.UnboundedProfiles()
    patch.setattr(worst_case, 'profiles', lambda _: unbounded)
    yield


def make_accountant(composition='panel', total_rounds=10, **settings):
  """Of few orders, and of ten rounds where they must be told."""
  if composition == 'holder':
    settings['total_rounds'] = total_rounds
  settings.setdefault('orders', ORDERS)
  settings.setdefault('estimator', 'betting')  # By moments.
  return accountant_lib.BayesianAccountant(composition, **settings)


def make_rdp_accountant(orders=ORDERS):
  """dp_accounting's own, of the same orders."""
  return dp_accounting.rdp.RdpAccountant([order + 1 for order in orders])


def rdp_epsilon(event, count=1, orders=ORDERS, delta=DELTA):
  """ε as dp_accounting computes it at the same orders."""
  return make_rdp_accountant(orders).compose(event, count).get_epsilon(delta)


def tail_delta(estimator, delta=DELTA):
  """What is left of δ, a tenth of which is kept for bounds that may fail."""
  return delta if estimator == 'population' else 0.9 * delta


def sampled_gaussian(q, noise_multiplier):
  return dp_accounting.PoissonSampledDpEvent(
    q, dp_accounting.GaussianDpEvent(noise_multiplier)
  )


def make_event(
  distances=(0.01, 0.02, 0.05, 0.04), q=0.3, worst=0.25, panel=True
):
  return events.BayesianGaussianEvent(distances, q, worst, panel)


def random_event(seed=0, units=20, q=0.3, worst=0.25, spread=4.0):
  generator = np.random.default_rng(seed)
  return make_event(worst * generator.beta(0.5, spread, units), q, worst)


def make_groups():
  """Groups that differ in their distances, sizes, q and worst cases."""
  return [
    random_event(0),
    random_event(1, units=12, q=0.05, worst=0.4),
    random_event(2, units=30, q=0.6, worst=0.1),
  ]


def reported(costs, failure_probability=1e-9, q=0.3, worst=0.25):
  return events.ReportedCostEvent(costs, failure_probability, q, worst)


def with_inclusion(event, probability):
  return attr.evolve(event, inclusion_probability=probability)


# Few of them, so that the oracles' sums of many digits can be kept.
_SHARES = np.linspace(0, 1, 9) ** 4


@st.composite
def rounds(draw, most=3, units=(3, 5), chances=(1.0,)):
  """Rounds of a panel of some groups, and how often each of them took place.

  Args:
    draw: Hypothesis' own.
    most: How many different ones.
    units: Of a group.
    chances: That a group takes part for all to see.
  """
  sizes = draw(st.lists(st.sampled_from(units), min_size=1, max_size=3))
  generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

  def group(units):
    worst = draw(st.sampled_from([1e-3, 0.1, 0.25, 1.0]))
    distances = worst * generator.choice(_SHARES, units)
    q = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    chance = draw(st.sampled_from(chances))
    return with_inclusion(make_event(distances, q, worst), chance)

  return [
    (events.ParallelEvent([group(units) for units in sizes]), repeats)
    for repeats in draw(st.lists(st.integers(1, 3), min_size=1, max_size=most))
  ]


def json_copy(state):
  """The state as it comes back from a file."""
  return json.loads(json.dumps(state, allow_nan=False))


def restored(accountant):
  """An accountant of the same settings, with the state from a file."""
  settings = accountant.settings
  result = accountant_lib.BayesianAccountant(**settings)
  result.load_state_dict(json_copy(accountant.state_dict()))
  return result


@contextlib.contextmanager
def unchanged(accountant):
  """Asserts that an accountant is afterwards what it was before."""
  before = copy.deepcopy(accountant.state_dict())
  yield
  assert accountant.state_dict() == before


def assert_refused(accountant, event, sentence=None, error=ValueError):
  """Neither supported, nor composed, nor asked about; and nothing changes."""
  with unchanged(accountant):
    assert not accountant.supports(event)
    with pytest.raises(error, match=sentence):
      accountant.compose(event)
    with pytest.raises(error, match=sentence):
      accountant.would_exceed(event, 1.0, DELTA)
