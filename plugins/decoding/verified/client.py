"""Ask a document teacher to verify blocks of tokens."""

from __future__ import annotations

from cartridge_forge.plugins.decoding.verified.records import VerifyCall, VerifyReply
from cartridge_forge.services.clients import DocTeacherClient, Packed


class VerifyingTeacherClient(DocTeacherClient):
    """Score sampled tokens, and verify those that a student proposes."""

    async def verify(self, call: VerifyCall) -> VerifyReply:
        """Return the verdicts on the blocks of a group, whose calls go to one teacher where the
        pool's router is `session`. Raises PlaneError when the student's logits are lost."""
        reply: VerifyReply = await self.pool.route("verify", Packed(call), session=call.group)
        return reply
