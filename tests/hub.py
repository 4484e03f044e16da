"""
A small Hugging Face hub on the loopback, for the real client: set HF_ENDPOINT to hub.url. Revisions, trees in
pages, files by range and redirected to a second host, and faults on demand.
"""
import contextlib
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 3  # entries of a tree in one response


class Hub:
    """
    repositories: name -> commit -> path -> bytes, 'main' being the newest commit. faults: pairs of a part of
    a path and what one request for it is to meet: a status, 'drop' (half a response), 'refuse' (none) or
    'stall'. rate: bytes per second. asked: the paths of all requests.
    """

    def __init__(self):
        self.repositories, self.faults, self.asked, self.rate = {}, [], [], None
        self.lock, self.over = threading.Lock(), threading.Event()
        self.servers = [ThreadingHTTPServer(('127.0.0.1', 0), self.handler()) for _ in range(2)]
        ports = [server.server_address[1] for server in self.servers]
        self.url, self.files_url = f'http://127.0.0.1:{ports[0]}', f'http://localhost:{ports[1]}'
        for server in self.servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.over.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def commit(self, repository, files):
        """Makes {path: bytes} the newest commit of a dataset and returns its name."""
        commits = self.repositories.setdefault(repository, {})
        sha = hashlib.sha1(f'{repository} {len(commits)}'.encode()).hexdigest()
        commits[sha] = commits['main'] = files
        return sha

    def fault(self, path):
        """The fault that this request is to meet, or None."""
        with self.lock:
            self.asked.append(path)
            i = next((i for i, (part, _) in enumerate(self.faults) if part in path), None)
            return None if i is None else self.faults.pop(i)[1]

    def answer(self, url):
        """(status, headers, body) of a URL."""
        path, query = unquote(url.path).strip('/'), parse_qs(url.query)
        rest = path.removeprefix('api/').removeprefix('datasets/')
        name = '/'.join(rest.split('/')[:2])
        kind, _, rest = rest[len(name) + 1:].partition('/')
        revision, _, inside = rest.partition('/')
        if name not in self.repositories:
            return 401, {'X-Error-Code': 'RepoNotFound'}, b''  # so the hub answers strangers
        files = self.repositories[name].get(revision)
        if files is None:
            return 404, {'X-Error-Code': 'RevisionNotFound'}, b''
        if kind == 'revision':
            found = self.repositories[name].items()
            sha = next(sha for sha, stored in found if stored is files and sha != 'main')
            return 200, {}, json.dumps({'id': name, 'sha': sha}).encode()
        if kind == 'tree':
            entries = [{'type': 'file', 'path': file, 'size': len(files[file]), 'oid': '0'}
                       for file in sorted(files) if file.startswith(f'{inside}/' if inside else '')]
            if not entries:
                return 404, {'X-Error-Code': 'EntryNotFound'}, b''
            start = int(query.get('cursor', '0')[0])
            link = f'<{self.url}{url.path}?recursive=true&cursor={start + PAGE}>; rel="next"'
            headers = {'Link': link} if start + PAGE < len(entries) else {}
            return 200, headers, json.dumps(entries[start:start + PAGE]).encode()
        if inside not in files:
            return 404, {'X-Error-Code': 'EntryNotFound'}, b''
        if kind == 'resolve' and not inside.endswith('.md'):
            return 302, {'Location': f'{self.files_url}/{name}/stored/{revision}/{inside}'}, b''
        return 200, {}, files[inside]

    def handler(hub):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def do_GET(self):
                fault, url = hub.fault(self.path), urlsplit(self.path)
                if fault == 'refuse':
                    self.close_connection = True
                    return
                status, headers, body = (fault, {}, b'') if isinstance(fault, int) else hub.answer(url)
                if status == 200 and 'Range' in self.headers:
                    start, end = map(int, self.headers['Range'].removeprefix('bytes=').split('-'))
                    status, headers, body = 206, {}, body[start:end + 1]
                self.send_response(status)
                for key, value in {**headers, 'Content-Length': str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                with contextlib.suppress(OSError):  # the client was killed
                    self.send(body[:len(body) // 2] if fault else body)
                    if fault == 'stall':
                        hub.over.wait(60)
                self.close_connection = fault is not None and not isinstance(fault, int)

            def send(self, body):
                step = max(1, (hub.rate or 1 << 40) // 50)
                for i in range(0, len(body), step):
                    self.wfile.write(memoryview(body)[i:i + step])
                    if hub.rate:
                        time.sleep(len(body[i:i + step]) / hub.rate)

            def log_message(self, *args):
                pass
        return Handler
