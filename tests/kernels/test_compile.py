"""Every kernel and whole engine steps compile to machine code for the GPUs that are supported, present or not."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest

from dspark_jax.decode.effort import Effort
from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.rows import RowFormat
from tests.kernels.cuda import num_kernels
from tests.kernels.deviceless import GPUS, compile_for
from tests.kernels.flash import FLASH, PRO, released, steps
from tests.kernels.published import problems

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
HLO_TYPES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3fn",
    "int32": "s32",
    "bool": "pred",
}
capabilities = pytest.mark.parametrize("capability", GPUS)


def copies(text: str, leaf: Any) -> list[str]:
    """Instructions that copy a whole array like `leaf` in an optimised program."""
    shape = ",".join(map(str, leaf.shape))
    return re.findall(rf"{HLO_TYPES[str(leaf.dtype)]}\[{shape}\]\S* copy\(", text)


@capabilities
@pytest.mark.parametrize("tokens", [48, 2048])
@pytest.mark.parametrize("name", problems(1))
def test_every_kernel_compiles(name: str, tokens: int, capability: int) -> None:
    function, arguments, _ = problems(tokens, capability)[name]
    compile_for(capability, function, arguments)


@capabilities
@pytest.mark.parametrize("name", [name for name in problems(1) if name.startswith("expert_mlp")])
def test_experts_of_long_prompts_compile(name: str, capability: int) -> None:
    function, arguments, _ = problems(8192, capability)[name]
    compile_for(capability, function, arguments)


@capabilities
@pytest.mark.parametrize(
    ("half", "model", "row_format", "most"),
    [
        ("verify", FLASH, RowFormat.ROUNDED, 400e6),
        ("verify", FLASH, RowFormat.FP8, 400e6),
        ("verify", PRO, RowFormat.ROUNDED, 900e6),
        ("draft", FLASH, RowFormat.ROUNDED, 200e6),
    ],
    ids=["verify-flash", "verify-flash-fp8", "verify-pro", "draft-flash"],
)
@pytest.mark.parametrize("effort", [Effort.PLAIN, Effort.FULL], ids=lambda e: e.name.lower())
def test_a_whole_step_compiles_without_copies_of_stacks_or_state_and_without_branches(
    half: str, model: dict, row_format: RowFormat, most: float, capability: int, effort: Effort
) -> None:
    cfg = released(model)
    dispatch = Dispatch(Backend.PALLAS, capability=capability)
    function, arguments = steps(
        cfg, tokens=64, rows=16, dispatch=dispatch, effort=effort, row_format=row_format
    )[half]
    compiled = compile_for(capability, function, *arguments, donate_argnums=1)
    # The largest temporaries are logits. One layer's experts are gigabytes, its largest linear 33 or 100 MB.
    assert compiled.memory_analysis().temp_size_in_bytes < most
    text = compiled.as_text()
    assert text is not None
    assert num_kernels(text) > 0, "no kernel in the step"
    assert " conditional(" not in text, "the host would wait for a branch"
    for leaf in jax.tree.leaves(arguments[1]):
        if leaf.size > 2**20:
            assert not copies(text, leaf), leaf
