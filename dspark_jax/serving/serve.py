"""Entry point of the server: `python -m dspark_jax.serving.serve --help`."""

from __future__ import annotations

import logging
import os
import socket
import sys

from dspark_jax.checkpoint.safetensors import CheckpointError
from dspark_jax.config import ConfigError, ModelConfig, load_config
from dspark_jax.serving.config import ServeConfig, parse_flags
from dspark_jax.serving.flag_error import FlagError

_LOG = logging.getLogger(__name__)
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_INTERRUPTED = 130
_MEMORY_VARIABLE, _MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9"


def main(argv: list[str] | None = None) -> int:
    """Run the server; the process's exit status.

    0 after a drained shutdown, 1 when the engine failed, 2 when the flags, the checkpoint or the
    port are refused (one line on stderr), 130 when interrupted while starting.
    """
    config = parse_flags(argv)
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
    logging.getLogger("jax").setLevel(logging.WARNING)  # it reports every backend it lacks
    try:
        model_config = load_config(config.model_folder, config.hf_overrides)
        config.check(model_config)
        with bind(config.host, config.port) as listener:
            return _serve(config, model_config, listener)
    except (ConfigError, FlagError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before anything slow happens.

    Raises `FlagError` when the address is taken or is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise FlagError(f"--host {host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _taken(host, port, error) from error
    return listener


def limit_gpu_memory(config: ServeConfig) -> None:
    """Tell XLA, before it looks at the device, how much of the GPU's memory to take."""
    if config.gpu_memory_utilization is not None:
        os.environ[_MEMORY_VARIABLE] = str(config.gpu_memory_utilization)
    os.environ.setdefault(_MEMORY_VARIABLE, _MEMORY_SHARE)


def _taken(host: str, port: int, error: OSError) -> FlagError:
    return FlagError(
        f"cannot listen on {host} port {port}: {error.strerror}; choose another --port"
    )


def _serve(config: ServeConfig, model_config: ModelConfig, listener: socket.socket) -> int:
    # Imported late: JAX and the web framework take seconds, and --help must not.
    from dspark_jax.serving.api.app import create_app
    from dspark_jax.serving.api.benchmark import add_policy_route
    from dspark_jax.serving.api.generation import Backend
    from dspark_jax.serving.engine import Engine
    from dspark_jax.serving.lifetime import run_until_stopped
    from dspark_jax.serving.metrics import Metrics
    from dspark_jax.serving.policy_switch import PolicySwitch
    from dspark_jax.serving.tokenizer import IdTokenizer, TextTokenizer

    limit_gpu_memory(config)
    tokenizer = IdTokenizer()
    if not config.skip_tokenizer_init:
        tokenizer = TextTokenizer.from_folder(
            config.model_folder, bos_token_id=model_config.bos_token_id
        )
    metrics = Metrics(config.served_model_name)
    engine = Engine.from_config(config, metrics)
    try:
        engine.start()
    except BaseException:
        engine.shutdown(drain=False)
        raise
    backend = Backend(
        engine=engine,
        tokenizer=tokenizer,
        metrics=metrics,
        model_name=config.served_model_name,
        reports_speculation=config.per_request_spec_decode_metrics,
    )
    app = create_app(backend, api_key=config.api_key)
    if config.benchmark_policy_endpoint:
        add_policy_route(app, PolicySwitch(engine, engine.executor, config))
    host, port = listener.getsockname()[:2]
    try:
        listener.listen()
    except OSError as error:  # another process bound the port meanwhile, and was quicker to listen
        engine.shutdown(drain=False)
        raise _taken(host, port, error) from error
    _LOG.info("serving %s at http://%s:%s", config.served_model_name, host, port)
    return run_until_stopped(
        app, listener, engine, metrics=None if config.disable_log_stats else metrics
    )


if __name__ == "__main__":
    sys.exit(main())
