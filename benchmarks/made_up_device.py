"""A GPU that is made up on a CPU: computations are real, and every use of two devices at once is noted.

    with MadeUpGPU() as gpu:
        model.to("cuda:0")
        ...
    print(gpu.mixes, gpu.syncs)

Tensors stay in main memory. Each storage that was asked for on `cuda` is remembered, and so is what is computed from
it; `tensor.device` answers `cuda:0` for them. Where CUDA would raise, the place is noted, and the computation goes on,
so that one run finds all places. What would make the host wait for the GPU is counted. Kernels are those of the CPU:
this finds tensors on the wrong side, and no wrong kernels. Code in other threads is not seen.

Sources: the rules of mixing are those of ATen's TensorIterator (a tensor of no dimension may come from the CPU) and of
indexing (indices may come from the CPU); https://pytorch.org/docs/stable/notes/cuda.html.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda:0")
CPU = torch.device("cpu")
PACKAGE = Path(__file__).resolve().parents[1]
SWEEP = 100_000  # storages noted before those that are gone are dropped
GIB = 2**30

COPIES = {"aten.copy_.default", "aten._to_copy.default", "aten.set_.source_Tensor"}
INDEXED = {"aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default"}
# The size of the result, or the result itself, is needed by the host.
WAITS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.equal.default",
    "aten._unique2.default",
    "aten.unique_consecutive.default",
    "aten.repeat_interleave.Tensor",
}
TO_HOST = {"numpy", "__array__", "__dlpack__"}
MOVES = {"to", "cpu", "cuda"}
DEVICE_OF: dict[str, Callable[[bool], Any]] = {
    "device": lambda on_gpu: GPU if on_gpu else CPU,
    "is_cuda": bool,
    "is_cpu": lambda on_gpu: not on_gpu,
}


class MadeUpGPU(contextlib.ExitStack):
    """One made-up GPU, `cuda:0`, inside the block.

    Attributes:
        mixes: (what, file:line) -> how often two devices were mixed there.
        syncs: (what, file:line) -> how often the host waited for the GPU there.
        uploads: (what, file:line) -> how often something was copied to the GPU there.
        operations: number of operations that had a tensor on the GPU.
    """

    def __init__(self) -> None:
        """No tensor is on the GPU yet."""
        super().__init__()
        self.mixes: Counter[tuple[str, str]] = Counter()
        self.syncs: Counter[tuple[str, str]] = Counter()
        self.uploads: Counter[tuple[str, str]] = Counter()
        self.operations = 0
        # Weak references keep addresses from being used again.
        self._on_gpu: dict[int, StorageWeakRef] = {}
        self._anywhere: dict[int, StorageWeakRef] = {}  # made by C++ code, which gives its own device
        self._asked = 0  # calls of Python code in which an operation now runs

    def __enter__(self) -> "MadeUpGPU":
        """Put the GPU in."""
        super().__enter__()
        for patch in _patches():
            self.enter_context(patch)
        self.enter_context(_Operations(self))
        calls, run_backward = _Calls(self), torch.autograd.graph._engine_run_backward
        self._calls = calls

        def with_calls(*words: Any, **named: Any) -> Any:  # it may compute activations again, by Python code
            with calls, mock.patch.object(self, "_asked", 0):
                return run_backward(*words, **named)

        self.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", with_calls))
        self.enter_context(calls)
        return self

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """The block runs on the CPU alone, unseen; what it makes is on the CPU."""
        modes = [torch.overrides._pop_mode() for _ in range(len(torch.overrides._get_current_function_mode_stack()))]
        restored = [mode for mode in reversed(modes) if mode is not self._calls]
        for mode in restored:
            torch.overrides._push_mode(mode)
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                yield
        finally:
            for _ in restored:
                torch.overrides._pop_mode()
            for mode in reversed(modes):
                torch.overrides._push_mode(mode)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the GPU."""
        try:
            return tensor.untyped_storage()._cdata in self._on_gpu
        except NotImplementedError:  # a sparse tensor has no storage
            return False

    def place(self, tensor: Tensor) -> Tensor:
        """The tensor, whose storage is on the GPU from now on."""
        storage = tensor.untyped_storage()
        if len(self._on_gpu) > SWEEP:
            self._on_gpu = {key: ref for key, ref in self._on_gpu.items() if not ref.expired()}
            self._anywhere = {key: ref for key, ref in self._anywhere.items() if not ref.expired()}
        self._on_gpu[storage._cdata] = StorageWeakRef(storage)
        return tensor

    @contextlib.contextmanager
    def asked(self, words: Any) -> Iterator[None]:
        """Operations inside the block are those of a call of Python code, with these arguments.

        What a call with a tensor on the GPU makes of nothing, as `pad_sequence` does, is where C++ code puts it.
        """
        before = self._asked
        given = any(isinstance(leaf, Tensor) and self.holds(leaf) for leaf in tree_leaves(words))
        self._asked = 0 if given else before + 1
        try:
            yield
        finally:
            self._asked = before

    def made_inside(self, tensor: Tensor) -> None:
        """Note a tensor that C++ code made of nothing: its device is not known."""
        storage = tensor.untyped_storage()
        self._anywhere[storage._cdata] = StorageWeakRef(storage)

    def anywhere(self, tensor: Tensor) -> bool:
        """Whether C++ code made a tensor, on a device that is not known here."""
        return bool(self._anywhere) and tensor.untyped_storage()._cdata in self._anywhere

    def note(self, events: Counter[tuple[str, str]], what: str) -> None:
        """Count what happened at the current line of this project."""
        events[what, _where(sys._getframe(1))] += 1


class MadeUpGenerator(torch.Generator):
    """A generator of random numbers with a device of its own; its numbers are those of the CPU."""

    asked: torch.device

    def __new__(cls, device: Any = "cpu") -> "MadeUpGenerator":
        """A generator."""
        made = super().__new__(cls)
        made.asked = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it was asked for."""
        return GPU if self.asked.type == "cuda" else CPU


class _Calls(TorchFunctionMode):
    """What Python code asks for: devices of new tensors, moves, and the device of a tensor."""

    def __init__(self, gpu: MadeUpGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        if name == "__get__" and (answer := DEVICE_OF.get(getattr(owner, "__name__", ""))):
            return answer(self.gpu.holds(args[0]))
        with self.gpu.asked(args):
            return self._call(name, func, args, kwargs)

    def _call(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name in MOVES and args and isinstance(args[0], Tensor):
            return self._move(name, func, args, kwargs)
        if name in TO_HOST and self.gpu.holds(args[0]):
            self.gpu.note(self.gpu.mixes, f"{name}() of a tensor on the GPU")
        if name == "tolist" and self.gpu.holds(args[0]):
            self.gpu.note(self.gpu.syncs, "tolist")
        self._check_generator(args, kwargs)
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        return self._make(name, func, args, kwargs)

    def _move(self, name: str, func: Any, args: Any, kwargs: Any) -> Tensor:
        """`tensor.to(...)`: a copy where the device changes."""
        tensor, *rest = args
        before = self.gpu.holds(tensor)
        after = self._target(name, rest, kwargs, before)
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "other")}
        if name == "to":
            words = [word for word in rest if not isinstance(word, Tensor)]
            _, dtype, _, layout = torch._C._nn._parse_to(*words, **kwargs)
            dtype = dtype or next((other.dtype for other in rest if isinstance(other, Tensor)), tensor.dtype)
            moved = tensor.to(dtype=dtype, copy=after != before, memory_format=layout or torch.preserve_format)
        else:
            moved = tensor.clone() if after != before else tensor
        if after == before:
            return moved
        self.gpu.note(self.gpu.uploads if after else self.gpu.syncs, f"{name}() {'GPU' if after else 'CPU'}")
        storage = moved.untyped_storage()
        self.gpu._on_gpu.pop(storage._cdata, None)  # the operation's result was noted as that of its input
        return self.gpu.place(moved) if after else moved

    def _target(self, name: str, rest: list[Any], kwargs: Any, before: bool) -> bool:
        """Whether the result of a move is on the GPU."""
        if name != "to":
            return name == "cuda"
        for word in [*rest, kwargs.get("device"), kwargs.get("other")]:
            if isinstance(word, Tensor):
                return self.gpu.holds(word)
            if isinstance(word, torch.device | str | int) and not isinstance(word, bool):
                return _is_gpu(word)
        return before

    def _make(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """A new tensor on the device that is asked for."""
        wanted = _is_gpu(kwargs["device"])
        sources = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        result = func(*args, **(kwargs | {"device": CPU} if wanted else kwargs))
        if not isinstance(result, Tensor):
            return result
        if name == "as_tensor" and sources and self.gpu.holds(sources[0]) == wanted:
            return result
        if name in ("as_tensor", "asarray") and sources:
            result = result.clone()
        self.gpu._on_gpu.pop(result.untyped_storage()._cdata, None)
        if not wanted:
            return result
        if name in ("tensor", "as_tensor", "asarray", "new_tensor") and result.numel():
            self.gpu.note(self.gpu.uploads, name)
        return self.gpu.place(result)

    def _check_generator(self, args: Any, kwargs: Any) -> None:
        """Random numbers are drawn where their generator is."""
        generator = kwargs.get("generator")
        if generator is None:
            return
        wanted = kwargs.get("device")
        tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
        on_gpu = _is_gpu(wanted) if wanted is not None else any(self.gpu.holds(t) for t in tensors)
        if (generator.device.type == "cuda") != on_gpu:
            self.gpu.note(self.gpu.mixes, f"a generator on {generator.device} for a tensor elsewhere")


class _Operations(TorchDispatchMode):
    """What is computed, also in backward passes: mixes of devices, waits, and where results are."""

    def __init__(self, gpu: MadeUpGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = [self.gpu.holds(tensor) for tensor in inputs]
        result = func(*args, **kwargs)
        if not any(on_gpu):
            if not inputs or any(self.gpu.anywhere(tensor) for tensor in inputs):
                self._made_inside(result, bool(inputs))
            return result
        self.gpu.operations += 1
        name = str(func)
        self._check(name, args, inputs, on_gpu)
        if name == "aten.copy_.default":  # the target stays where it is
            self._copied(inputs, on_gpu)
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self.gpu.place(leaf)
        return result

    def _made_inside(self, result: Any, of_others: bool) -> None:
        """What Python code makes of nothing is on the CPU unless it asked; what C++ code makes of nothing, anywhere."""
        if of_others or not self.gpu._asked:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                    self.gpu.made_inside(leaf)

    def _check(self, name: str, args: Any, inputs: list[Tensor], on_gpu: list[bool]) -> None:
        if name in WAITS or (name in INDEXED and _by_mask(args)):
            self.gpu.note(self.gpu.syncs, name)
        elsewhere = [
            tensor
            for tensor, on in zip(inputs, on_gpu, strict=True)
            if not on and tensor.dim() and not self.gpu.anywhere(tensor)
        ]
        if not elsewhere or name in COPIES:
            return
        if name in INDEXED and on_gpu[0]:
            indices = {id(index) for index in args[1] if index is not None}
            if all(id(tensor) in indices for tensor in elsewhere):
                self.gpu.note(self.gpu.uploads, f"{name}, indices on the CPU")
                return
        self.gpu.note(self.gpu.mixes, name)

    def _copied(self, inputs: list[Tensor], on_gpu: list[bool]) -> None:
        target, source = on_gpu
        if source and self.gpu.anywhere(inputs[0]):
            self.gpu.place(inputs[0])
        elif target != source:
            self.gpu.note(self.gpu.uploads if target else self.gpu.syncs, "copy_")


def _by_mask(args: Any) -> bool:
    """Whether an index is a mask, whose true cells are counted first."""
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _is_gpu(device: Any) -> bool:
    return isinstance(device, int) or torch.device(device).type == "cuda"


def _where(frame: FrameType | None) -> str:
    """file:line of the innermost frame of this project, with that of a library that it called, if any."""
    library, own = "", Path(__file__).resolve()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        installed = "site-packages" in path.parts
        if path.is_relative_to(PACKAGE) and path != own and not installed:
            return f"{path.relative_to(PACKAGE)}:{frame.f_lineno}{library}"
        if installed and "torch" not in path.parts and not library:
            library = f" (in {path.name}:{frame.f_lineno})"
        frame = frame.f_back
    return f"outside this project{library}"


# ---- torch.cuda, as far as it is asked ----


def _patches() -> Iterator[contextlib.AbstractContextManager[Any]]:
    card = SimpleNamespace(name="made-up GPU", total_memory=80 * GIB, major=9, minor=0, multi_processor_count=132)
    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        **{"is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True},
        **{"get_device_name": card.name, "get_device_properties": card, "get_device_capability": (9, 0)},
        **{"max_memory_allocated": 0, "max_memory_reserved": 0, "memory_allocated": 0, "memory_reserved": 0},
        **{"mem_get_info": (80 * GIB, 80 * GIB), "is_bf16_supported": True, "get_rng_state": state},
        **{"get_rng_state_all": [state]},
    }
    silent = "set_device synchronize empty_cache reset_peak_memory_stats manual_seed manual_seed_all set_rng_state"
    for name, value in (answers | dict.fromkeys([*silent.split(), "set_rng_state_all"])).items():
        yield mock.patch.object(torch.cuda, name, _constant(value))
    yield mock.patch.object(torch.cuda.random, "get_rng_state_all", _constant([state]))
    yield mock.patch.object(torch.cuda.random, "set_rng_state_all", _constant(None))
    yield mock.patch.object(torch.cuda, "device", _constant(contextlib.nullcontext()))
    yield mock.patch.object(torch, "Generator", MadeUpGenerator)
    # Activations are saved inside an operation, where the true device is seen, and recomputed where it is not.
    compared = {"default": lambda tensor: {"shape": tensor.shape, "dtype": tensor.dtype}}
    yield mock.patch.dict(torch.utils.checkpoint._allowed_determinism_checks_to_fns, compared)
    autocast = torch.amp.autocast_mode.autocast
    yield mock.patch.object(autocast, "__init__", _on_cpu(autocast.__init__, 1))
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        yield mock.patch.object(torch, name, _on_cpu(getattr(torch, name), 0))


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _on_cpu(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    """The same function, which is told the CPU's name where it is given a GPU's."""

    def called(*args: Any, **kwargs: Any) -> Any:
        words = list(args)
        if len(words) > position and words[position] == "cuda":
            words[position] = "cpu"
        return function(*words, **(kwargs | ({"device_type": "cpu"} if kwargs.get("device_type") == "cuda" else {})))

    return called
