"""Tests of the table of claims."""

import json

import pytest

from tf_bdp.accounting import claims


def test_the_claims_are_those_of_the_accounting_page():
  assert list(claims.CLAIMS) == [
    'dp',
    'filter',
    'each',
    'census',
    'sample',
    'paper',
  ]
  for name, claim in claims.CLAIMS.items():
    assert claim.name == name
    assert claim.protects and claim.needs and claim.rests_on
    assert set(claim.implied_by) <= set(claims.CLAIMS)


@pytest.mark.parametrize(
  'epsilons, asked_for, recommended',
  [
    ({'dp': 4.0, 'each': 3.0, 'census': 2.0}, 'census', 'census'),
    # A stronger claim at hardly more ε.
    ({'dp': 4.0, 'each': 2.05, 'census': 2.0}, 'census', 'each'),
    ({'dp': 2.0, 'each': 2.0, 'census': 2.0}, 'census', 'dp'),
    # Those who were measured are not those whom a sample stands for.
    ({'dp': 4.0, 'each': 0.1, 'sample': 2.0}, 'sample', 'sample'),
    ({'dp': 2.0, 'each': 0.1, 'sample': 2.0}, 'sample', 'dp'),
    ({'dp': 4.0, 'filter': 2.0, 'each': 2.0}, 'each', 'filter'),
    ({'dp': float('inf'), 'sample': float('inf')}, 'sample', 'dp'),
    ({'dp': 3.0}, 'dp', 'dp'),
  ],
)
def test_the_strongest_claim_that_costs_hardly_more_is_recommended(
  epsilons, asked_for, recommended
):
  rows = claims.report(epsilons, 1e-5, asked_for)
  assert {row.claim.name: row.epsilon for row in rows} == epsilons
  assert [row.claim.name for row in rows if row.recommended] == [recommended]
  for row in rows:
    assert bool(row.reason) == row.recommended


def test_a_row_says_who_is_protected_against_whom_and_on_what_it_rests():
  row, *_ = claims.report({'dp': 4.0, 'census': 2.0}, 1e-5, 'census')
  data = json.loads(json.dumps(row.to_dict()))
  assert data['claim'] == 'dp'
  assert data['protects'] == 'anyone'
  assert data['against'] == claims.ATTACKER
  assert data['rests_on'] == 'nothing about the data'


def test_the_table_marks_the_recommended_row():
  rows = claims.report({'dp': 4.0, 'census': 2.0}, 1e-5, 'census')
  lines = claims.format_table(rows).splitlines()
  assert lines[1].split()[:3] == ['dp', '4.000', '1e-05']
  assert lines[2].split()[:3] == ['census*', '2.000', '1e-05']


@pytest.mark.parametrize(
  'epsilons, wanted',
  [({'dp': 4.0, 'sample': 2.0}, 'sample'), ({'dp': 4.0, 'paper': 1.0}, 'dp')],
)
def test_a_claim_that_cannot_be_made_gives_way_to_one_that_can(
  epsilons, wanted
):
  rows = claims.report(epsilons, 1e-5, 'census')
  (row,) = (row for row in rows if row.recommended)
  assert row.claim.name == wanted
  assert row.reason == 'census cannot be claimed from what was measured'


def test_no_guarantee_is_no_number_in_json():
  (row,) = claims.report({'dp': float('inf')}, 1e-5, 'dp')
  data = json.loads(json.dumps(row.to_dict(), allow_nan=False))
  assert data['epsilon'] is None
  assert data['attack_success_bound'] == 1.0


def test_claims_speak_of_clients_and_of_examples():
  words = claims.in_words(claims.CLAIMS['sample'].protects, 'example')
  assert words.startswith('an example drawn from the population')
  words = claims.in_words(claims.CLAIMS['each'].protects, 'client')
  assert words == 'each of the clients that were measured'
