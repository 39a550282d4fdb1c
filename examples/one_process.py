"""Train a cartridge on policy in one process, without actors: the whole method in one loop.

    python examples/one_process.py [STEPS]

The student, a frozen model with the cartridge, writes answers to questions about a chart. The
teacher, the same model with the whole chart, scores those very tokens. The loss changes the
cartridge alone, and the student writes its next answers over the changed cartridge.

Dimensions: L layers, H_kv key/value heads, D numbers of a head, T tokens of the chart, P of the
cartridge, N response tokens of a step.
"""

from __future__ import annotations

import sys

from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import TeacherDistribution, document_kv, score_kept
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.spec.sections import TrainSpec
from cartridge_forge.protocols.step import (
    GenerateRequest,
    PrefixRef,
    Sample,
    Sampling,
    TrainBatch,
    stream_seed,
)

MODEL = str(REPOSITORY / "models" / "clinic-reader")
CHART = """chart of oscar brandt, born 14 february, diagnosis asthma.
note 1: oncology, 17 december. albumin 25 gram. saturation 96 percent. analgesic calmosin. \
antihypertensive quensyl. platelets 88 giga. insulin 86 units. lungs are clear.
note 2: urology, 10 january. therapist evans. pharmacy lakeside. ultrasound bleeding. \
creatinine 32 micromol. rehabilitation eastham. calcium 41 mmol. sleep has improved.
note 3: radiology, 22 april. referrer fischer. radiologist quintero. surgeon ivanov. \
glucose 95 mmol. statin duratex. consent was obtained. pain is controlled."""
TOPICS = """albumin saturation analgesic antihypertensive platelets insulin therapist pharmacy
ultrasound creatinine rehabilitation calcium referrer radiologist surgeon glucose statin"""
TOKENS = 20  # P
ROW_TOKENS = 64  # of a prompt with its answer, at most
TOP = 20  # of the teacher's distribution at each token
ANSWERS = 3  # to a question in each step


def main(steps: int) -> None:
    model, tokenizer = load_model(MODEL), load_tokenizer(MODEL)
    ends = frozenset({tokenizer.get_vocab()["<|end|>"]})

    def ids(*messages: tuple[str, str], prompt: bool = False) -> tuple[int, ...]:
        chat = [{"role": role, "content": text} for role, text in messages]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    chart = ids(("system", CHART))  # T ids
    document = document_kv(model, chart)  # [L, 2, H_kv, T, D]
    bank = CartridgeBank(["chart"], [document[:, :, :, :TOKENS]], frozen=1)
    spec = TrainSpec(steps=steps, lr=0.4, warmup_steps=1, row_tokens=ROW_TOKENS)
    trainer = CartridgeTrainer(model, bank, spec)
    trainer.begin("on_policy", steps)

    def ask(name: str, topic: str, temperature: float) -> GenerateRequest:
        conversation = ids(("system", CHART), ("user", f"what is the {topic}?"), prompt=True)
        prefix = PrefixRef("cartridge/chart", trainer.version)
        sampling = Sampling(temperature, max_tokens=24)
        return GenerateRequest(
            name, conversation[len(chart) :], prefix, sampling, stream_seed(name)
        )

    def write(requests: list[GenerateRequest]) -> list[Sample]:
        """Return the student's answers over the present cartridge [L, 2, H_kv, P, D]."""
        answers = generate(model, requests, lambda prefix: bank.kv()[0].detach(), ends)
        return [
            Sample(r.id, "chart", r.prompt_ids, a.token_ids, a.logprobs, a.versions)
            for r, a in zip(requests, answers, strict=True)
        ]

    def show(topic: str) -> None:
        (answer,) = write([ask("greedy", topic, temperature=0.0)])
        text = tokenizer.decode(list(answer.response_ids), skip_special_tokens=True)
        print(f"version {trainer.version}: what is the {topic}?{text}", flush=True)

    print(f"{len(chart)} tokens of the chart, {TOKENS} of the cartridge")
    show("insulin")
    for step in range(steps):
        version = trainer.version
        prompts = [
            (f"{step}/{topic}/{i}", topic) for topic in TOPICS.split() for i in range(ANSWERS)
        ]
        samples = write([ask(name, topic, temperature=1.0) for name, topic in prompts])
        # Top k of the teacher at every response token: indices and logprobs [N, k].
        scored = score_kept(model, samples, {"chart": document}, ROW_TOKENS, TOP)
        scores = {"doc_teacher": TeacherDistribution(**scored)}
        trained = trainer.step(TrainBatch(doc=samples, scores=scores), version)
        print(f"step {step + 1}: {trained.tokens} tokens, KL {trained.kl:.3f}", flush=True)
    show("insulin")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
