"""What a direct launch of a kernel with TMA descriptors hands to the C entry, against Triton's own launch, no GPU."""

from types import SimpleNamespace

import pytest
import torch
from generators import deep_gemm

triton = pytest.importorskip("triton")
from triton.backends.nvidia import driver  # noqa: E402
from triton.experimental.gluon.language import NVMMASharedLayout  # noqa: E402

_tma = pytest.importorskip(f"{deep_gemm.__name__}.gemm._tma")
VERSION = ".".join(triton.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION not in ("3.6", "3.8", "3.9"), reason="another launcher")

LAYOUT = NVMMASharedLayout.get_default_for([64, 64], triton.language.bfloat16)
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
GRID, ARGS = (3, 2, 1), (7, 100, 9)
SIGNATURE = {"a": "tensordesc<bf16[64, 64]>", "sf": "*fp32", "b": "tensordesc<bf16[64, 64]>", "m": "i32", "n": "i32",
             "BLOCK": "constexpr"}  # fmt: skip


class Kernel:
    """Launches as Triton would, into a list instead of a GPU."""

    def __init__(self):
        self.launched, self.by_triton, self.encoded = [], 0, 0
        self.compiled = SimpleNamespace(function=0xF00, packed_metadata=(4, 1, 1000), metadata=SimpleNamespace())
        self.compiled.metadata.tensordesc_meta = [META, META]
        launch = driver.wrap_handle_tensordesc(lambda *args: self.launched.append(args), SIGNATURE, [META, META])
        self.compiled.run = SimpleNamespace(launch=launch, arg_annotations="annotations", kernel_signature="signature")

    def encode(self, *args):
        self.encoded += 1
        return ("map", *args)

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.by_triton += 1
            self.options = options
            stream = _tma._current_stream(0)
            base = (*grid, stream, 0xF00, False, False)
            if VERSION == "3.6":
                pointers = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
                self.compiled.run.launch(*base, None, None, (4, 1, 1000), None, None, None, *pointers)
            else:
                run, pointers = self.compiled.run, [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
                rest = ((4, 1, 1000), None, None, None, None, None, run.arg_annotations, run.kernel_signature)
                self.compiled.run.launch(*base, *rest, tuple(pointers))
            return self.compiled

        return launch


@pytest.fixture
def kernel(monkeypatch):
    kernel = Kernel()
    name = "fill_tma_descriptor" if VERSION == "3.6" else "fill_tma_descriptor_tiled"
    utils = SimpleNamespace(**{name: kernel.encode})
    fake = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setattr(triton.runtime, "driver", fake)
    kernel.stream, kernel.device = 5, 0
    monkeypatch.setattr(_tma, "_prepare", lambda: None)
    monkeypatch.setattr(_tma, "_current_stream", lambda device: kernel.stream)
    monkeypatch.setattr(_tma, "_current_device", lambda: kernel.device)
    monkeypatch.setattr(torch.cuda, "device", lambda device: __import__("contextlib").nullcontext())
    return kernel


def problem():
    return torch.zeros(128, 64, dtype=torch.bfloat16), torch.zeros(4), torch.zeros(64, 128, dtype=torch.bfloat16)


def bound(kernel, **options):
    a = _tma.Tma(0, (128, 64), (64, 1), (64, 64), LAYOUT)
    b = _tma.Tma(2, (64, 128), (128, 1), (64, 64), LAYOUT)
    return _tma.TmaLaunch(kernel, GRID, (a, 1, b), ARGS, 4, 0, **options)


def call(launch, tensors):
    launch(tensors, tuple(t.data_ptr() for t in tensors))


def test_same_arguments_as_triton(kernel):
    launch, tensors = bound(kernel), problem()
    for _ in range(3):
        call(launch, tensors)
    assert kernel.by_triton == 1 and len(kernel.launched) == 3
    by_triton, *direct = [tuple(tuple(a) if isinstance(a, list) else a for a in args) for args in kernel.launched]
    assert direct == [by_triton, by_triton]
    assert kernel.encoded == 4, "by Triton, then once for each operand"
    assert kernel.options == {"num_warps": 4, "enable_fp_fusion": True}


def test_pointers_and_streams(kernel):
    launch, others = bound(kernel), [problem() for _ in range(3)]
    call(launch, others[0])
    for stream, tensors in ((5, others[0]), (5, others[1]), (6, others[1]), (5, others[2]), (7, others[0])):
        kernel.stream = stream
        call(launch, tensors)
        args = kernel.launched[-1]
        assert args[3] == stream
        flat = args if VERSION == "3.6" else args[-1]
        maps = [a[1] for a in flat if isinstance(a, tuple) and a[:1] == ("map",)]
        assert maps == [tensors[0].data_ptr(), tensors[2].data_ptr()] and tensors[1].data_ptr() in flat
    assert kernel.by_triton == 1
    encoded = kernel.encoded
    call(launch, others[1])
    assert kernel.encoded == encoded, "maps of addresses seen before are kept"


def test_maps_are_bounded(kernel, monkeypatch):
    monkeypatch.setattr(_tma.TmaLaunch, "_MAX_MAPS", 5)
    launch, kept = bound(kernel), [problem() for _ in range(9)]
    for tensors in kept:
        call(launch, tensors)
        assert len(launch.maps) <= 5


def test_address_that_tma_cannot_take(kernel):
    other = []
    launch = bound(kernel, unaligned=lambda: lambda *call: other.append(call))
    a, sf, b = problem()
    shifted = torch.zeros(128 * 64 + 1, dtype=torch.bfloat16)[1:].view(128, 64)
    call(launch, (shifted, sf, b))
    assert len(other) == 1 and other[0][0][0] is shifted and not kernel.launched
    call(launch, (a, torch.zeros(5)[1:], b)), call(launch, (a, sf, b))
    assert len(other) == 1 and kernel.by_triton == 2, "Triton compiles again where a pointer has another alignment"


def test_ordinary_launch(kernel, monkeypatch):
    """Hooks, and internals of Triton that are not those known, take Triton's launch."""
    launch, tensors = bound(kernel), problem()
    call(launch, tensors), call(launch, tensors)
    monkeypatch.setattr(_tma, "_launch_is_hooked", lambda: True)
    call(launch, tensors)
    assert kernel.by_triton == 2
    monkeypatch.undo()


@pytest.mark.parametrize("spoil", ["launch", "metas", "encoder", "version"])
def test_unknown_internals(kernel, monkeypatch, spoil):
    if spoil == "launch":
        kernel.compiled.run.launch = (lambda inner: lambda *args: inner(*args))(kernel.compiled.run.launch)
    elif spoil == "metas":
        kernel.compiled.metadata.tensordesc_meta = [META, None]
    elif spoil == "encoder":
        monkeypatch.setattr(_tma, "driver", None)
    else:
        monkeypatch.setattr(deep_gemm._triton, "_VERSION", "4.0")
    launch, tensors = bound(kernel), problem()
    for _ in range(3):
        call(launch, tensors)
    assert kernel.by_triton == 3
