"""Register an engine with veRL that trains a cartridge: actor_rollout_ref.actor.strategy=cartridge.

The model is ours (`learning.model`), frozen; the cartridge is read from the folder or file that
`actor_rollout_ref.model.lora_adapter_path` names, in any format that `forge convert` reads. veRL
gives token ids and a loss of the response tokens' log-probabilities, as to its own engines.

One process: a cartridge is small, and its gradient is not summed over ranks here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftType, TaskType
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches

from cartridge_forge.learning.batch import pack, response_tokens, token_logprobs
from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.model.loading import claim_device, load_model
from cartridge_forge.learning.trainer_state import CartridgeProgress, LearningRateSchedule
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.formats.convert import FORMATS, read
from cartridge_forge.plugins.library.formats.peft import TENSOR, rows_of
from cartridge_forge.protocols.errors import DataError, RunError, SpecError
from cartridge_forge.protocols.step import Sample

NAME = "cartridge"
FOLDER, MOMENTS, COUNTS = "adapter", "moments.safetensors", "progress.json"
LONGEST = 1 << 30  # veRL bounds lengths itself


@EngineRegistry.register(model_type="language_model", backend=NAME, device=["cpu", "cuda"])
class CartridgeEngine(BaseEngine):
    """Train one cartridge with Adam, without weight decay."""

    is_param_offload_enabled = False
    is_optimizer_offload_enabled = False

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        """Raises RunError in a group of several processes."""
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        if ranks and torch.distributed.get_world_size() > 1:
            raise RunError(
                "the engine of cartridges trains in one process: set trainer.n_gpus_per_node and "
                "trainer.nnodes to 1"
            )
        self._config, self._optimizer = model_config, optimizer_config
        self.mode: str | None = None

    def initialize(self) -> None:
        """Load model and cartridge. Raises DataError without a cartridge's path."""
        path = self._config.lora_adapter_path
        if not path:
            raise DataError(
                "no cartridge: set actor_rollout_ref.model.lora_adapter_path to a cartridge's "
                "folder or file"
            )
        device = claim_device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_model(str(self._config.local_path), device=device)
        self._file = read(Path(path))
        self._begin = self._config.hf_config.bos_token_id
        self._set(self._file.kv)
        self._initial = self.bank.full(NAME, self.bank.trainable[NAME]).detach()

    def _set(self, kv: Tensor) -> None:
        """Stand at these numbers [L, 2, H_kv, P, D], with no step done."""
        self.bank = CartridgeBank([NAME], [kv.to(self.model.device)], self._file.frozen)
        plan, steps = self._optimizer, max(self._optimizer.total_training_steps, 1)
        warmup = plan.lr_warmup_steps or 0
        if warmup <= 0:
            warmup = int(plan.lr_warmup_steps_ratio * steps)
        self.progress = CartridgeProgress(
            self.bank.trainable[NAME], LearningRateSchedule(plan.lr, warmup, steps)
        )
        self._disabled = False

    def train_mode(self, **options: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, "train", **options)

    def eval_mode(self, **options: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, "eval", **options)

    def optimizer_zero_grad(self) -> None:
        self.progress.parameter.grad = None

    def optimizer_step(self) -> float:
        """Make one update and return the gradient's norm before it was clipped. Raises RunError for
        a gradient that is not finite, before the update."""
        gradient = self.progress.parameter.grad
        if gradient is not None and not torch.isfinite(gradient).all():
            raise RunError("the cartridge's gradient is not finite; lower the learning rate")
        return self.progress.update(self._optimizer.clip_grad)

    def lr_scheduler_step(self) -> float:
        self.progress.steps += 1
        return self.progress.lr

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Return log-probabilities (nested [B, j]), losses and metrics of a batch, as veRL's own
        engines do; adds the gradients of the losses unless `forward_only`."""
        tokens = int(data["loss_mask"].sum())
        tensordict_utils.assign_non_tensor(data, sp_size=1, batch_num_tokens=tokens, dp_size=1)
        parts, indices = prepare_micro_batches(data=data, same_micro_num_in_dp=False)
        outputs = []
        with torch.no_grad() if forward_only else nullcontext():
            for part in parts:
                output = self._forward(part)
                output_row: dict[str, Any] = {"model_output": output, "loss": 0.0, "metrics": {}}
                if loss_function is not None:
                    loss, metrics = loss_function(model_output=output, data=part, dp_group=None)
                    output_row |= {"loss": loss.detach().item(), "metrics": metrics}
                    if not forward_only:
                        loss.backward()
                        del output_row["model_output"]
                outputs.append(detach_tree(output_row))
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _forward(self, part: TensorDict) -> dict[str, Tensor]:
        """Return each token's log-probability, nested as the ids: at j that of the token j + 1, 0
        where that is of the prompt; and its entropy, if it is asked for."""
        _check_temperature(part["temperature"])
        ids = part["input_ids"]
        samples, places, start = [], list[int](), 0
        for i, (row, prompt) in enumerate(
            zip(ids.unbind(), _lengths(part["prompts"], part), strict=True)
        ):
            tokens = row.tolist()
            prompt_ids = tokens[:prompt]
            # A cartridge begins with the token that begins a prompt without one.
            prompt_ids = prompt_ids[1:] if prompt_ids[0] == self._begin else prompt_ids
            samples.append(Sample(str(i), NAME, tuple(prompt_ids), tuple(tokens[prompt:]), (), ()))
            places += range(start + prompt - 1, start + len(tokens) - 1)
            start += len(tokens)
        kv = self._initial if self._disabled else self.bank.kv()[0]
        packed = pack(samples, {NAME: kv.shape[3]}, LONGEST)
        logits = response_tokens(self.model, packed, [kv.to(self.model.dtype)]).logits
        at = torch.tensor(places, device=logits.device)
        values = {"log_probs": token_logprobs(logits, packed.targets)}
        if tensordict_utils.get_non_tensor_data(part, key="calculate_entropy", default=False):
            log_p = logits.log_softmax(-1)
            values["entropy"] = -(log_p.exp() * log_p).sum(-1)
        return {
            name: torch.nested.nested_tensor_from_jagged(
                value.new_zeros(start).index_put((at,), value), ids.offsets().to(value.device)
            )
            for name, value in values.items()
        }

    def get_per_tensor_param(
        self, **_: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Return the cartridge as PEFT names it, and what kind of adapter it is."""
        kv = self.bank.kv()[0].detach()
        kind = {"peft_type": PeftType.CARTRIDGE, "task_type": TaskType.CAUSAL_LM}
        return iter([(TENSOR, rows_of(kv))]), kind

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> None:
        return None

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Leave everything where it is: each step reads the model, and a cartridge is small."""

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Read the cartridge as it was loaded, the reference of a KL."""
        self._disabled = True
        try:
            yield
        finally:
            self._disabled = False

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Write an adapter that PEFT and `forge convert` read, and the optimizer beside it."""
        folder = Path(local_path)
        folder.mkdir(parents=True, exist_ok=True)
        kv = self.bank.kv()[0].detach().cpu()
        cartridge = CartridgeFile(kv, self._file.frozen, self._file.facts)
        FORMATS["peft"].write(cartridge, folder / FOLDER, force=True)
        save_file({k: t.contiguous() for k, t in self.progress.moments.items()}, folder / MOMENTS)
        counts = {"steps": self.progress.steps, "global_step": global_step}
        (folder / COUNTS).write_text(json.dumps(counts) + "\n")

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **_: Any,
    ) -> None:
        """Continue from what `save_checkpoint` wrote, exactly."""
        folder = Path(local_path)
        self._set(read(folder / FOLDER).kv)
        moments = load_file(folder / MOMENTS)
        steps = int(json.loads((folder / COUNTS).read_text())["steps"])
        self.progress.restart(self.progress.schedule, since=-1, steps=steps, moments=moments)


def _lengths(prompts: Any, part: TensorDict) -> list[int]:
    """Return the number of tokens of each row's prompt, nested or padded."""
    if prompts.is_nested:
        lengths: list[int] = prompts.offsets().diff().tolist()
        return lengths
    mask = part["attention_mask"][:, : prompts.shape[1]]
    of_mask: list[int] = mask.sum(dim=1).tolist()
    return of_mask


def _check_temperature(temperature: Any) -> None:
    values = temperature.tolist() if isinstance(temperature, Tensor) else [temperature]
    if any(one != 1.0 for one in values):
        raise SpecError(
            f"actor_rollout_ref.rollout.temperature is {values[0]}, and a cartridge is trained "
            "on what the model itself would say; set it to 1.0"
        )
