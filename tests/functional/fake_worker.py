"""A worker without torch: answers health questions, has a child itself."""

import argparse
import configparser
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingUnixStreamServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def address_string(self):
        return "unix"


def end(path):
    how = "with" if os.path.exists(path) else "without"
    print(f"ended {how} its socket", flush=True)
    os._exit(0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    config = configparser.RawConfigParser()
    config.read(parser.parse_args().config)
    options = config["hapi-worker"]
    if "fail" in options:
        sys.exit(f"refused: fail = {options['fail']}")
    if "lone_child" in options:
        # Neither in the worker's session nor ever waited for.
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    path = options["socket"]
    signal.signal(signal.SIGTERM, lambda *_: end(path))
    servers = [
        ThreadingUnixStreamServer(name, Handler)
        for name in (path, f"{path}.admin")
    ]
    threads = [threading.Thread(target=s.serve_forever) for s in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
