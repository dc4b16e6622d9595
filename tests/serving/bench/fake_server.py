"""A small OpenAI-compatible server whose every byte a test controls.

In process for the client's tests; as a script (`--host --port --speculative-config ...`) for those
of the sweep, which starts servers itself.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PIECES = ["ab", "\N{GREEK SMALL LETTER ALPHA}\N{GRINNING FACE}", "", "cde"]
"""Text of a reply; each chunk stands for `TOKENS_PER_CHUNK` tokens, but the first for one."""
TOKENS_PER_CHUNK = 3
PROMPT_TOKENS = 5


@dataclass
class FakeServer:
    """Answers by what the prompt says: `ok`, or one of the failures in `_completion`.

    Attributes:
        chunk_delay_s: pause before every chunk.
        split: network writes of at most this many bytes each, to cut lines and characters apart.
        verify_len: drafts counted as verified per chunk, of 7.
        has_metrics: whether `/metrics` exists.
        bodies: request bodies in order of arrival.
        max_in_flight: most requests that were open at once.
    """

    chunk_delay_s: float = 0.0
    split: int = 1 << 20
    verify_len: int = 7
    has_metrics: bool = True
    exit_after: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    num_connections: int = 0
    num_aborted: int = 0
    max_in_flight: int = 0
    num_drafts: int = 0
    num_accepted: list[int] = field(default_factory=lambda: [0] * 7)
    _in_flight: int = 0
    _connections: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> "FakeServer":
        await self.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def start(self, host: str, port: int) -> None:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._connection(reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        self._server = await asyncio.start_server(accept, host, port)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers.append(head)
        request_line, *lines = head.split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines if line)
        body = await reader.readexactly(int(fields.get("Content-Length", 0)))
        self._in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        try:
            return await self._respond(request_line.split()[1], body, writer)
        except ConnectionError:
            self.num_aborted += 1
            raise
        finally:
            self._in_flight -= 1

    async def _respond(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Writes one response; returns whether the connection stays open."""
        if path.startswith("/v1/") and path.endswith("completions"):
            request = json.loads(body)
            self.bodies.append(request)
            if self.exit_after is not None and len(self.bodies) > self.exit_after:
                sys.exit(3)
            return await self._completion(request, writer)
        if path == "/v1/models":
            self._plain(writer, 200, json.dumps({"data": [{"id": "fake/model"}]}).encode())
        elif path == "/metrics" and self.has_metrics:
            self._plain(writer, 200, self.metrics_text().encode())
        else:
            self._plain(writer, 200 if path == "/health" else 404, b"")
        await writer.drain()
        return True

    def _plain(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)

    async def _completion(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        is_chat = "messages" in request
        prompt = request["messages"][0]["content"] if is_chat else request["prompt"]
        if prompt == "http 400":
            error = {"error": {"message": "prompt is too\nlong", "code": 400}}
            self._plain(writer, 400, json.dumps(error).encode())
            return True
        if prompt == "refuse":
            return False
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        events: list[bytes] = []
        if is_chat:
            events.append(_event(_choice({"delta": {"role": "assistant", "content": ""}})))
        for i, piece in enumerate([] if prompt == "silent" else PIECES):
            content = {"delta": {"content": piece}} if is_chat else {"text": piece}
            finish = "length" if i == len(PIECES) - 1 else None
            events.append(_event(_choice({**content, "finish_reason": finish})))
        usage = {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": 1 + TOKENS_PER_CHUNK * (len(PIECES) - 1),
        }
        failure = {
            "bad event": b"data: {oops\n\n",
            "error event": _event({"error": {"message": "non-finite logits", "code": 500}}),
        }.get(prompt if isinstance(prompt, str) else "")
        if failure is not None:
            events.insert(2, failure)
        if prompt != "no usage":
            events.append(_event({"choices": [], "usage": usage}))
        events.append(b": a comment\n\ndata: [DONE]\n\n")
        for i, event in enumerate(events):
            if prompt == "cut" and i == 2:
                return False
            if prompt == "stall" and i == 2:
                await asyncio.sleep(30)
            await asyncio.sleep(self.chunk_delay_s)
            await self._write_split(writer, b"%x\r\n%s\r\n" % (len(event), event))
            if i < len(PIECES):
                self._count_draft()
        await self._write_split(writer, b"0\r\n\r\n")
        return True

    async def _write_split(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        for at in range(0, len(data), self.split):
            writer.write(data[at : at + self.split])
            await writer.drain()
            if self.split < len(data):
                await asyncio.sleep(0.0005)  # keeps the pieces apart on the wire

    def _count_draft(self) -> None:
        """A verification of 7 scheduled drafts of which the first two are accepted, if verified."""
        self.num_drafts += 1
        for position in range(min(2, self.verify_len)):
            self.num_accepted[position] += 1

    def metrics_text(self) -> str:
        n = self.num_drafts
        lines = [
            "# HELP vllm:spec_decode_num_drafts_total Drafts.",
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {n}.0',
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {7 * n}.0',
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {sum(self.num_accepted)}.0',
            f"dspark:draft_tokens_admitted_total {self.verify_len * n}.0",
            f"dspark:draft_tokens_trimmed_total {(7 - self.verify_len) * n}.0",
            f'dspark:verification_budget_bucket{{le="+Inf"}} {n}.0',
            f"dspark:verification_budget_count {n}.0",
            f"dspark:verification_budget_sum {self.verify_len * n}.0",
            'dspark:host_time_seconds_bucket{le="0.001"} 0.0',
            f'dspark:host_time_seconds_bucket{{le="0.003"}} {n}.0',
            f'dspark:host_time_seconds_bucket{{le="+Inf"}} {n}.0',
            f"dspark:host_time_seconds_count {n}.0",
            f"dspark:host_time_seconds_sum {0.002 * n}",
        ]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{position="{i}"}} {v}.0' for i, v in enumerate(self.num_accepted)]
        return "\n".join(lines) + "\n"


def _choice(content: dict[str, Any]) -> dict[str, Any]:
    return {"id": "cmpl-0", "choices": [{"index": 0, "finish_reason": None, **content}]}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


async def _serve() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--record", type=Path, help="append the arguments to this file")
    parser.add_argument("--broken-arm", type=int, help="refuse to start with this fixed length")
    parser.add_argument("--exit-after", type=int, help="die at the request after so many")
    parser.add_argument("--chunk-delay", type=float, default=0.0)
    args = parser.parse_args()
    config = args.speculative_config or {}
    if args.record:
        with args.record.open("a", encoding="utf-8") as file:
            print(json.dumps(args.speculative_config), file=file)
    verify_len = config.get(
        "fixed_verify_len", 4 if config.get("enable_adaptive_verification") else 7
    )
    if args.broken_arm == verify_len:
        sys.exit("out of memory: lower --max-num-seqs")
    server = FakeServer(
        verify_len=verify_len, exit_after=args.exit_after, chunk_delay_s=args.chunk_delay
    )
    await server.start(args.host, args.port)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


if __name__ == "__main__":
    asyncio.run(_serve())
