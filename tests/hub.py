"""A stand-in of the hub's HTTP interface, as far as uploads and downloads of whole repositories need it."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """Repositories in memory: by name and revision, their files. asked: every request."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.commits: dict[tuple[str, str], str] = {}
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def answer(self, body: bytes | Any, code: int = 200, **headers: str) -> None:
                told = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(code)
                for name, value in {"Content-Length": str(len(told)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(told)

            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                hub.asked.append(f"{self.command} {self.path}")
                hub.serve(self, body)

            do_GET = do_POST = do_HEAD = handle_any

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def sha(self, name: str, revision: str | None) -> str:
        """The commit of a revision."""
        found = hashlib.sha1(f"{name} {revision or 'main'}".encode()).hexdigest()
        self.commits[name, found] = revision or "main"
        return found

    def serve(self, to: Any, body: bytes) -> None:
        path = to.path.split("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'user'}/{asked['name']}"
            self.files.setdefault((name, "main"), {})
            to.answer({"url": f"{self.url}/{name}", "name": name})
        elif path == "/api/validate-yaml":
            named = re.search(r"^base_model: (.*)$", json.loads(body)["content"], re.MULTILINE)
            bad = named is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", named[1])
            told = [{"message": '"base_model" must be a repository\'s name'}] if bad else []
            to.answer({"errors": told, "warnings": []}, 400 if bad else 200)
        elif path == "/api/whoami-v2":
            to.answer({"name": "user", "type": "user"})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/([^/]+)", path):
            self.files.setdefault((found[1], found[2]), dict(self.files[found[1], "main"]))
            to.answer({})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", path):
            asked = json.loads(body)["files"]
            told = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for f in asked]
            to.answer({"files": told})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path):
            for line in body.decode().splitlines():
                part = json.loads(line)
                if part["key"] == "file":
                    value = part["value"]
                    self.files[found[1], found[2]][value["path"]] = base64.b64decode(value["content"])
            sha = self.sha(found[1], found[2])
            to.answer({"commitUrl": f"{self.url}/{found[1]}/commit/{sha}", "commitOid": sha})
        elif (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)) and self.has(found):
            told = [{"rfilename": name} for name in self.of(found)]
            to.answer({"id": found[1], "sha": self.sha(found[1], found[2]), "siblings": told})
        elif (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path)) and self.has(found):
            told = [{"type": "file", "path": n, "size": len(data), "oid": "0"} for n, data in self.of(found).items()]
            to.answer(told)
        elif (found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)) and self.has(found):
            data = self.of(found).get(found[3])
            if data is None:
                to.answer({}, 404, X_Error_Code="EntryNotFound")
            else:
                etag = f'"{hashlib.sha1(data).hexdigest()}"'
                to.answer(
                    data, 200, ETag=etag, X_Repo_Commit=self.sha(found[1], self.named(found)), Accept_Ranges="bytes"
                )
        else:
            to.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    def named(self, found: Any) -> str:
        """The revision that a request asks for, by its name or its commit."""
        return self.commits.get((found[1], found[2] or "main"), found[2] or "main")

    def of(self, found: Any) -> dict[str, bytes]:
        return self.files[found[1], self.named(found)]

    def has(self, found: Any) -> bool:
        return bool(self.files.get((found[1], self.named(found))))
