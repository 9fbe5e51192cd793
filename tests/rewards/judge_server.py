"""An OpenAI-compatible server on this machine, for all tests of the LLM judge."""

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-very-secret-0123456789"
SOON = {"retry-after-ms": "1"}  # the client's own pause would take half a second


@dataclass
class Server:
    """What a server saw: its address, each request's body and key, and the most requests under way at once."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    now: int = 0
    most_at_once: int = 0

    @property
    def prompts(self):
        return [body["messages"][0]["content"] for body in self.bodies]


@dataclass(frozen=True)
class Reply:
    """What a server sends: words of a chat completion, or anything else as `body`."""

    text: str | None = None
    status: int = 200
    body: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def content(self):
        message = {"role": "assistant", "content": self.text}
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        whole = {"model": "served-model", "choices": [{"index": 0, "message": message}], "usage": usage}
        return (json.dumps(whole) if self.body is None else self.body).encode()


def listing(*names):
    """A list of models, as vLLM sends it."""
    return Reply(body=json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in names]}))


@contextmanager
def judge_server(answer, models=None):
    """A server whose reply to a prompt is `answer(prompt)`: a string is the text of a good reply.

    Its list of models is `models`, by default of one; asking for it is no request in `Server`.
    """
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # 40 ms for each reply

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.bodies.append({**body, "path": self.path})
                server.keys.append(self.headers["Authorization"])
                server.now += 1
                server.most_at_once = max(server.most_at_once, server.now)
            reply = answer(body["messages"][0]["content"])
            with lock:
                server.now -= 1
            self.send(Reply(reply) if isinstance(reply, str) else reply)

        def do_GET(self):
            good = self.path == "/v1/models"
            self.send((models or listing("judge-model")) if good else Reply(status=404, body="no such path"))

        def send(self, reply):
            content = reply.content()
            try:
                self.send_response(reply.status)
                for name, value in ({"Content-Type": "application/json"} | reply.headers).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except (BrokenPipeError, ConnectionResetError):  # the client had waited long enough
                pass

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server = Server(f"http://127.0.0.1:{listening.server_port}/v1")
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        listening.shutdown()
