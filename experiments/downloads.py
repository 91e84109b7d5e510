"""Downloads that fail at once where they cannot work."""

import urllib.error
import urllib.request

_SECONDS = 10


def check_reachable(url: str) -> None:
  """Raises OSError at once where a download would hang or retry for minutes.

  It is enough that the server answers, whatever it does: some refuse to list
  the folder that files are in.
  """
  request = urllib.request.Request(url, method='HEAD')
  try:
    with urllib.request.urlopen(request, timeout=_SECONDS):
      pass
  except urllib.error.HTTPError as answer:
    answer.close()
