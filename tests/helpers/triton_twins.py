"""Triton's kernels and their plain twins: on a GPU, or in Triton's interpreter where there is none.

A module that imports this is skipped where neither can be. It must be imported before the kernels are.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
OLD_INTERPRETER = tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) < (3, 7)
if not ON_GPU and OLD_INTERPRETER and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    pytest.skip("the interpreter of Triton before 3.7 needs NumPy below 2.4", allow_module_level=True)
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from asyncllm.model.cuda.plain_kernels import PlainKernels  # noqa: E402
from asyncllm.model.cuda.triton_kernels import AttentionScratch, TritonKernels  # noqa: E402

if TYPE_CHECKING:
    from asyncllm.model.cuda.step_kernels import StepKernels
    from asyncllm.model.model_config import ModelConfig

__all__ = ["DEVICE", "ON_GPU", "both", "draw", "dtypes", "kernels", "marks"]

DEVICE = torch.device("cuda" if ON_GPU else "cpu")

marks = [
    pytest.mark.gpu if ON_GPU else pytest.mark.long,  # the interpreter takes minutes
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),  # of the interpreter: NumPy's about infinities and conversions
]
both = pytest.mark.parametrize("dependent", [False, True] if ON_GPU else [False])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if ON_GPU else [torch.float16], ids=str)


def kernels(config: ModelConfig, dtype: torch.dtype, *, dependent: bool = False) -> tuple[StepKernels, StepKernels]:
    """Give the plain ones and those in Triton."""
    scratch = AttentionScratch(config, rows=32, parts=512, device=DEVICE)
    return PlainKernels(config, dtype), TritonKernels(config, dtype, scratch, dependent=dependent)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Give normal numbers, the same for a shape each time."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(sum(shape))).to(DEVICE, dtype)
