"""Downloads, tried on this machine alone."""

import http.server
import socket
import threading

import pytest

from experiments import downloads


@pytest.fixture(autouse=True)
def _without_proxies(monkeypatch):
  monkeypatch.setenv('no_proxy', '*')


def test_a_server_that_answers_is_reachable_whatever_it_says():
  handler = http.server.BaseHTTPRequestHandler  # Which supports no method.
  with http.server.HTTPServer(('localhost', 0), handler) as server:
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    downloads.check_reachable(f'http://localhost:{server.server_port}/folder/')
    thread.join()


def test_a_port_where_nobody_listens_is_not_reachable():
  with socket.create_server(('localhost', 0)) as listener:
    port = listener.getsockname()[1]
  with pytest.raises(OSError, match='refused'):
    downloads.check_reachable(f'http://localhost:{port}/')


def test_a_server_that_is_silent_is_given_up(monkeypatch):
  monkeypatch.setattr(downloads, '_SECONDS', 0.1)
  with socket.create_server(('localhost', 0)) as listener:
    port = listener.getsockname()[1]
    with pytest.raises(OSError, match='timed out'):
      downloads.check_reachable(f'http://localhost:{port}/')
