"""Every configuration compiles for SM100 and SM90 without a GPU, without spills, within shared memory.

Spills are a property of one Triton release; the kit says which one was used.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepinfer_conformance.triton_cpu import check_kernels, compile_kernels, compile_request
from deepinfer_triton.registry import configurations
from deepinfer_triton.sizes import MODELS, ModelSizes

ARCHITECTURES = (100, 90)


@pytest.mark.parametrize("sizes", MODELS, ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_configuration_compiles_without_spills(arch: int, sizes: ModelSizes) -> None:
    requests = [
        compile_request(
            each.kernel,
            each.signature,
            each.constants,
            arch=arch,
            num_warps=each.num_warps,
            num_stages=each.num_stages,
            aligned=each.aligned,
            label=f"sm{arch} {each.name} {each.label}",
        )
        for each in configurations((sizes,))
    ]
    folder = os.environ.get("TRITON_CACHE_DIR")
    check_kernels(compile_kernels(requests, cache=Path(folder) / "deepinfer_triton" if folder else None))
