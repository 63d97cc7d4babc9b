"""A dense FFN of the host in any model family: its parts, its weights, and how it is widened.

Families differ in attribute names and in the layout of the weights, not in the function. With A the
FFN's input and `*` the elementwise product,

    gated      FFN(A) = Wdown (act(Wgate A) * (Wup A))
               gate/up/down, fused gate_up/down, w1/w3/w2, wi_0/wi_1/wo
    two-layer  FFN(A) = Wdown act(Wup A + b) + c
               c_fc/c_proj, fc1/fc2, dense_h_to_4h/dense_4h_to_h, ...

The parts may be children of a module that is an FFN and nothing else, or attributes of the decoder
layer beside attention and norms (a flat FFN, as in OPT). They are found by name and shape; one
random token then checks the formula. A new family is one row of `KNOWN_PARTS`. Axes as in
`layer.py`.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import align_module_device
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from .modules import evaluating, unwrap


@dataclass(frozen=True)
class FFNParts:
    """The attribute names of the parts of an FFN.

    Args:
        down: the down projection.
        up: the up projection.
        gate: the gate projection of a gated FFN.
        gate_up: one projection in place of both: its first F rows are the gate's, the others the
        up's.
        activation: an attribute, or one of transformers' activation names; `None`: found by name.
    """

    down: str
    up: str | None = None
    gate: str | None = None
    gate_up: str | None = None
    activation: str | None = None

    @property
    def projections(self) -> tuple[str, ...]:
        """Return the names of the projections that there are, the down projection last."""
        names = (self.gate, self.up, self.gate_up, self.down)
        return tuple(name for name in names if name is not None)

    @property
    def inlet(self) -> str:
        """Return the projection that receives the FFN's input: the up projection, fused or not."""
        name = self.up or self.gate_up
        assert name is not None
        return name


# A row's name is a family that has these parts; many others share them.
KNOWN_PARTS: dict[str, FFNParts] = {
    "llama": FFNParts(gate="gate_proj", up="up_proj", down="down_proj"),
    "phi3": FFNParts(gate_up="gate_up_proj", down="down_proj"),
    "lfm2": FFNParts(gate="w1", up="w3", down="w2", activation="silu"),
    "t5 v1.1": FFNParts(gate="wi_0", up="wi_1", down="wo"),
    "nemotron": FFNParts(up="up_proj", down="down_proj"),
    "gpt2": FFNParts(up="c_fc", down="c_proj"),
    "gpt_neox": FFNParts(up="dense_h_to_4h", down="dense_4h_to_h"),
    "opt": FFNParts(up="fc1", down="fc2"),
    "gptj": FFNParts(up="fc_in", down="fc_out"),
    "t5": FFNParts(up="wi", down="wo"),
}
ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation", "activation_func", "gelu_impl")
WIDENABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SumActivity = Callable[[Tensor | None], Tensor]
"""Returns the sum of |M| over the tokens of a forward, `[F]` float32.

The argument, `BoolTensor [tokens]` or `None`, selects tokens."""


class HostFFN:
    """One dense FFN of the host: its weights, and the operations that change its width.

    Args:
        owner: the module that has the parts as attributes.
        parts: their names.
        name: its name, for messages.

    Raises:
        ValueError: where the parts make no FFN.
    """

    def __init__(self, owner: nn.Module, parts: FFNParts, name: str = "") -> None:
        self.owner = owner
        self.parts = parts
        self.name = name or type(owner).__name__
        self._check_parts()
        self.hidden_size, rows = _in_out_features(self.projection(parts.inlet))
        self._check_shapes(rows)
        # The owner of a flat FFN is a decoder layer, with parameters outside the FFN's parts.
        part_names = {*parts.projections, *ACTIVATION_NAMES, parts.activation}
        owners = {key.split(".")[0] for key, _ in owner.named_parameters()}
        self.is_flat = not owners <= part_names
        self.act = _find_activation(owner, parts)

    def _check_parts(self) -> None:
        missing = []
        for part in self.parts.projections:
            if not _is_projection(getattr(self.owner, part, None)):
                missing.append(part)
        if missing:
            kind = type(self.owner).__name__
            problem = f"{self.name} ({kind}) has no projection named {', '.join(missing)}"
            children = describe_children(self.owner)
            raise ValueError(f"{problem}: it has {children}. Name its parts in ffn_parts.")

    def _check_shapes(self, rows: int) -> None:
        names = self.parts.projections
        shapes = [_in_out_features(self.projection(part)) for part in names]
        width = rows // 2 if self.parts.gate_up else rows
        expected = [(self.hidden_size, rows)] * (len(shapes) - 1) + [(width, self.hidden_size)]
        if shapes != expected:
            problem = f"the projections {', '.join(names)} map {shapes} (in, out), which is no FFN"
            remedy = f"expected {expected}. Name its parts in ffn_parts."
            raise ValueError(f"{self.name}: {problem}: {remedy}")

    @property
    def width(self) -> int:
        """Return the current F, merged memories included."""
        return _in_out_features(self.down)[0]

    @property
    def slots(self) -> int:
        """Return how many neurons there are to clone."""
        return self.width

    def merged_width(self, r: int) -> int:
        """Return by how many neurons merging a memory of R slots widens the FFN."""
        return r

    def slots_at(self, width: int) -> int:
        """Return how many neurons there are when `width` has become this."""
        return width

    @property
    def gated(self) -> bool:
        """Return whether the FFN has gate rows."""
        return self.parts.gate is not None or self.parts.gate_up is not None

    def takes_input_alone(self) -> bool:
        """Return whether the owner's forward needs A alone; Bloom's adds the residual stream."""
        return self.is_flat or _count_inputs(self.owner) == 1

    def projection(self, part: str) -> nn.Module:
        """Return the host's own projection of that name, without what wraps it."""
        return _unwrap_all(getattr(self.owner, part))

    @property
    def inlet(self) -> nn.Module:
        """Return the module that receives A."""
        return getattr(self.owner, self.parts.inlet)

    @property
    def down(self) -> nn.Module:
        """Return the module that receives M, the activation."""
        return self.projection(self.parts.down)

    def list_weights(self) -> list[Tensor]:
        """Return the weights of the host's own projections."""
        return [self.projection(part).weight for part in self.parts.projections]

    def _row_blocks(self) -> list[tuple[nn.Module, int]]:
        """Return the projections of gate rows (if gated) and up rows, each with its first row."""
        parts = self.parts
        if parts.gate_up:
            fused = self.projection(parts.gate_up)
            return [(fused, 0), (fused, self.width)]
        names = [parts.inlet] if parts.gate is None else [parts.gate, parts.inlet]
        return [(self.projection(name), 0) for name in names]

    def gate_and_up_rows(self, slots: Tensor) -> tuple[Tensor | None, Tensor]:
        """Copy the gate rows (`None` for a two-layer FFN) and up rows of slots.

        Args:
            slots: `LongTensor [R]`.

        Returns:
            `[R, D]` float32 each.
        """
        rows = []
        for module, first in self._row_blocks():
            weight = _rows_of(module)
            rows.append(weight[(slots + first).to(weight.device)].float())
        return rows[0] if self.gated else None, rows[-1]

    def mean_down_norm(self) -> float:
        """Return the mean norm of the down columns, the paper's tau times R; NaN on meta."""
        rows = _rows_of(self.down)  # [D, F]
        return float("nan") if rows.is_meta else rows.float().norm(dim=0).mean().item()

    @contextmanager
    def observing(self, callback: Callable[[SumActivity, Tensor], None]) -> Iterator[None]:
        """Call a function in each forward within the context.

        Args:
            callback: takes the activity and the output FFN(A) `[..., D]`.
        """

        def observe(module: nn.Module, args: tuple, output: Tensor) -> None:
            activation = args[0].flatten(0, -2)

            def sum_activity(is_token: Tensor | None) -> Tensor:
                selected = activation if is_token is None else activation[is_token]
                return selected.abs().sum(dim=0, dtype=torch.float32)

            callback(sum_activity, output)

        with self.down.register_forward_hook(observe):
            yield

    def run_scaled(
        self, scale: Callable[[Tensor], Tensor], ffn_input: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the owner with `scale(M)` in place of M before the down projection.

        Args:
            scale: takes and returns M `[B, T, F]`.
            ffn_input, args, kwargs: of the owner's forward.
        """
        if torch.compiler.is_compiling():
            # A graph has no hooks that come and go: the parts, without dropout between them.
            return getattr(self.owner, self.parts.down)(scale(self._activate(ffn_input)))
        thread = threading.get_ident()

        def apply(module: nn.Module, inputs: tuple) -> tuple | None:
            if threading.get_ident() != thread:
                return None
            return (scale(inputs[0]), *inputs[1:])

        # With another adapter on the projection, which also takes scale(M).
        down = unwrap(getattr(self.owner, self.parts.down))
        with down.register_forward_pre_hook(apply):
            return self.owner(ffn_input, *args, **kwargs)

    def find_other_adapter(self) -> str | None:
        """Return a message if a projection has an adapter that is no memory, or `None`."""
        for part in self.parts.projections:
            module = unwrap(getattr(self.owner, part))
            if module is not _without_adapters(module) and not _wraps_only_memory(module):
                return f"{part} carries another adapter: merge or unload that one first"
        return None

    def find_obstacle(self) -> str | None:
        """Return the reason why the FFN cannot be widened, or `None`."""
        obstacle = self.find_other_adapter()
        for part in self.parts.projections:
            if obstacle is None:
                module = self.projection(part)
                # Quantisers subclass the layer, the parameter or the tensor.
                is_known = isinstance(module, nn.Linear | Conv1D)
                obstacle = find_weight_obstacle(part, module, module.weight, is_known)
        return obstacle

    def fit_neurons(
        self, gate: Tensor | None, up: Tensor, down: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return R neurons as `widen` appends them, in the host's dtype."""
        dtype = self.down.weight.dtype
        if gate is not None:
            gate = gate.to(dtype)
        return gate, up.to(dtype), down.to(dtype)

    @torch.no_grad()
    def widen(self, gate: Tensor | None, up: Tensor, down: Tensor) -> None:
        """Append R neurons. Parameters stay the same objects, with new data.

        `narrow` restores it bit for bit.

        Args:
            gate: `[R, D]`, or `None` for a two-layer FFN.
            up: `[R, D]`.
            down: `[D, R]`, with its scale.
        """
        width = self.width
        rows = [gate, up] if self.gated else [up]
        blocks = self._row_blocks()
        with _restored_on_failure([self.down, *[module for module, _ in blocks]]):
            # Last block first: in a fused projection, it shifts none of the others.
            for (module, first), new in reversed(list(zip(blocks, rows, strict=True))):
                _splice(module, 0, first + width, first + width, new)
            _splice(self.down, 1, width, width, down)
        self._refresh_owner()

    @torch.no_grad()
    def narrow(self, width: int) -> None:
        """Remove the neurons from `width` on. The others keep their bits."""
        stop = self.width
        blocks = self._row_blocks()
        with _restored_on_failure([self.down, *[module for module, _ in blocks]]):
            for module, first in reversed(blocks):
                _splice(module, 0, first + width, first + stop)
            _splice(self.down, 1, width, stop)
        self._refresh_owner()

    @torch.no_grad()
    def copy_columns(self, width: int) -> Tensor:
        """Return a copy of the down columns of the first neurons, `[D, width]`."""
        return _rows_of(self.down)[:, :width].clone()

    @torch.no_grad()
    def replace_columns(self, columns: Tensor) -> None:
        """Replace the down columns of the first neurons by `[D, width]`.

        The parameter stays the same object, with new data.
        """
        _splice(self.down, 1, 0, columns.shape[1], columns)

    def as_stored(self, columns: Tensor) -> Tensor:
        """Return down columns `[D, width]` in the layout of the down projection's weight."""
        return columns.T if isinstance(self.down, Conv1D) else columns

    def pad(self, width: int) -> None:
        """Append neurons of zeros, which add nothing to the output, up to a width."""
        if width > self.width:
            rows = self.down.weight.new_zeros(width - self.width, self.hidden_size)
            self.widen(rows if self.gated else None, rows, rows.T)

    def _refresh_owner(self) -> None:
        if isinstance(getattr(self.owner, "intermediate_size", None), int):
            self.owner.intermediate_size = self.width

    def verify(self) -> None:
        """Compare the module's forward with the formula of its parts, on one random token.

        Raises:
            ValueError: where they differ.
        """
        # Without weights there is nothing to compare.
        if any(parameter.is_meta for parameter in self.owner.parameters()):
            return
        if self.is_flat:
            self._verify_between()
            return
        weight = next(self.owner.parameters())
        token = self._draw_token().to(weight.device, _find_dtype(self.owner))
        # Some FFNs also take the residual stream and add it (Bloom): zeros there.
        residuals = [torch.zeros_like(token)] * (_count_inputs(self.owner) - 1)
        try:
            with torch.no_grad(), evaluating(self.owner):
                expected = self.owner(token, *residuals)
                output = self._forward(token)
        except torch.OutOfMemoryError:
            raise
        # An activation of two arguments, a forward that needs more than its input, ...
        except Exception as cause:
            raise self._make_mismatch() from cause
        if isinstance(expected, Tensor):
            error = (expected - output).float().norm()
            if not error > 0.02 * expected.float().norm():
                return
        raise self._make_mismatch()

    def _draw_token(self) -> Tensor:
        """Return A of one random token, always the same, on the CPU whatever torch's default is."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(1, 1, self.hidden_size, generator=generator, device="cpu")

    def _make_mismatch(self) -> ValueError:
        formula = "down(act(gate) * up)" if self.gated else "down(act(up))"
        kind = type(self.owner).__name__
        problem = f"{self.name} ({kind}) computes something other than {formula} of its parts"
        names = ", ".join(self.parts.projections)
        remedy = "Name its parts in ffn_parts, or exclude it with exclude_modules."
        return ValueError(f"{problem} {names}: a memory could not be merged. {remedy}")

    def _verify_between(self) -> None:
        """Compare what the down projection of a flat FFN receives with the formula.

        An FFN with a norm between its projections has a parameter beside its parts too.
        """
        seen: dict[str, Tensor] = {}

        def keep(name: str, module: nn.Module, args: tuple) -> None:
            seen[name] = args[0]

        inlet = self.projection(self.parts.inlet)
        token = self._draw_token().to(inlet.weight.device, _find_dtype(inlet))
        with ExitStack() as hooks:
            for part in (self.parts.inlet, self.parts.down):
                # With its adapters: a memory's gains change what the projection itself receives.
                module = unwrap(getattr(self.owner, part))
                hook = module.register_forward_pre_hook(partial(keep, part))
                hooks.enter_context(hook)
            hooks.enter_context(torch.no_grad())
            hooks.enter_context(evaluating(self.owner))
            try:
                unwrap(self.owner)(token)
            # The forward of a whole decoder layer may need anything.
            except Exception:
                return
        if seen.keys() != {self.parts.inlet, self.parts.down}:
            return
        try:
            with torch.no_grad(), evaluating(self.owner):
                activation = self._activate(seen[self.parts.inlet])
        except torch.OutOfMemoryError:
            raise
        except Exception as cause:
            raise self._make_mismatch() from cause
        received = seen[self.parts.down]
        error = (received - activation.reshape(received.shape)).float().norm()
        if error > 0.02 * received.float().norm():
            raise self._make_mismatch()

    def _forward(self, hidden_states: Tensor) -> Tensor:
        activation = self._activate(hidden_states)
        weight = self.down.weight
        # In a half-precision model, T5's down projection stays in float32.
        if weight.is_floating_point() and activation.is_floating_point():
            activation = activation.to(weight.dtype)
        return getattr(self.owner, self.parts.down)(activation)

    def _activate(self, hidden_states: Tensor) -> Tensor:
        """Return M, what the down projection receives for A."""
        parts = self.parts
        if parts.gate_up:
            gate, up = getattr(self.owner, parts.gate_up)(hidden_states).chunk(2, dim=-1)
            return self.act(gate) * up
        up = getattr(self.owner, parts.inlet)(hidden_states)
        if parts.gate is None:
            return self.act(up)
        gate = getattr(self.owner, parts.gate)(hidden_states)
        return self.act(gate) * up


def _count_inputs(module: nn.Module) -> int:
    """Return how many positional arguments the module's forward must be given."""
    count = 0
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.default is parameter.empty and parameter.kind.name.startswith("POSITIONAL"):
            count += 1
    return count


def list_known_parts() -> list[FFNParts]:
    """Return `KNOWN_PARTS`, most projections first.

    An FFN with a gate also has the up and down of a two-layer FFN.
    """
    return sorted(KNOWN_PARTS.values(), key=lambda known: -len(known.projections))


def find_dense(
    owner: nn.Module, name: str, candidates: Sequence[FFNParts], given: bool = False
) -> HostFFN | None:
    """Return the FFN whose parts are attributes of a module, or `None`.

    Args:
        owner: the module.
        name: its name.
        candidates: the names of parts to look for.
        given: whether a user has given the candidates.

    Raises:
        ValueError: where given parts make no FFN.
    """
    for candidate in candidates:
        if all(_is_projection(getattr(owner, part, None)) for part in candidate.projections):
            try:
                return HostFFN(owner, candidate, name)
            except ValueError:
                if given:
                    raise
    return None


def _without_adapters(module: nn.Module) -> nn.Module:
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def _unwrap_all(module: nn.Module) -> nn.Module:
    """Return a module without the adapters and the wrappers of torch around it, in any order."""
    inner = unwrap(_without_adapters(module))
    while inner is not module:
        module = inner
        inner = unwrap(_without_adapters(module))
    return module


def _is_projection(module: nn.Module | None) -> bool:
    if isinstance(module, nn.Module):
        module = _unwrap_all(module)
    if isinstance(module, Conv1D):
        return True
    names = ("in_features", "out_features", "weight")
    return isinstance(module, nn.Module) and all(hasattr(module, name) for name in names)


def _wraps_only_memory(module: nn.Module) -> bool:
    """Return whether the only adapter on a projection is the memory of a flat FFN."""
    if not isinstance(module, BaseTunerLayer):
        return False
    is_memory = any(name.startswith("locas_") for name in module.adapter_layer_names)
    return is_memory and module.base_layer is module.get_base_layer()


def _in_out_features(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, Conv1D):
        return tuple(module.weight.shape)
    return module.in_features, module.out_features


def _find_activation(owner: nn.Module, parts: FFNParts) -> Callable[[Tensor], Tensor]:
    names = (parts.activation,) if parts.activation else ACTIVATION_NAMES
    for name in names:
        activation = getattr(owner, name, None)
        if callable(activation):
            return activation
    if parts.activation in ACT2FN:
        return ACT2FN[parts.activation]
    problem = f"{type(owner).__name__} has no activation under {', '.join(names)}"
    remedy = "name it in ffn_parts['activation'], as an attribute or as one of transformers'"
    raise ValueError(f"{problem}: {remedy} activations.")


def describe_children(module: nn.Module) -> str:
    """Return the names and classes of a module's children, for a message."""
    children = [f"{name} ({type(child).__name__})" for name, child in module.named_children()]
    return ", ".join(children) or f"no children ({type(module).__name__})"


def find_weight_obstacle(
    part: str, module: nn.Module, weight: Tensor, known: bool = True
) -> str | None:
    """Return the reason why rows cannot be appended to a weight, or `None`.

    Args:
        part: the weight's name, for the message.
        module: the module that has it.
        weight: the weight.
        known: whether the module computes with its weight as it is.
    """
    if weight.is_meta or getattr(getattr(module, "_hf_hook", None), "offload", False):
        return f"{part} is offloaded or on the meta device: load the base onto one device first"
    if hasattr(weight, "full_tensor"):
        return f"{part} is sharded across processes: gather the base first"
    is_plain = known and type(weight) is nn.Parameter and type(weight.data) is Tensor
    # Float8 weights come with scales.
    if not is_plain or weight.dtype not in WIDENABLE_DTYPES:
        kind = f"{type(module).__name__} of {weight.dtype}"
        return f"{part} is a {kind}, quantised or custom: load the base in full precision first"
    return None


def _rows_of(module: nn.Module) -> Tensor:
    """Return the weight `[out, in]` of a projection, dequantised and onloaded."""
    with torch.no_grad(), align_module_device(module):
        parameter = module.weight
        weight = dequantize_module_weight(module).detach()
        if module.weight is not parameter:
            # PEFT puts an 8-bit parameter without its scales in its place.
            module.weight = parameter
        if isinstance(module, Conv1D):
            return weight.T
        shape = (module.out_features, module.in_features)
        if weight.dtype in WIDENABLE_DTYPES and tuple(weight.shape) == shape:
            return weight
        return _measure_rows(module)


def _measure_rows(module: nn.Module) -> Tensor:
    """Return the weight of a projection that PEFT cannot dequantise: its outputs of unit vectors.

    A projection that gives none in any dtype is a `ValueError`.
    """
    device = module.weight.device
    if device.type == "meta":
        return torch.empty(module.out_features, module.in_features, device=device)
    for dtype in (_find_dtype(module), torch.bfloat16):
        units = torch.eye(module.in_features, dtype=dtype, device=device)
        try:
            outputs = module(units)
            return (outputs - module(torch.zeros_like(units[:1]))).T
        except torch.OutOfMemoryError:
            raise
        # Kernels of quantised weights raise errors of many types.
        except Exception as error:
            cause = error
    problem = f"the weight of a {type(module).__name__} cannot be read"
    remedy = "load the base in full precision, or quantised by bitsandbytes"
    raise ValueError(f"{problem}: {remedy}.") from cause


def _find_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's inputs: that of its first weight in one of full precision."""
    for parameter in module.parameters():
        if parameter.dtype in WIDENABLE_DTYPES:
            return parameter.dtype
    return torch.float32


def forbid_packing(model: nn.Module) -> None:
    """Keep the layout of bitsandbytes' 4-bit weights on a CPU.

    In a forward without gradients, bitsandbytes packs them for the CPU's bfloat16 instructions.
    Packed weights cannot be dequantised, and give no gradient to the memories below.

    Raises:
        ValueError: where they are packed already.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        state = getattr(module.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            problem = f"{name} was packed by bitsandbytes in a forward on the CPU"
            remedy = "load the base again, and add the memory before its first forward."
            raise ValueError(f"{problem}, which cannot be undone exactly: {remedy}")
        module.support_avx512bf16_for_cpu = False


def _splice(module: nn.Module, dim: int, start: int, stop: int, new: Tensor | None = None) -> None:
    """Replace the entries [start, stop) of a weight `[out, in]` along a dimension.

    Along dimension 0 the bias follows, with zeros for new entries.
    """
    is_transposed = isinstance(module, Conv1D)
    weight = module.weight.data.T if is_transposed else module.weight.data
    if new is None:
        new = weight.narrow(dim, 0, 0)
    before = weight.narrow(dim, 0, start)
    after = weight.narrow(dim, stop, weight.shape[dim] - stop)
    weight = torch.cat([before, new.to(weight.device, weight.dtype), after], dim=dim)
    module.weight.data = weight.T.contiguous() if is_transposed else weight.contiguous()
    if dim == 0 and module.bias is not None:
        bias = module.bias.data
        module.bias.data = torch.cat([bias[:start], bias.new_zeros(len(new)), bias[stop:]])
    _refresh_features(module)


def _refresh_features(module: nn.Module) -> None:
    """Let a projection's numbers of features be those of its weight."""
    if isinstance(module, Conv1D):
        module.nx, module.nf = module.weight.shape
    else:
        module.out_features, module.in_features = module.weight.shape


@contextmanager
def _restored_on_failure(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Give projections their weights and biases back if the context fails, as without memory."""
    before = []
    for module in modules:
        bias = None if module.bias is None else module.bias.data
        before.append((module, module.weight.data, bias))
    try:
        yield
    except Exception:
        for module, weight, bias in before:
            module.weight.data = weight
            if bias is not None:
                module.bias.data = bias
            _refresh_features(module)
        raise
