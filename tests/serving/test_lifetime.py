"""A real process on a real socket: signals, draining, failure, a client that hangs up."""

import contextlib
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from dspark_jax.serving.flag_error import FlagError
from dspark_jax.serving.serve import bind, main
from tests.serving.tiny_tokenizer import save_tokenizer

BODY = {"prompt": "a", "stream": True, "max_tokens": 100}
TIMEOUT_S = 30


@contextlib.contextmanager
def running_server(fails_after_s=0.0):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.serving.lifetime_server", str(fails_after_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        base_url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        with httpx.Client(base_url=base_url, timeout=TIMEOUT_S) as client:
            wait_until(lambda: status(client) == 200)
            yield process, client
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def status(client, path="/health"):
    try:
        return client.get(path).status_code
    except httpx.TransportError:
        return None  # not listening yet, or no longer


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def end_of(process):
    status = process.wait(TIMEOUT_S)
    errors = process.stderr.read()
    assert "Traceback" not in errors, errors
    return status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(number):
    with running_server() as (process, client):
        with client.stream("POST", "/v1/completions", json=BODY) as response:
            lines = response.iter_lines()
            received = [next(lines)]
            process.send_signal(number)
            with httpx.Client(base_url=client.base_url) as other:
                new = {"prompt": "b"}
                wait_until(lambda: other.post("/v1/completions", json=new).status_code == 503)
                assert status(other) == 200
            received += lines
        assert received[-2] == "data: [DONE]"
        assert '"finish_reason":"stop"' in received[-4]
        assert end_of(process) == 0


def test_the_second_signal_ends_at_once():
    # A drain of ten seconds, which no stall of this process can outlast before the second signal.
    long = {**BODY, "ignore_eos": True}
    with (
        running_server() as (process, client),
        client.stream("POST", "/v1/completions", json=long) as response,
    ):
        lines = response.iter_lines()  # kept: an iterator that is dropped hangs up
        next(lines)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        assert end_of(process) == 128 + signal.SIGINT
        assert time.monotonic() - begin < 5  # the stream had nearly ten seconds to go


def test_a_failed_engine_turns_health_to_503_and_ends_the_process():
    with running_server(fails_after_s=1.0) as (process, client):
        wait_until(lambda: status(client) == 503)
        assert end_of(process) == 1


def test_a_client_that_hangs_up_is_aborted():
    with running_server() as (_, client):
        with httpx.Client(base_url=client.base_url) as gone:
            whole = {**BODY, "stream": False}
            with pytest.raises(httpx.ReadTimeout):
                gone.post("/v1/completions", json=whole, timeout=0.3)
            with gone.stream("POST", "/v1/completions", json=BODY) as response:
                next(response.iter_lines())
        aborted = 'finished_reason="abort",model_name="tiny"} 2.0'
        wait_until(lambda: aborted in client.get("/metrics").text)


def test_a_used_port_is_refused_in_one_line(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(FlagError, match=f"port {port}.*choose another --port"):
            bind("127.0.0.1", port)
    with pytest.raises(FlagError, match="--host no such host"):
        bind("no such host", 0)


def test_a_folder_without_a_checkpoint_is_refused_in_one_line(tmp_path, capsys):
    save_tokenizer(tmp_path)
    assert main(["--model", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: no config.json in {tmp_path}; --model takes a checkpoint folder"
