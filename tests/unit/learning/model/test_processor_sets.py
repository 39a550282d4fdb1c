"""Sets of instructions that a processor has not are named, and not run."""

from __future__ import annotations

from nightly.processor_sets import AVX512, SETS, flags_of, lacking

ZEN3 = "processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n"


def test_what_a_processor_lacks_by_its_flags() -> None:
    zen3 = flags_of(ZEN3)
    assert zen3 == {"fpu", "avx2", "fma"}
    zen4 = zen3 | {*AVX512, "avx512_bf16"}
    shown = [(onednn, aten) for onednn, aten, _ in SETS if not lacking(onednn, aten, zen3)]
    assert shown == [("SSE41", "default"), ("AVX2", "avx2")]
    assert lacking("AVX512_CORE_BF16", "avx2", zen4 - {"avx512_bf16"}) == ["avx512_bf16"]
    assert not any(lacking(onednn, aten, zen4) for onednn, aten, _ in SETS)
    assert lacking("AVX2", "avx2", flags_of("")) == ["avx2", "fma"]
