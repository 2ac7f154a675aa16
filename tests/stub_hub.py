"""A stand-in for the Hub on the loopback interface: one kernel repository, made of a local build/ folder.

Answers just what `kernels.get_kernel` asks, so that the whole download path runs without a network.
"""
import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REVISION = "c0ffee" + "0" * 34


def _git_blob(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer(body=True)

    def do_HEAD(self):
        self._answer(body=False)

    def log_message(self, *_):
        pass

    def _answer(self, body):
        hub = self.server
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        api, files = f"/api/kernels/{hub.repo_id}", f"/kernels/{hub.repo_id}/resolve"
        if path == f"{api}/refs":
            branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": REVISION} for name in ("main", "v1")]
            self._send(json.dumps({"branches": branches, "tags": [], "converts": []}).encode(), body)
        elif path.startswith(f"{api}/tree/{REVISION}"):
            folder = path[len(f"{api}/tree/{REVISION}") :].strip("/")
            self._send(json.dumps(self._tree(folder, "recursive=true" in self.path.lower())).encode(), body)
        elif path.startswith(f"{api}/revision/"):
            self._send(json.dumps({"id": hub.repo_id, "sha": REVISION, "siblings": []}).encode(), body)
        elif path.startswith(f"{files}/{REVISION}/build/") and (file := hub.build / path.split("/build/", 1)[1]).is_file():
            data = file.read_bytes()
            self._send(data, body, {"ETag": f'"{_git_blob(data)}"', "X-Repo-Commit": REVISION}, "application/octet-stream")
        elif path == f"/api/organizations/{hub.repo_id.split('/')[0]}/overview":
            self._send(json.dumps({"name": hub.repo_id.split("/")[0], "fullname": "stub", "trustedKernelPublisher": False}).encode(), body)
        else:
            hub.unknown.append(f"{self.command} {self.path}")
            self._send(b'{"error": "not found"}', body, status=404)

    def _tree(self, folder, recursive):
        hub = self.server
        top = hub.build / folder[len("build") :].strip("/")
        paths = sorted(p for p in (top.rglob("*") if recursive else top.iterdir()) if "_work" not in p.parts and "__pycache__" not in p.parts)
        entries = []
        for path in paths:
            name = f"build/{path.relative_to(hub.build).as_posix()}"
            if path.is_dir():
                entries.append({"type": "directory", "path": name, "oid": "0" * 40, "size": 0})
            else:
                data = path.read_bytes()
                entries.append({"type": "file", "path": name, "oid": _git_blob(data), "size": len(data)})
        return entries

    def _send(self, data, body, headers=(), kind="application/json", status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@contextlib.contextmanager
def serve(repo_id, build: Path):
    """Yields the server; `.url`, and `.requests` and `.unknown` as they come in."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.repo_id, server.build = repo_id, build
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.requests, server.unknown = [], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
