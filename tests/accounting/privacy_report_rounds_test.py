"""Tests of the privacy report of rounds of groups, and of reported costs."""

import dataclasses
import functools
import json
import math

import attr
import dp_accounting
import numpy as np
import pytest

from tests.accounting import builders
from tf_bdp.accounting import events, privacy_report

pytestmark = builders.ignore_best_order


def _rounds(panel=True):
  return [
    events.ParallelEvent(
      builders.make_event(
        0.04 * np.random.default_rng([t, g]).beta(1, 9, 40), q, 0.04, panel
      )
      for g, q in enumerate((0.1, 0.2))
    )
    for t in range(4)
  ]


def _report_of(rounds, mechanism, relation='ADD_OR_REMOVE_ONE', **more):
  return privacy_report.PrivacyReport.from_events(
    rounds,
    noise_multiplier=2.0,
    participation_probability=0.3,
    delta=builders.DELTA,
    worst_case_distance=1.0,
    mechanism=mechanism,
    unit='client' if mechanism == 'joint' else 'example',
    sampling='poisson',
    neighboring_relation=dp_accounting.NeighboringRelation[relation],
    **more,
  )


@functools.lru_cache
def _report():
  return _report_of(_rounds(), 'batch')


@pytest.mark.parametrize(
  'relation, adjacency, others',
  [
    ('REPLACE_SPECIAL', 'zero-out', 'add-or-remove-one'),
    ('ADD_OR_REMOVE_ONE', 'add-or-remove-one', 'zero-out'),
  ],
)
def test_the_statement_names_the_adjacency(relation, adjacency, others):
  report = dataclasses.replace(
    _report(), neighboring_relation=dp_accounting.NeighboringRelation[relation]
  )
  text = ' '.join(report.statement().split())
  assert f'({adjacency} adjacency)' in text
  assert others not in text
  assert report.to_dict()['adjacency'] == adjacency


def test_the_report_of_parallel_rounds_says_how_much_was_measured():
  report = _report()
  assert (report.rounds, report.units, report.panel) == (4, 40, True)
  assert [finding.check for finding in report.findings] == [
    *('tail', 'drift', 'exchangeability'),
  ]
  assert json.loads(json.dumps(report.to_dict()))['units'] == 40


def test_the_report_of_groups_of_any_size_does_not_tell_their_sizes():
  (first, second), *_ = (e.groups for e in _rounds(panel=False))
  smaller = attr.evolve(second, squared_distances=[0.001] * 12)
  report = _report_of(
    [events.ParallelEvent([first, smaller]), second], 'example'
  )
  assert (report.rounds, report.units, report.panel) == (2, 0, False)
  assert [finding.check for finding in report.findings] == ['tail', 'drift']


def test_the_report_of_reported_rounds_has_the_figure_and_no_findings():
  event = builders.reported([0.001, 0.002, 0.005, 0.02, 0.07])
  accountant = builders.make_accountant(
    'holder', orders=builders.FEW_ORDERS, estimator='student_t'
  ).compose(event, 4)
  report = _report_of(
    [event] * 4, 'joint', 'REPLACE_SPECIAL', reported_to=accountant
  )
  assert report.rounds == 4
  assert not report.findings
  text = report.statement()
  epsilon = accountant.get_epsilon(builders.DELTA)
  assert f'epsilon = {epsilon:.3f} at delta = 1e-05' in text
  assert 'zero-out adjacency' in ' '.join(text.split())
  assert 'BDP, reported' in text
  assert [row.claim.name for row in report.claims] == ['dp', 'paper']
  rows = json.loads(json.dumps(report.to_dict()))['rows']
  assert rows[-1]['epsilon'] == epsilon
  assert rows[-1]['attack_success_bound'] == pytest.approx(
    (math.exp(epsilon) + builders.DELTA) / (1 + math.exp(epsilon))
  )
