"""Train a cartridge with TRL: its GRPOTrainer over a PEFT CARTRIDGE adapter, with our other terms.

    total = w_rl * TRL's own policy loss  +  w_doc * doc_kl  +  alpha * sdpo  +  beta * replay_dpo

TRL samples, rewards, logs and steps. The formulas are those of `learning.losses`, called on logits
that transformers computes; a term is divided by its own count over the optimizer step, as there.
The student is the frozen model over the adapter, the document teacher the same model without it and
with the document before the prompt, the hinted teacher the student itself under another prompt.

    trainer = CartridgeGRPOTrainer(
        trainable(model, "adapter"), [reward], GRPOConfig("out", bf16=False), train_dataset=rows,
        processing_class=tokenizer, objective=EpisodesObjective(w_rl=1.0, balance="none"),
    )

Rows have `prompt`, messages or text, and with w_doc > 0 `document`, a text. It becomes the system
message before messages, or is set before a text. The cartridge stands for all of that, the
beginning-of-sequence token included, which is taken off the student's prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel, PeftType
from torch import Tensor
from trl import GRPOTrainer

from cartridge_forge.learning.batch import token_logprobs
from cartridge_forge.learning.losses.doc_kl import doc_kl
from cartridge_forge.learning.teacher import TeacherDistribution
from cartridge_forge.plugins.episodes.losses.sdpo import alpha_at, sdpo_term, sdpo_tokens
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.plugins.objectives.policy_scores import summed_by_pair
from cartridge_forge.plugins.replay.dpo import replay_dpo
from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.spec.sections import LossSpec
from cartridge_forge.protocols.step import PreferencePair, completions
from recipes.trl.scoring import response_logits, teacher_logits, unpadded

# A row and its completion to the prompt, hint included, that the teacher reads; None: no error.
HintedPrompt = Callable[[Mapping[str, Any], str], Any | None]


class CartridgeGRPOTrainer(GRPOTrainer):
    """Add our terms to TRL's loss. `pairs_per_forward` of the `pairs` are trained on in each
    forward, in order and round again; the reference point of `kto` is that of these."""

    def __init__(
        self,
        model: PeftModel,
        reward_funcs: Any = None,
        args: Any = None,
        *,
        objective: EpisodesObjective,
        loss: LossSpec | None = None,
        hinted: HintedPrompt | None = None,
        pairs: Sequence[PreferencePair] = (),
        pairs_per_forward: int = 4,
        **options: Any,
    ) -> None:
        """Raises SpecError for an objective that TRL's loop cannot run, DataError for a model
        without a CARTRIDGE adapter."""
        check(objective, model, hinted, pairs)
        self.objective, self.doc_form = objective, loss or LossSpec()
        self._hinted, self._pairs, self._each = hinted, pairs, min(pairs_per_forward, len(pairs))
        self._student: Tensor | None = None
        super().__init__(model, reward_funcs, args, **options)
        if self.temperature != 1.0:
            raise SpecError(
                f"GRPOConfig.temperature is {self.temperature}, which biases every term: the "
                "tokens would be of another distribution than the one trained; set it to 1"
            )

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], Any, Any]:
        """Tokenize as TRL does, without the token that begins the cartridge already."""
        ids, images, fields = super()._tokenize_prompts(prompts)
        begin = self._tokenizer.bos_token_id
        return [row[1:] if row[0] == begin else row for row in ids], images, fields

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rows: dict[str, Any] = super()._generate_and_score_completions(inputs)
        prompts = unpadded(rows["prompt_ids"], rows["prompt_mask"])
        if self.objective.w_doc:
            pairs = zip(inputs, prompts, strict=True)
            rows["document_contexts"] = [self._document_context(row, ids) for row, ids in pairs]
        if self.objective.alpha:
            responses = unpadded(rows["completion_ids"], rows["completion_mask"])
            texts = self.processing_class.batch_decode(responses, skip_special_tokens=True)
            asked_again = [self._under_hint(*one) for one in zip(inputs, texts, strict=True)]
            rows["hinted_contexts"] = asked_again
            trained = self._trained(rows).sum(dim=1)
            hints = torch.tensor([c is not None for c in asked_again], device=trained.device)
            rows["hinted_items"] = self.accelerator.gather((trained * hints).sum()).sum()
        return rows

    def _document_context(self, row: Mapping[str, Any], prompt_ids: Sequence[int]) -> list[int]:
        document, prompt = row["document"], row["prompt"]
        if isinstance(prompt, str):
            (head,), _, _ = super()._tokenize_prompts([document])
            return [*head, *prompt_ids]
        messages = [{"role": "system", "content": document}, *prompt]
        (context,), _, _ = super()._tokenize_prompts([messages])
        if context[-len(prompt_ids) :] != list(prompt_ids):
            raise DataError(
                "the chat template renders a prompt differently behind a system message, so the "
                "teacher would read another prompt than the student; give prompts as text"
            )
        return list(context)

    def _under_hint(self, row: Mapping[str, Any], completion: str) -> list[int] | None:
        assert self._hinted is not None
        prompt = self._hinted(row, completion)
        return None if prompt is None else self._tokenize_prompts([prompt])[0][0]

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return what TRL asks for, of rows laid out as `recipes.trl.scoring` says. Those of a
        forward with gradient are kept for the other terms."""
        answered = attention_mask[:, -logits_to_keep:].bool()
        prompts = unpadded(input_ids[:, :-logits_to_keep], attention_mask[:, :-logits_to_keep])
        responses = unpadded(input_ids[:, -logits_to_keep:], answered)
        step = batch_size or len(responses)
        parts = [
            response_logits(model, prompts[i : i + step], responses[i : i + step])
            for i in range(0, len(responses), step)
        ]
        logits = torch.cat(parts)
        if logits.requires_grad:
            self._student = logits
        targets = input_ids[:, -logits_to_keep:][answered]
        logps = _at(answered, token_logprobs(logits, targets))
        if not compute_entropy:
            return logps, None, None
        with torch.no_grad():
            log_p = logits.log_softmax(-1)
            return logps, _at(answered, -(log_p.exp() * log_p).sum(-1)), None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        objective, terms = self.objective, {}
        total: Tensor = objective.w_rl * super()._compute_loss(model, inputs)
        student, self._student = self._student, None
        if student is None:  # an evaluation: nothing is trained
            return total
        responses = unpadded(inputs["completion_ids"], inputs["completion_mask"])
        trained = self._trained(inputs)[inputs["completion_mask"].bool()].bool()
        teacher = self.accelerator.unwrap_model(model)
        if objective.w_doc:
            logits = teacher_logits(
                teacher, inputs["document_contexts"], responses, cartridge=False
            )
            read = TeacherDistribution(logits=logits[trained])
            summed, _ = doc_kl(student[trained], read, self.doc_form)
            terms["doc_kl"] = summed / self._items(inputs["num_items_in_batch"])
            total = total + objective.w_doc * terms["doc_kl"]
        alpha = alpha_at(self.state.global_step, objective.alpha, objective.alpha_warmup_steps)
        if alpha and any(c is not None for c in inputs["hinted_contexts"]):
            summed = self._sdpo(teacher, inputs, responses, student, trained)
            terms["sdpo"] = summed / self._items(inputs["hinted_items"])
            total = total + alpha * terms["sdpo"]
        if objective.beta:
            terms["replay_dpo"] = self._replay(model) / self.current_gradient_accumulation_steps
            total = total + objective.beta * terms["replay_dpo"]
        for name, term in terms.items():
            value = term.detach() * self.current_gradient_accumulation_steps
            self._metrics["train"][name].append(self.accelerator.gather(value).mean().item())
        return total

    def _sdpo(
        self,
        teacher: Any,
        inputs: Mapping[str, Any],
        responses: Sequence[Sequence[int]],
        student: Tensor,
        trained: Tensor,
    ) -> Tensor:
        """Return the sum of the loss over the trained tokens of the completions under a hint."""
        contexts = inputs["hinted_contexts"]
        rows = [i for i, context in enumerate(contexts) if context is not None]
        lengths = torch.tensor([len(response) for response in responses])
        hints = torch.tensor([context is not None for context in contexts])
        under = hints.repeat_interleave(lengths).to(trained.device)
        logits = teacher_logits(
            teacher, [contexts[i] for i in rows], [responses[i] for i in rows], cartridge=True
        )
        targets = torch.tensor([t for i in rows for t in responses[i]], device=student.device)
        mask = trained[under]
        sampled = token_logprobs(student[under], targets).detach()
        if (old := inputs.get("old_per_token_logps")) is not None:
            sampled = old[inputs["completion_mask"].bool()][under]
        tokens = sdpo_tokens(
            student[under][mask], TeacherDistribution(logits=logits[mask]), targets[mask],
            sampled[mask], self.objective.sdpo,
        )  # fmt: skip
        return sdpo_term(tokens, self.objective.sdpo).total

    def _replay(self, model: Any) -> Tensor:
        """Return the mean loss of this forward's pairs."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        first = (self._step * world + rank) * self._each
        pairs = [self._pairs[i % len(self._pairs)] for i in range(first, first + self._each)]
        texts = completions(pairs)
        contexts, responses = [s.prompt_ids for s in texts], [s.response_ids for s in texts]
        logits = response_logits(model, contexts, responses)
        targets = torch.tensor([t for ids in responses for t in ids], device=logits.device)
        chosen, rejected = summed_by_pair(token_logprobs(logits, targets), pairs)
        term = replay_dpo(chosen, rejected, pairs, self.objective.dpo)
        return term.total / term.count

    def _items(self, count: Tensor) -> Tensor:
        """Return a forward's divisor of a term with `count` tokens in the whole generation batch,
        as TRL's loss type `dapo` has it."""
        steps = self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return count.clamp(min=1) / self.accelerator.num_processes * steps

    @staticmethod
    def _trained(rows: Mapping[str, Any]) -> Tensor:
        """Return which of the completions' tokens [B, T] the student sampled."""
        mask: Tensor = rows["completion_mask"]
        return mask * rows["tool_mask"] if "tool_mask" in rows else mask


def check(
    objective: EpisodesObjective, model: Any, hinted: object, pairs: Sequence[PreferencePair]
) -> None:
    """Raise SpecError for keys that TRL's loop has no counterpart of, or without what they need;
    DataError for another model than one over a CARTRIDGE adapter."""
    if objective.balance != "none":
        raise SpecError(
            "objective.balance is gradient_norm, which needs a backward for each term, and TRL "
            "runs one; set balance: none"
        )
    if objective.alpha and objective.sdpo.teacher != "live":
        raise SpecError(
            f"objective.sdpo.teacher is {objective.sdpo.teacher}; TRL's loop keeps one adapter: "
            "set it to live"
        )
    if objective.alpha and hinted is None:
        raise SpecError("objective.alpha > 0 needs `hinted`, which writes the teacher's prompt")
    if objective.beta and not pairs:
        raise SpecError("objective.beta > 0 needs `pairs` to train on")
    kind = getattr(getattr(model, "active_peft_config", None), "peft_type", None)
    if kind != PeftType.CARTRIDGE:
        raise DataError(
            f"the model's adapter is {kind or 'none'}: load a CARTRIDGE with "
            "recipes.trl.adapter.trainable(model, folder); `forge convert` writes one"
        )


def _at(places: Tensor, values: Tensor) -> Tensor:
    """Return `values` [N] at the marked `places` [B, T], 0 elsewhere."""
    return torch.zeros(places.shape, dtype=values.dtype, device=values.device).masked_scatter(
        places, values
    )
