"""Requests that end when the program is interrupted."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from attn_backend.cli.demo import Connections
from integration import http


class Slow(BaseHTTPRequestHandler):
    """Answers GET at once and keeps the connection; does not answer POST until the test ends."""

    protocol_version = "HTTP/1.1"
    arrived, ends = threading.Semaphore(0), threading.Event()

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        self.arrived.release()
        self.ends.wait(60)
        self.close_connection = True

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def url():
    Slow.ends.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    Slow.ends.set()
    server.shutdown()
    server.server_close()


def test_cancelled_requests_fail_at_once_in_every_thread(url, monkeypatch):
    monkeypatch.setattr(http, "CONNECTIONS", Connections())
    count = 6
    assert http.is_ready(url)  # one of the requests reuses this connection
    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(http.post_json, url, {}) for _ in range(count)]
        assert all(Slow.arrived.acquire(timeout=30) for _ in range(count))
        begin = time.monotonic()
        http.CONNECTIONS.cancel()
        try:
            for one in asked:
                with pytest.raises(RuntimeError, match=url):
                    one.result(timeout=10)
            with pytest.raises(RuntimeError, match=url):
                http.post_json(url, {})
        finally:
            Slow.ends.set()
    assert not http.is_ready(url)
    assert time.monotonic() - begin < 10
