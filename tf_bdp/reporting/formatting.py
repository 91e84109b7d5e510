"""How figures are written for people."""

from typing import Optional

MISSING = '–'


def number(value: Optional[float], specification: str) -> str:
  """Returns a number as text, or a dash where there is none.

  >>> number(0.125, '.1%')
  '12.5%'
  >>> number(None, '.1%')
  '–'
  """
  return MISSING if value is None else format(value, specification)
