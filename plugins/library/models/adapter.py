"""Run a model that `learning.decoder` does not know through transformers.

    attention   ours is registered with transformers as the implementation "cartridge"
    mask        transformers makes one for each kind of layer; ours brings to the layers the
                attention of the pass, and how far back they see
    logits      the model's own forward pass from the hidden states on, with its scale and cap
    survey      one pass over a few tokens at load, which shows the sizes of keys and values, and
                that no layer mixes tokens outside of attention

Tokens are one row of the flat list. Importing transformers takes seconds, so this module is
imported only for such models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from cartridge_forge.learning.attention import AttentionOptions
from cartridge_forge.learning.decoder import (
    Attention,
    KeyFrequencies,
    LanguageModel,
    half_split,
    pair_frequencies,
)
from cartridge_forge.learning.model.hub import model_files
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import count_work

IMPLEMENTATION = "cartridge"
REMEDY = "use a model of another family; docs/reference/models.md lists those that are right"
# Arguments of an attention function that change no number: dropout is 0 in eval mode, the window is
# the mask's, positions are in queries and keys, and the others are about what else is returned.
NO_EFFECT = frozenset(
    {
        "dropout", "sliding_window", "position_ids", "cache_position", "use_cache",
        "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    }
)  # fmt: skip
# Frequencies that change with the length of the text: the angle depends on more than the position.
BY_LENGTH = ("dynamic", "longrope")
KV_HEADS = "num_key_value_heads"
FIT = 1e-4  # of the largest key: how exactly a turned key is met in float32
LEAST_POSITIONS = 512  # of a model with such frequencies: below, no document fits
DEQUANTIZED = ("mxfp4", "fp8")  # methods whose weights transformers makes whole on any device


class LayerMask(Tensor):
    """Bring the attention of a pass over tokens at `positions` [N] to the layers of one kind.
    `options` tells how far back they see, None for what is not computed; `kv_shape` is the
    model's, None in the survey."""

    flat: Attention
    positions: Tensor
    options: AttentionOptions | None
    kv_shape: tuple[int, int, int] | None


_PASS: ContextVar[tuple[Attention, Tensor, tuple[int, int, int] | None]] = ContextVar("pass")


def layer_mask(
    *, mask_function: Callable[..., Tensor], device: torch.device, local_size: int | None = None,
    **_: Any,
) -> LayerMask:  # fmt: skip
    """Return the mask of one kind of layer, as transformers asks an implementation for it, though
    the model may have no layer of that kind."""
    kinds = [AttentionOptions(1.0)]
    if local_size:
        kinds = [AttentionOptions(1.0, local_size), AttentionOptions(1.0, None, local_size)]
    window = local_size or 1
    at = torch.tensor(sorted({0, 1, window - 1, window, window + 1, 2 * window}), device=device)
    queries, keys = (x.flatten() for x in torch.meshgrid(at, at, indexing="ij"))
    allowed = torch.as_tensor(mask_function(0, 0, queries, keys))
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device).as_subclass(LayerMask)
    mask.flat, mask.positions, mask.kv_shape = _PASS.get()
    mask.options = None
    for options in kinds:
        expected = keys <= queries
        if options.limit:
            expected &= ~options.unseen(queries - keys, queries)
        if torch.equal(allowed, expected):
            mask.options = options
            break
    return mask


def flat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Return attention [1, N, H_q, D_v] of query [1, H_q, N, D], key [1, H_kv, N, D] and value
    [1, H_kv, N, D_v]. Raises DataError for an argument that is not computed."""
    unknown = sorted(n for n, x in extra.items() if x is not None and n not in NO_EFFECT)
    if unknown or is_causal is False:
        names = ", ".join(unknown or ["is_causal=False"])
        raise DataError(f"its attention takes {names}, which is not computed here")
    if not isinstance(attention_mask, LayerMask) or not hasattr(attention_mask, "flat"):
        raise DataError("its layers change the attention mask, or take none")
    mask_options = attention_mask.options
    if mask_options is None:
        raise DataError("an attention mask is neither causal, nor a sliding window, nor in chunks")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    count_work(len(k))
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # an int, typed as Tensor | Module
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q = _tempered(module, q, attention_mask.positions)
    heads, kv_heads = q.shape[1], k.shape[1]
    size = max(q.shape[-1], v.shape[-1])
    if attention_mask.kv_shape is not None:
        _, most, size = attention_mask.kv_shape
        shared = heads // kv_heads
        q, k, v = _widened(q, shared * most, size), _widened(k, most, size), _widened(v, most, size)
        if s_aux is not None:
            s_aux = F.pad(s_aux, (0, shared * most - heads))
    options = AttentionOptions(scale, mask_options.window, mask_options.chunk, softcap, s_aux)
    out = attention_mask.flat.attend(layer, q, k, v, options)
    return out[None, :, :heads, : value.shape[-1]], None


def _widened(x: Tensor, heads: int, size: int) -> Tensor:
    """Return x [N, H, D] with zeros up to `heads` and `size`."""
    more = size - x.shape[2], heads - x.shape[1]
    return F.pad(x, (0, more[0], 0, more[1])) if any(more) else x


def _tempered(module: Any, q: Tensor, positions: Tensor) -> Tensor:
    """Return Llama 4's queries [N, H_q, D] of a layer without rotation, scaled by their positions:
    the layer has scaled them by their places in the row."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return q

    def scale(at: Tensor) -> Tensor:
        steps = torch.floor((at + 1.0) / float(module.floor_scale))
        return torch.log1p(steps) * float(module.attn_scale) + 1.0

    places = torch.arange(len(q), device=q.device)
    more: Tensor = scale(positions) / scale(places)
    return q * more[:, None, None].to(q.dtype)


class Head(nn.Module):
    """Project hidden states to logits as the model itself does, its own scale and cap included.
    Parameters are those of its output embeddings."""

    def __init__(self, model: PreTrainedModel, base: nn.Module) -> None:
        super().__init__()
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        owner = next(m for m in model.modules() if head in m.children())
        path = next(name for name, module in owner.named_modules() if module is base)
        self.weight, self.bias = head.weight, getattr(head, "bias", None)
        self._base, *self._within = path.split(".")
        self._head = next(name for name, child in owner.named_children() if child is head)
        self._owner = [owner]  # in a list: no module of this one
        owner.register_module(self._head, self)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden, lambda x: F.linear(x, self.weight, self.bias))

    def logits(self, hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the logits [n, V] of hidden states [n, width], by the model's own forward pass
        around `project`."""
        (owner,) = self._owner
        shell = copy.copy(owner)
        # The model without its layers: they "return" the hidden states.
        layers = _Returning(hidden[None], self._within)
        parts = {self._base: layers, self._head: _Projecting(project)}
        shell._modules = {**owner._modules, **parts}
        logits: Tensor = shell(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


class _HiddenStates(BaseModelOutputWithPast):
    def __getattr__(self, _: str) -> None:
        """Return None for what only other outputs have."""


class _Returning(nn.Module):
    def __init__(self, hidden: Tensor, within: Sequence[str]) -> None:
        super().__init__()
        self._hidden = hidden
        for name in within:  # a model may call what lies in its base
            object.__setattr__(self, name, self)

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        hidden: Any = self._hidden  # typed as a FloatTensor there
        return _HiddenStates(last_hidden_state=hidden)


class _Projecting(nn.Module):
    def __init__(self, project: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._project = project

    def forward(self, hidden: Tensor) -> Tensor:
        return self._project(hidden[0])[None]


class _Survey:
    """Note what each layer gives its attention. A token sees itself alone."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.keys: list[Tensor] = []
        self.sizes: list[tuple[int, int]] = []

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.calls.append(layer)
        self.keys.append(k)
        self.sizes.append((k.shape[1], max(k.shape[2], v.shape[2])))
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


class TransformersModel(LanguageModel):
    """Run a transformers model over flat tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Survey the model, whose attention is `IMPLEMENTATION`. Raises DataError for one that
        cannot be computed over prefixes and packed sequences."""
        super().__init__()
        self._model = model
        self.base_model = _base_of(model)
        self.lm_head = Head(model, self.base_model)
        self.vocabulary = self.lm_head.weight.shape[0]
        self.requires_grad_(False)
        self.eval()
        config = model.config.get_text_config()
        self.longest = getattr(config, "max_position_embeddings", None)
        self._fixed = fixed_positions(config)
        if self._fixed is not None:
            self.longest = self._fixed
        self._kv_shape: tuple[int, int, int] | None = None
        survey = self._surveyed()
        heads, sizes = zip(*survey.sizes, strict=True)
        self.kv_shape = self._kv_shape = (len(survey.calls), max(heads), max(sizes))
        self._layers = next(
            m for m in self.base_model.modules()
            if isinstance(m, nn.ModuleList) and len(m) == len(survey.calls)
        )  # fmt: skip

    @property
    def layers(self) -> Any:
        return self._layers

    @property
    def embeddings(self) -> Any:
        return self._model.get_input_embeddings()

    def forward(
        self, ids: Tensor, positions: Tensor, attention: Attention, read: Tensor | None = None
    ) -> Tensor:
        if self._fixed is not None and int(positions.max()) >= self._fixed:
            raise DataError(
                f"position {int(positions.max())} is beyond {self._fixed - 1}: from there the "
                "rotary embedding of this model changes for the whole text, which is not computed "
                "here; keep documents, cartridges and conversations within it"
            )
        token = _PASS.set((attention, positions, self._kv_shape))
        try:
            out = self.base_model(
                input_ids=ids[None],
                position_ids=positions[None],
                # Ones: else transformers looks for packed sequences by itself.
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=ids.device),
                use_cache=False,
            )
        finally:
            _PASS.reset(token)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden if read is None else hidden[read]

    def head(self, hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        return self.lm_head.logits(hidden, project)  # type: ignore[no-any-return]

    def _rotation(self) -> KeyFrequencies:
        return measured_frequencies(self._model.config)

    def weights(self) -> Iterator[tuple[str, Tensor, slice]]:
        for name, tensor in self._model.state_dict().items():
            yield name, tensor, slice(None)

    @torch.no_grad()
    def _surveyed(self) -> _Survey:
        """Return what the layers attend to in a pass over two texts that end with one token."""
        survey = _Survey()
        ids = torch.tensor([3, 1, 4, 5, 2, 6, 0, 5], device=self.device) % self.vocabulary
        hidden = self(ids, torch.arange(4, device=self.device).repeat(2), survey)
        layers = len(survey.calls)
        declared = getattr(self._model.config.get_text_config(), "num_hidden_layers", layers)
        if survey.calls != list(range(declared)):
            twice = sorted({i for i in survey.calls if survey.calls.count(i) > 1})
            missing = sorted(set(range(declared)) - set(survey.calls))
            if twice:
                raise DataError(f"layers attend more than once: {twice}; a cartridge does so once")
            raise DataError(
                f"layers call no attention that can read a cartridge: {missing}; they keep a "
                "state, or attend by code of their own"
            )
        if (hidden[3] - hidden[7]).abs().amax() > 1e-3 * hidden.abs().amax():
            raise DataError(
                "its layers mix tokens outside of attention (a state or a convolution), which "
                "sees neither a cartridge nor where a packed text begins"
            )
        if not self.head(hidden[:1], lambda x: F.linear(x, self.lm_head.weight)).isfinite().all():
            raise DataError("its logits are not finite")
        return survey


def _base_of(model: PreTrainedModel) -> nn.Module:
    """Return the module that computes the hidden states of text."""
    base: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    if base is model:  # not where its family's name says
        base = next(one for one in model.children() if isinstance(one, PreTrainedModel))
    return base


def fixed_positions(config: PreTrainedConfig) -> int | None:
    """Return up to how many positions the rotary embedding of a model is the same at every length
    of the text; None: at all."""
    longest = getattr(config, "max_position_embeddings", None)
    limits = [
        rope.get("original_max_position_embeddings") or longest
        for rope in _ropes(config)
        if rope.get("rope_type") in BY_LENGTH
    ]
    return min((limit for limit in limits if limit), default=None)


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of each rotary embedding: one, or one of each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]


def load_by_transformers(
    path: str, dtype: torch.dtype, config: PreTrainedConfig | None = None
) -> TransformersModel:
    """Load a causal LM from a directory, or a hub id if the hub is reachable, on the host; with
    another config than the one there, if one is given. Raises OSError where there is none, and
    DataError for one that is not computed here."""
    path = model_files(path)
    try:
        config = config or AutoConfig.from_pretrained(path)
    except ValueError as error:
        raise _refusal(path, "unknown to transformers", error) from error
    quantised = _dequantize(path, config)
    _refuse_short(path, config)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION
        )
        if quantised:  # some methods leave bfloat16, whose numbers the others hold exactly
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
        return TransformersModel(model)
    except OSError:
        raise
    except Exception as error:  # whatever the code of some family raises
        raise _refusal(path, repr(config.model_type), error) from error


def frequencies_by_transformers(path: str) -> KeyFrequencies:
    """Return the frequencies of the model in this directory from its config alone. Raises DataError
    for a model that transformers does not know, or whose keys cannot be moved."""
    try:
        config = AutoConfig.from_pretrained(model_files(path))
    except (OSError, ValueError) as error:
        raise DataError(
            f"keys of the model {path!r} cannot be moved to other positions, for transformers does "
            f"not know it: {str(error).splitlines()[0]}; use one cartridge before a prompt"
        ) from error
    return measured_frequencies(config)


def measured_frequencies(config: PreTrainedConfig) -> KeyFrequencies:
    """Return how the keys of a model turn, measured on a small random one with its layers, heads'
    size and rotary embedding. Raises DataError where they do more than turn, or turn otherwise in
    longer texts."""
    config = config.get_text_config()
    for rope in _ropes(config):
        if (kind := rope.get("rope_type")) in BY_LENGTH:
            raise DataError(
                f"keys of this model cannot be moved to other positions: its rotary embedding is "
                f"{kind}, which is not the same at every length; use a model with a fixed one"
            )
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            shell = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                _small(config), dtype=torch.float32, attn_implementation=IMPLEMENTATION
            )
            for parameter in shell.parameters():
                if parameter.dim() == 1:  # ones and zeros hide what norms and biases do
                    nn.init.uniform_(parameter, 0.5, 1.5)
        model, ids = TransformersModel(shell), torch.arange(1, 9)
        keys: list[list[Tensor]] = []
        for position in (0, 1):
            survey = _Survey()
            with torch.no_grad():
                model(ids, torch.full_like(ids, position), survey)
            keys.append(survey.keys)
    except Exception as error:  # whatever the code of some family raises
        raise _refusal("this model", repr(config.model_type), error) from error
    candidates = [
        tensor.detach().double() for name, tensor in shell.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]  # fmt: skip
    layers = [
        fitted(key_before, key_after, candidates)
        for key_before, key_after in zip(*keys, strict=True)
    ]
    if unfit := [i for i, layer in enumerate(layers) if layer is None]:
        raise DataError(
            f"keys of this model ({config.model_type!r}) cannot be moved to other positions: those "
            f"of layers {unfit} do more than turn with them; use one cartridge before a prompt"
        )
    return stacked([layer for layer in layers if layer is not None])


def _small(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config with the same layers and the same size of a head, and little else."""
    small, fields = copy.deepcopy(config), config.to_dict()
    numbers = {name: x for name, x in fields.items() if type(x) is int}
    if {n for n in numbers if n.endswith("_heads")} <= {"num_attention_heads", KV_HEADS}:
        size = fields.get("head_dim") or config.hidden_size // config.num_attention_heads
        small.hidden_size, small.num_attention_heads = 2 * size, 2
        if KV_HEADS in numbers:
            setattr(small, KV_HEADS, 2)
    else:  # layers with other numbers of heads, whose size has its own name
        small.hidden_size = 4 * config.num_attention_heads
    for name in numbers:
        if name.endswith("intermediate_size") or name.startswith("vocab_size"):
            setattr(small, name, 16)
    small.pad_token_id = small.bos_token_id = small.eos_token_id = 0
    return small


def _dequantize(path: str, config: PreTrainedConfig) -> bool:
    """Return whether a model's weights are quantised, and let transformers make them whole at load.
    Raises DataError where it cannot."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return False
    fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = str(fields.get("quant_method", "unknown"))
    if method not in DEQUANTIZED:
        raise DataError(
            f"the weights of the model {path!r} are quantised ({method}), which is not computed "
            f"with here, but for {' and '.join(DEQUANTIZED)}; set model.path to the model's whole "
            "weights, or make them: transformers' model.dequantize(), then save_pretrained"
        )
    config.quantization_config = {**fields, "dequantize": True}
    return True


def _refuse_short(path: str, config: PreTrainedConfig) -> None:
    """Raise DataError for a model whose rotary embedding changes within a usual text."""
    text = config.get_text_config()
    fixed = fixed_positions(text)
    if fixed is not None and fixed < LEAST_POSITIONS:
        kinds = sorted({str(rope.get("rope_type")) for rope in _ropes(text)} & {*BY_LENGTH})
        raise DataError(
            f"the rotary embedding ({', '.join(kinds)}) of the model {path!r} changes for the "
            f"whole text beyond {fixed} positions, which is not computed here; use a model whose "
            "rope_type in config.json is another, or that allows for more positions before"
        )


def _refusal(path: str, family: str, error: Exception) -> DataError:
    if isinstance(error, DataError):
        why = str(error)
    elif isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
        why = "its layers attend by code of their own, which cannot read a cartridge"
    else:
        first = (str(error).splitlines() or [""])[0]
        why = f"its code does not run over cartridges ({type(error).__name__}: {first})"
    return DataError(f"the model {path!r} of family {family} is not supported: {why}; {REMEDY}")


AttentionInterface.register(IMPLEMENTATION, flat_attention)
AttentionMaskInterface.register(IMPLEMENTATION, layer_mask)


def stacked(layers: Sequence[KeyFrequencies]) -> KeyFrequencies:
    """Return the frequencies of all layers from those of each."""
    return KeyFrequencies(
        torch.cat([one.values for one in layers]), torch.cat([one.partners for one in layers])
    )


def fitted(
    keys_before: Tensor, keys_after: Tensor, candidates: Sequence[Tensor]
) -> KeyFrequencies | None:
    """Return which `candidates`, frequencies [n] each, turn keys [T, H_kv, D] of tokens into
    those of the next position, `keys_after`, and which pairs; None where none does."""
    keys, moved = (x.transpose(0, 1)[None].double() for x in (keys_before, keys_after))
    for candidate in _candidates(candidates, keys.shape[-1]):
        if (candidate.turned(keys, 1) - moved).abs().amax() <= FIT * keys.abs().amax():
            return candidate
    return None


def _candidates(candidates: Sequence[Tensor], size: int) -> Iterator[KeyFrequencies]:
    yield half_split(torch.zeros(0), size)  # a layer without positions
    for frequencies in candidates:
        unrotated = size - 2 * len(frequencies)
        if unrotated >= 0:
            for begin, interleaved, sign in product({0, unrotated}, (False, True), (1, -1)):
                yield pair_frequencies(sign * frequencies, size, begin, interleaved)
