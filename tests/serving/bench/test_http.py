"""HTTP framing against every way a network may cut it."""

import asyncio

import pytest

from dspark_jax.serving.bench.http import ChunkedDecoder, ConnectionPool, HttpError

from .fake_server import FakeServer

WIRE = b"5\r\nhello\r\n1;ext=1\r\n \r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"


@pytest.mark.parametrize("piece_len", [1, 2, 3, 7, len(WIRE)])
def test_chunked_body_is_independent_of_the_pieces_it_arrives_in(piece_len):
    decoder = ChunkedDecoder()
    body = b""
    for at in range(0, len(WIRE), piece_len):
        assert not decoder.is_done
        body += decoder.feed(WIRE[at : at + piece_len])
    assert decoder.is_done
    assert body == b"hello 0123456789"


@pytest.mark.parametrize("wire", [b"xyz\r\n", b"3\r\nabcdef\r\n"])
def test_malformed_chunks_are_errors(wire):
    with pytest.raises(HttpError, match="chunked body"):
        ChunkedDecoder().feed(wire)


async def _exchange(*responses: bytes, close: bool = False) -> list[tuple[int, bytes]]:
    """GETs once per response from a server that answers with these bytes, one after the other."""
    pending = list(responses)

    async def serve(reader, writer):
        while pending:
            try:
                await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            writer.write(pending.pop(0))
            await writer.drain()
            if close:
                break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        pool = ConnectionPool(f"http://127.0.0.1:{port}")
        try:
            return [await pool.get("/") for _ in responses]
        finally:
            pool.close()


async def test_body_framings():
    assert await _exchange(
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\ntransfer-encoding: Chunked\r\n\r\n"
        b"2\r\nno\r\n0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 500 Empty\r\ncontent-length: 0\r\n\r\n",
    ) == [(200, b"hi"), (404, b"no"), (204, b""), (500, b"")]


async def test_body_without_a_length_ends_with_the_connection():
    assert await _exchange(b"HTTP/1.0 200 OK\r\n\r\nall of it", close=True) == [(200, b"all of it")]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP/1 response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "middle of the response"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab", "middle of the resp"),
        (b"", "before a response"),
    ],
)
async def test_broken_responses_are_errors(response, reason):
    with pytest.raises(HttpError, match=reason):
        await _exchange(response, close=True)


async def test_connections_are_kept_and_stale_ones_replaced():
    async with FakeServer() as server:
        pool = ConnectionPool(server.url, {"X-Test": "yes"})
        for _ in range(3):
            assert (await pool.get("/health"))[0] == 200
        assert server.num_connections == 1
        assert all("X-Test: yes\r\n" in head for head in server.headers)
        # The server drops an idle connection without the pool having noticed yet.
        pool._idle[0].has_response_bytes = False
        pool._idle[0]._transport.abort()
        assert (await pool.get("/health"))[0] == 200
        assert server.num_connections == 2
        pool.close()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://"])
def test_bad_base_urls_are_named(url):
    with pytest.raises(ValueError, match=url):
        ConnectionPool(url)


def test_headers_cannot_smuggle_lines():
    with pytest.raises(ValueError, match="line break"):
        ConnectionPool("http://host", {"X": "a\r\nEvil: b"})
