"""Does Bayesian privacy apply to these data? Watched, not assumed.

BDP speaks of people drawn from the distribution that the sampled units show.
Three things can make that empty: a tail that the sample has not seen, units
that no longer come from the distribution they came from, and groups of units
that differ. Where some units are held out, a fourth check compares them with
those that train. Each check gives a verdict and the figure behind it; where one
is not 'ok', the figure to rely on is that of differential privacy.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Optional, Union

import numpy as np
import numpy.typing as npt
from scipy import stats

from tf_bdp.accounting import chord_table, events

VERDICTS = ('ok', 'doubtful', 'not applicable')

# Below this p-value a difference is taken to be one, and its size decides.
_SIGNIFICANCE = 0.01
_FEWEST_UNITS = 20
# How many times farther one half may be than the other. ε grows at least in
# proportion to distances. A quarter more is no more than what different panels
# of one population differ by; with twice as much the one half tells nothing
# about the other.
_DOUBTFUL_GAP, _LARGEST_GAP = 1.25, 2.0
# Rounds that are looked at, evenly spread; more would tell no more.
_MOST_ROUNDS = 1000


class Finding(NamedTuple):
  """The outcome of one check.

  Attributes:
    check: What was checked.
    verdict: 'ok', 'doubtful' or 'not applicable'.
    figures: The numbers behind the verdict.
    meaning: One sentence for a reader.
  """

  check: str
  verdict: str
  figures: dict[str, float]
  meaning: str


def check_rounds(
  rounds: Sequence[Union[events.BayesianGaussianEvent, events.ParallelEvent]],
  order: int,
  held_out: bool = False,
) -> list[Finding]:
  """Checks the tail of the costs, drift over rounds, and order of arrival.

  Args:
    rounds: The events of all rounds in which units were sampled.
    order: The order λ at which costs are compared.
    held_out: Whether the second of two groups are units that never train. They
      are compared with the first, of which the other checks are.

  Returns:
    The findings; none if there are no rounds.
  """
  if not rounds:
    return []
  if held_out:
    first, second = (
      np.array([event.groups[half].squared_distances for event in rounds])
      for half in (0, 1)
    )
    return [
      *check_rounds([event.groups[0] for event in rounds], order),
      held_out_gap(first, second),
    ]
  panel = all(event.panel for event in rounds)
  total = len(rounds)
  if total > _MOST_ROUNDS:
    chosen = np.linspace(0, total - 1, _MOST_ROUNDS).astype(int)
    rounds = [rounds[i] for i in chosen]
  costs = _costs(rounds, order)
  distances = [
    np.sqrt(np.concatenate([g.squared_distances for g in event.groups]))
    for event in rounds
  ]
  # Without a panel, a person is as likely to be any unit of a round.
  per_person = (
    np.mean(costs, axis=0) if panel else np.concatenate(costs)
  ) * total
  findings = [tail(per_person)]
  half = len(rounds) // 2
  if half:
    # Every round is measured, so a change of scale common to all is no drift.
    scales = [np.median(part) for part in distances]
    distances = [d / (s or 1.0) for d, s in zip(distances, scales)]
    # Rounds of the same unit are not independent: one value each.
    early, late = (
      np.mean(part, axis=0) if panel else np.concatenate(part)
      for part in (distances[:half], distances[-half:])
    )
    findings.append(drift(early, late))
  if panel:
    findings.append(exchangeability(np.mean(distances, axis=0)))
  return findings


def _costs(
  rounds: Sequence[Union[events.BayesianGaussianEvent, events.ParallelEvent]],
  order: int,
) -> list[np.ndarray]:
  """Returns ℓ of all units of each round at one order."""
  groups = [group for event in rounds for group in event.groups]
  sizes = [group.squared_distances.size for group in groups]
  distances = np.concatenate([group.squared_distances for group in groups])
  probabilities = np.repeat(
    [group.participation_probability for group in groups], sizes
  )
  costs = np.empty(distances.size)
  for q in np.unique(probabilities):  # Many units at once are faster.
    some = probabilities == q
    costs[some] = chord_table.log_moments_upper_bound(
      distances[some], float(q), (order,), 'tight'
    )[:, 0]
  of_rounds = [
    sum(group.squared_distances.size for group in event.groups)
    for event in rounds
  ]
  return np.split(costs, np.cumsum(of_rounds)[:-1])


def tail(log_values: npt.ArrayLike) -> Finding:
  """Checks whether the mean of y = exp ℓ can be known from the sample.

  The shape k̂ of a generalised Pareto distribution fitted to the largest
  samples tells how many moments y has: no variance from 1/2 on, and no mean
  from 1 on (Vehtari, Simpson, Gelman, Yao and Gabry 2024). A mean that is owed
  to one sample is no better.

  Args:
    log_values: ℓ of every unit at one order, over all rounds.

  Returns:
    The finding, with k̂ and the largest sample's share of the mean.
  """
  values = np.sort(_checked('log_values', log_values))
  if values.size < _FEWEST_UNITS:
    return _too_few('tail', values.size)
  scaled = np.exp(values - values[-1])
  share = float(scaled[-1] / np.sum(scaled))
  shape = pareto_shape(scaled)
  owed = share > max(0.1, 5 / values.size)
  grade = int(shape >= 0.5 or owed) + int(shape >= 1.0 or share > 0.5)
  meaning = (
    'the sample determines the mean cost',
    'rare units weigh heavily in the mean cost',
    'the mean cost is that of units too rare to be sampled',
  )[grade]
  figures = {'pareto_shape': shape, 'share_of_largest': share}
  return Finding('tail', VERDICTS[grade], figures, meaning)


def drift(
  first: npt.ArrayLike, second: npt.ArrayLike, name: str = 'drift'
) -> Finding:
  """Checks whether two sets of distances come from one distribution.

  For early and late rounds, or for units of the training and held-out data.
  The figure is the two-sample Kolmogorov-Smirnov distance.

  Args:
    first: Distances, in any shape.
    second: Those to compare them with.
    name: What the two sets are.

  Returns:
    The finding.
  """
  first, second = np.ravel(_checked('first', first)), _checked('second', second)
  second = np.ravel(second)
  if min(first.size, second.size) < _FEWEST_UNITS:
    return _too_few(name, min(first.size, second.size))
  test = stats.ks_2samp(first, second)
  grade = _grade(test.pvalue, test.statistic, doubtful=0.1, too_large=0.3)
  meaning = (
    'both sets of distances look alike',
    'the two sets of distances differ',
    'the two sets of distances have little in common',
  )[grade]
  figures = {
    'ks_distance': float(test.statistic),
    'p_value': float(test.pvalue),
  }
  return Finding(name, VERDICTS[grade], figures, meaning)


def held_out_gap(trained: npt.ArrayLike, held_out: npt.ArrayLike) -> Finding:
  """Checks whether units that train are as far as those that do not.

  How well one can see that a unit took part is told by units that train, how
  well that it did not by units that do not. A model fits the former, so that
  they may be closer. The figures are the quadratic means of r in both halves,
  which at q = 1 are what ε depends on, and their ratio. Whether the halves
  differ at all is asked of one value a unit, as its rounds are not independent
  (Mann and Whitney's test, which is exact for few units).

  Args:
    trained: r² of the units that train, [rounds, units].
    held_out: r² of the units that do not.

  Returns:
    The finding.
  """
  halves = [
    np.mean(_checked(name, values), axis=0)
    for name, values in (('trained', trained), ('held_out', held_out))
  ]
  sizes = [half.size for half in halves]
  # The smallest p-value that these numbers of units can have.
  if 2 / math.comb(sum(sizes), sizes[0]) > _SIGNIFICANCE:
    return _too_few('held-out gap', min(sizes))
  near, far = (float(np.sqrt(np.mean(half))) for half in halves)
  ratio = far / near if near else math.inf if far else 1.0
  p_value = float(stats.mannwhitneyu(*halves).pvalue) if ratio != 1 else 1.0
  gap = max(ratio, 1 / ratio) if ratio else math.inf
  grade = _grade(p_value, gap, doubtful=_DOUBTFUL_GAP, too_large=_LARGEST_GAP)
  meaning = (
    'units that train are as far as those that do not',
    'units that train and those that do not are not equally far',
    'units that train tell nothing about those that do not',
  )[grade]
  figures = {
    'trained': near,
    'held_out': far,
    'ratio': ratio,
    'p_value': p_value,
  }
  return Finding('held-out gap', VERDICTS[grade], figures, meaning)


def exchangeability(
  distances: npt.ArrayLike, groups: Optional[Sequence[Hashable]] = None
) -> Finding:
  """Checks whether a grouping of the units explains their distances.

  The figure is the share of the ranks' variance between the groups (ε² of the
  Kruskal-Wallis test).

  Args:
    distances: One distance a unit.
    groups: One label a unit, such as its majority class; by default the
      fifth of the sequence in which it stands (order of arrival).

  Returns:
    The finding.
  """
  values = _checked('distances', distances)
  labels = np.arange(values.size) * 5 // max(1, values.size)
  if groups is not None:
    _, labels = np.unique(np.asarray(groups), return_inverse=True)
  if values.ndim != 1 or labels.shape != values.shape:
    raise ValueError(
      'distances and groups must be lists of the same length. Found shapes '
      f'{values.shape} and {labels.shape}.'
    )
  if values.size < _FEWEST_UNITS:
    return _too_few('exchangeability', values.size)
  parts = [values[labels == label] for label in np.unique(labels)]
  if len(parts) < 2 or len(parts) == values.size or np.ptp(values) == 0:
    effect, p_value = 0.0, 1.0
  else:
    statistic, p_value = stats.kruskal(*parts)
    effect = max(0.0, (statistic - len(parts) + 1) / (values.size - len(parts)))
  grade = _grade(p_value, effect, doubtful=0.06, too_large=0.3)
  meaning = (
    'the groups do not explain the distances',
    'the groups explain some of the distances',
    'the groups explain the distances: account for each group on its own',
  )[grade]
  figures = {'explained_share': float(effect), 'p_value': float(p_value)}
  return Finding('exchangeability', VERDICTS[grade], figures, meaning)


def worst_verdict(findings: Sequence[Finding]) -> str:
  """Returns the least favourable verdict; 'ok' if there are no findings."""
  return max(
    (finding.verdict for finding in findings),
    key=VERDICTS.index,
    default=VERDICTS[0],
  )


def pareto_shape(values: npt.ArrayLike) -> float:
  """Returns the shape k̂ of a generalised Pareto fitted to the upper tail.

  Zhang and Stephens (2009), "A new and efficient estimation method for the
  generalized Pareto distribution", with the tail length and the weak prior of
  Vehtari et al. (2024), Appendix C and G.

  Args:
    values: Positive numbers, at least 20.
  """
  ordered = np.sort(np.asarray(values, dtype=np.float64))
  length = int(np.ceil(min(0.2 * ordered.size, 3 * np.sqrt(ordered.size))))
  threshold = ordered[-length - 1]
  excess = ordered[-length:] - threshold
  excess = excess[excess > 1e-9 * threshold]
  length = excess.size
  # Too few to fit, as where almost all values are equal; whether single ones
  # stand out is for the largest one's share of the mean to tell.
  if length < 5:
    return 0.0
  quartile = excess[int(length / 4 + 0.5) - 1]
  candidates = 30 + int(np.sqrt(length))
  grid = np.arange(1, candidates + 1) - 0.5
  theta = 1 / excess[-1] + (1 - np.sqrt(candidates / grid)) / (3 * quartile)
  shapes = np.mean(np.log1p(-theta[:, np.newaxis] * excess), axis=1)
  profile = length * (np.log(-theta / shapes) - shapes - 1)
  weights = np.exp(profile - np.max(profile))
  best = np.sum(theta * weights) / np.sum(weights)
  shape = np.mean(np.log1p(-best * excess))
  return float((length * shape + 10 * 0.5) / (length + 10))


def _checked(name: str, values: npt.ArrayLike) -> np.ndarray:
  array = np.asarray(values, dtype=np.float64)
  if not np.all(np.isfinite(array)):
    raise ValueError(f'{name} must be finite. Found NaN or infinite ones.')
  return array


def _too_few(check: str, units: int) -> Finding:
  meaning = f'fewer than {_FEWEST_UNITS} units tell nothing'
  return Finding(check, VERDICTS[1], {'units': float(units)}, meaning)


def _grade(
  p_value: float, effect: float, doubtful: float, too_large: float
) -> int:
  """Returns the index of the verdict for a difference of a certain size."""
  if p_value >= _SIGNIFICANCE or effect < doubtful:
    return 0
  return 1 if effect < too_large else 2
