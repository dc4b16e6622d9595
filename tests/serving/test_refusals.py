"""A start that cannot work ends with one line, before it loads weights where the files already tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_jax.checkpoint.export import export_checkpoint
from dspark_jax.checkpoint.safetensors import TensorFolder, write_file
from dspark_jax.serving import executor
from dspark_jax.serving.serve import main
from tests.checkpoint.tiny import random_trees, tiny_config
from tests.serving.tiny_tokenizer import save_tokenizer

ADAPTIVE = ["--speculative-config", '{"method": "dspark", "enable_adaptive_verification": true}']


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that drafts three tokens."""
    folder = tmp_path_factory.mktemp("refusals") / "model"
    export_checkpoint(folder, tiny_config(), *random_trees(tiny_config()))
    save_tokenizer(folder)
    return folder


@pytest.fixture
def without_confidence_head(checkpoint: Path, tmp_path: Path) -> Path:
    source = TensorFolder(checkpoint)
    kept = {name: source[name] for name in source.infos if "confidence_head" not in name}
    write_file(tmp_path / "model.safetensors", kept)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    return tmp_path


@pytest.fixture
def loads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **kwargs: object) -> None:
        pytest.fail("weights are loaded before the refusal")

    monkeypatch.setattr(executor, "load_checkpoint", load)


def refusal(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The only error line of a server that does not start."""
    assert main(["--port", "0", *flags]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    return line


@pytest.mark.usefixtures("loads_no_weights")
def test_case_43_a_drafter_without_confidence_head(without_confidence_head, tmp_path, capsys):
    line = refusal(["--model", str(without_confidence_head), *ADAPTIVE], capsys)
    assert "has no confidence head" in line
    assert "leave --speculative-config out" in line


@pytest.mark.usefixtures("loads_no_weights")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--speculative-config", '{"num_speculative_tokens": 2}'],
            "use 3, and fixed_verify_len to verify fewer",
        ),
        (
            ["--speculative-config", '{"enable_adaptive_verification": true, "min_depth": 4}'],
            "min_depth 4 exceeds the draft length 3",
        ),
        ([*ADAPTIVE, "--max-capture-tokens", "3"], "does not hold one request's draft"),
        ([*ADAPTIVE, "--max-model-len", "257"], "use at most 256"),
    ],
)
def test_case_43_refused_by_flags_and_config(checkpoint, flags, message, capsys):
    assert message in refusal(["--model", str(checkpoint), *flags], capsys)


@pytest.mark.usefixtures("loads_no_weights")
def test_case_43_a_checkpoint_without_drafter(checkpoint, tmp_path, capsys):
    raw = json.loads((checkpoint / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if not key.startswith("dspark_")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    line = refusal(["--model", str(tmp_path), *ADAPTIVE], capsys)
    assert "no DSpark drafter" in line
    assert "leave --speculative-config out" in line


def test_memory_that_does_not_fit(checkpoint, capsys):
    flags = ["--model", str(checkpoint), *ADAPTIVE, "--num-pages", "1000000000"]
    line = refusal(flags, capsys)
    assert "1000000000 wanted" in line
    assert "set --num-pages" in line
