"""How statements are laid out: filled paragraphs, and figures in a column."""

import textwrap


def paragraph(text: str) -> str:
  """Returns text filled to lines of at most 80 characters."""
  return textwrap.fill(text, width=80)


def hanging(label: str, text: str) -> str:
  """Returns text behind a label, filled, its later lines below its first.

  >>> hanging('Rests on', 'nothing.')
  '  Rests on:      nothing.'
  """
  return textwrap.fill(
    text,
    width=80,
    initial_indent=f'  {label + ":":<15}',
    subsequent_indent=' ' * 17,
  )


def figure(label: str, value: str, remark: str = '') -> str:
  """Returns the line of a figure.

  >>> figure('Epsilon', '1.250')
  '    Epsilon:                                                   1.250'

  Args:
    label: What the figure is.
    value: The figure as text, or a dash if there is none.
    remark: What to say behind it, such as why there is none.
  """
  line = f'    {label + ":":<52}{value:>12}'
  return f'{line}  {remark}' if remark else line
