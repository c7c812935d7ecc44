"""A server of a few lines that tests of the tools start instead of an engine."""

from __future__ import annotations

# The end of a program whose first argument is a port: every GET is answered.
SERVE_HEALTH = """
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
