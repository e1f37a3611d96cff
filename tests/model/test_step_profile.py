"""The profile of a step: sections between markers, kinds of kernels, gaps, and a dry run on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import step_profile
from step_profile import MARKER, Kernel, kind_of, parts_of


def test_kernels_belong_to_the_section_between_markers() -> None:
    names = [
        "nvjet_tst_128x256",
        MARKER,
        "_gradient_kernel",
        "nvjet_tst",
        MARKER,
        "key_kernel",
        MARKER,
        "FusedAdamMath",
    ]
    kernels = [Kernel(name, 10.0 * i, 8.0) for i, name in enumerate(names)]
    found = parts_of(reversed(kernels))
    assert found == {
        "layers forward: products": 0.008,
        "output layer: softmax of the output layer": 0.008,
        "output layer: products": 0.008,
        "layers backward: attention": 0.008,
        "update: AdamW": 0.008,
        "gaps between kernels": pytest.approx(7 * 0.002),
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("sm90_xmma_gemm_bf16f32_bf16f32_f32_tn_n", "products"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "compiled"),
        ("wide_forward_kernel", "attention"),
        ("_gate_up_kernel", "experts"),
        ("_statistics_kernel", "softmax"),
        ("rocket", "other"),
    ],
)
def test_the_name_of_a_kernel_gives_its_kind(name: str, kind: str) -> None:
    assert kind_of(name).startswith(kind)


def test_a_dry_run_has_every_section(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    options = ["--dry-run", "--models", "qwen3-8b:2", "--repeats", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["step_profile.py", *options])
    step_profile.main()
    (result,) = json.loads(out.read_text())
    assert result["layers"] == 2
    for section in step_profile.SECTIONS:
        assert any(part.startswith(section) and spent > 0 for part, spent in result["parts"].items()), section
