"""A model hub on this machine that speaks what huggingface_hub asks for: one repository, whose files may be cut off."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0" * 39 + "1"


class Hub:
    """`paths`: of the requests, as they came."""

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        self.name = name
        self.files = files
        self.paths: list[str] = []
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def _answer(self) -> None:
                path = self.path.partition("?")[0]
                hub.paths.append(f"{self.command} {path}")
                if path.startswith(f"/api/models/{hub.name}/tree/"):
                    tree = [
                        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for name, data in hub.files.items()
                    ]
                    self._send(json.dumps(tree).encode())
                elif path.startswith(f"/api/models/{hub.name}"):
                    siblings = [{"rfilename": name} for name in hub.files]
                    info = {"id": hub.name, "sha": COMMIT, "siblings": siblings, "private": False, "gated": False}
                    self._send(json.dumps(info).encode())
                elif path.startswith(f"/{hub.name}/resolve/") and path.rpartition("/")[2] in hub.files:
                    self._send(hub.files[path.rpartition("/")[2]])
                else:
                    self.send_response(404)
                    self.send_header("x-error-code", "RepoNotFound")
                    self.send_header("content-length", "0")
                    self.end_headers()

            def _send(self, data: bytes) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.send_header("etag", f'"{hashlib.sha1(data).hexdigest()}"')
                self.send_header("x-repo-commit", COMMIT)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


def hub_of(name: str, folder: Path) -> Hub:
    """A hub that has the files of a folder."""
    return Hub(name, {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()})
