"""The alignment test: with the whole document's KV as a frozen cartridge, student and teacher are
the same function of the same tokens, so doc_kl is zero for whatever is scored and however it is
packed. Any shift between the two sides breaks it, and the tests here show that too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from channel_setup import loss_form
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.learning.alignment_setup import ZERO, packed_of, per_token, student

from cartridge_forge.learning.teacher import TeacherDistribution, score, top_k

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_doc_kl_is_zero_in_every_order_and_packing(
    llama: Twin, make_samples: MakeSamples, data: st.DataObject
) -> None:
    shape = st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.integers(1, 10))
    shapes = data.draw(st.lists(shape, min_size=1, max_size=6))
    samples = data.draw(st.permutations(make_samples(*shapes, seed=data.draw(st.integers(0, 9)))))
    longest = max(prompt + response for _, prompt, response in shapes)
    rows = st.integers(longest, 4 * longest)
    logits = student(llama, packed_of(llama, samples, data.draw(rows)))
    scored = score(llama.model, samples, llama.cached(), data.draw(rows))
    direction = data.draw(st.sampled_from(["forward", "reverse", "jsd"]))
    k = data.draw(st.sampled_from([0, 1, 5, 97]))
    teacher = (
        TeacherDistribution(logits=scored)
        if k == 0
        else TeacherDistribution(None, *top_k(scored, k))
    )
    for form in ("tail", "renormalised"):
        assert abs(per_token(logits, teacher, loss_form(direction, form=form))) < ZERO
