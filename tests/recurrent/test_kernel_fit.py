"""The kernels of recurrent layers, compiled for absent GPUs: registers, shared memory, asynchronous products."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.recurrent_ahead_of_time import compiled

triton = pytest.importorskip("triton")

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="this Triton comes without ptxas")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launches", "capability", "cases", "spills", "kib"),
    [
        ("delta_rule_launches", 90, ["bf16/256/256", "fp16/96/80"], 16, 64),  # three programs on a multiprocessor
        ("delta_rule_launches", 90, ["fp32/256/64"], 1024, 99),
        ("portable_delta_rule_launches", 80, ["bf16/128/128"], 16, 99),
        ("portable_delta_rule_launches", 80, ["fp32/128/128"], 1024, 99),
        ("portable_delta_rule_launches", 120, ["bf16/128/128"], 16, 99),
        ("output_launches", 90, ["bf16/128/128", "bf16/256/64"], 8, 113),  # two programs on a multiprocessor
        ("output_launches", 90, ["fp32/128/128"], 128, 113),
        ("portable_output_launches", 80, ["bf16/128/128"], 0, 99),
        ("portable_output_launches", 120, ["bf16/128/128"], 0, 99),
        ("state_launches", 90, ["bf16/128/128", "fp16/256/64"], 0, 227),
        ("state_launches", 90, ["fp32/128/128"], 400, 48),
        # Tiles have fewer tokens above 4 taps; both limits need more registers than the widths below them.
        ("convolution_launches", 90, ["bf16/4/8192", "fp32/4/8192", "fp16/8/8192", "fp32/8/8192"], 0, 48),
    ],
)
def test_kernels_fit_their_gpus_and_keep_their_products_asynchronous(
    launches: str, capability: int, cases: list[str], spills: int, kib: int
) -> None:
    for report in compiled(launches, capability, *cases):
        assert report.spills <= spills, report
        assert report.shared <= kib << 10, report
        if capability == 90 and "fp32" not in report.kernel:
            assert not any("serialized" in remark for remark in report.remarks), report
        if launches in ("delta_rule_launches", "output_launches") and "fp32" not in report.kernel:
            assert report.wgmma > 0 or report.kernel.startswith("inverse"), report
            assert report.wgmma_registers == 0, report
