"""The notebooks run: their code cells in order, pictures drawn to memory. Needs the extra `notebooks`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


@pytest.mark.parametrize(
    "name", ["budget", pytest.param("drafter", marks=pytest.mark.slow)], ids=["budget", "drafter"]
)
def test_code_cells_run(name, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.chdir(NOTEBOOKS.parent)
    matplotlib.use("Agg")
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}.ipynb {cell['id']}", "exec"), namespace)
    pyplot = pytest.importorskip("matplotlib.pyplot")
    assert pyplot.get_fignums()
    pyplot.close("all")
