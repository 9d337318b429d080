"""How a call reaches its kernel: traced, captured, on any stream, thread, device and process, with any launch path."""

import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy
import pytest
import torch
import torch._dynamo.testing
from casting import E4M3, RECIPES, assert_same, cast, check, distinct, each_recipe, gpu, reference, sf_spec
from generators import DEVICE, deep_gemm, forget
from views import Guarded, other_values, same_values

fused_cast, launching = deep_gemm.fused_cast, deep_gemm._triton
op = deep_gemm._ops.ops.fused_per_token_cast_to_fp8
FLOAT, PACKED = (False, 128, False), (True, 32, True)
BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"


@pytest.fixture
def cold():
    """No plan of an earlier call, during the test and after it."""
    planned = fused_cast._per_token_cast
    forget(planned)
    yield planned.plans
    forget(planned)


def outputs(m, n, recipe, guard=False):
    shape, dtype = sf_spec(m, n, recipe)
    if guard:
        return Guarded((m, n), (n + 16, 1), E4M3, 16), Guarded(shape, (1, m + 3), dtype, 1)
    return torch.empty(m, n, dtype=E4M3, device=DEVICE), torch.empty(shape, dtype=dtype, device=DEVICE)


# Traced


@pytest.mark.parametrize("m", [1, 4, 7, 130])
@each_recipe
def test_opcheck(m, recipe):
    for x in (distinct(m, 512), distinct(512, m).t(), distinct(m, 512).requires_grad_()):
        out, out_sf = (t.zero_() for t in outputs(m, 512, recipe))
        torch.library.opcheck(op.default, (x, *recipe, out.view(torch.uint8), out_sf))


def compiled(function):
    counter = torch._dynamo.testing.CompileCounterWithBackend(BACKEND)
    torch._dynamo.reset()
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=True), counter


@each_recipe
def test_compile(recipe):
    function, counter = compiled(lambda x: cast(x * 2, *recipe))
    for m in (7, 130):
        x = distinct(m, 512)
        result = function(x)
        assert_same(result, reference(x * 2, *recipe), f"M = {m}")
        assert [t.stride() for t in result] == [t.stride() for t in reference(x, *recipe)]
    assert counter.frame_count == 1


def test_compile_of_inputs_that_require_grad():
    function, counter = compiled(lambda x: cast(x, *FLOAT))
    for m in (7, 130):
        x = distinct(m, 512).requires_grad_()
        for view in (x, x.detach()):
            result = function(view)
            assert_same(result, reference(x, *FLOAT))
            assert not any(t.requires_grad for t in result)


@pytest.mark.parametrize("recipe", [FLOAT, PACKED], ids=["fp32-128", "packed-32"])
def test_compile_with_outputs_given(recipe):
    function, counter = compiled(lambda x, out, out_sf: cast(x, *recipe, out=out, out_sf=out_sf))
    for m in (7, 130):
        x = distinct(m, 512)
        out, out_sf = outputs(m, 512, recipe, guard=True)
        result = function(x, out.view, out_sf.view)
        assert_same(result, reference(x, *recipe), f"M = {m}")
        assert_same((out.view, out_sf.view), reference(x, *recipe), f"M = {m}, given")
        out.assert_untouched("out")
        out_sf.assert_untouched("out_sf")
    assert counter.frame_count == 1


def test_compile_of_a_strided_input():
    function, _ = compiled(lambda qkv: cast(qkv.chunk(3, dim=1)[1], *FLOAT))
    for m in (7, 130):
        qkv = distinct(m, 3 * 512)
        assert_same(function(qkv), reference(qkv[:, 512:1024], *FLOAT))


def test_compile_of_empty_input():
    function, _ = compiled(lambda x: cast(x, *FLOAT))
    for m in (0, 7):
        x = distinct(m, 512)
        assert_same(function(x), reference(x, *FLOAT))


@each_recipe
def test_fake_tensors(recipe):
    for m, n in ((7, 512), (130, 1000), (0, 512)):
        real = cast(distinct(m, n), *recipe)
        with torch._subclasses.FakeTensorMode() as mode:
            x = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
            given = [mode.from_tensor(t) for t in real]
            for fake in (cast(x, *recipe), cast(x, *recipe, *given)):
                for got, want in zip(fake, real):
                    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
                    assert got.device == want.device
            with pytest.raises(ValueError, match="out"):
                cast(x, *recipe, out=given[1])
            with pytest.raises(ValueError, match="gran_k"):
                cast(x, False, 64)


def test_meta_tensors():
    x = torch.empty(7, 512, dtype=torch.bfloat16, device="meta")
    made = cast(x, *FLOAT)
    for got, want in zip(made, reference(distinct(7, 512), *FLOAT)):
        assert got.is_meta and (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    assert all(got is given for got, given in zip(cast(x, *FLOAT, *made), made))


def test_subclass_goes_through_the_op():
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = distinct(4, 512), distinct(4, 512, seed=1)
    result = cast(TwoTensor(a, b), *FLOAT)
    assert_same([t.a for t in result], reference(a, *FLOAT))
    assert_same([t.b for t in result], reference(b, *FLOAT))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: deep_gemm.fused_per_token_cast_to_fp4(x, False),
        lambda x: deep_gemm.fused_per_block_cast_to_fp8(x, False),
        lambda x: deep_gemm.fused_swiglu_cast_to_fp8(x, False),
        lambda x: deep_gemm.fused_rms_norm_cast_to_fp8(x, torch.ones_like(x[0]), 1e-6, False)[:2],
    ],
    ids=["fp4", "block", "swiglu", "rms_norm"],
)
def test_subclass_goes_through_every_op(function):
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = distinct(128, 512), distinct(128, 512, seed=1)
    result = function(TwoTensor(a, b))
    assert_same([t.a for t in result], function(a))
    assert_same([t.b for t in result], function(b))


# Plans


def test_plans_are_bounded(cold, monkeypatch):
    monkeypatch.setattr(fused_cast._per_token_cast, "_MAX_PLANS", 8)
    for m in range(1, 30):
        check(distinct(m, 32), FLOAT)
        assert len(cold) <= 8


def test_refused_arguments_leave_no_plan(cold):
    x = distinct(4, 512)
    for arguments in ((x, False, 64), (x, False, 128, True), (x, False, [128]), (x.int(), False), (None, False)):
        with pytest.raises((TypeError, ValueError)):
            cast(*arguments)
    assert not cold


def test_only_one_plan_for_repeated_calls(cold):
    for seed in range(3):
        check(distinct(4, 512, seed=seed), FLOAT)
    assert len(cold) == 1


def planned():
    """A `Planned` on CPU tensors that notes which plan each launch has."""
    launched, calling = [], deep_gemm._call

    def make(inputs, outputs, *options):
        calling.check_matrix("x", inputs[0], torch.float32, torch.bfloat16)
        calling.check_output("out", outputs[0], inputs[0], spec := calling.Spec(tuple(inputs[0].shape), torch.float32))
        plan = calling.Plan(inputs, outputs, (spec,), None, lambda x: (x.float(),), False)
        plan.launch = lambda tensors, pointers: launched.append((plan, [t.data_ptr() for t in tensors], pointers))
        return plan

    return calling.Planned(make, ("x", "out")), launched


def test_plans_are_found_again_and_only_by_what_they_were_made_for():
    function, launched = planned()
    x, out = torch.ones(4, 6), torch.ones(4, 6)
    for given in ((out,), (None,)):
        for _ in range(3):
            (result,) = function((x,), given, True)
            assert result is out or given == (None,)
        assert launched[-1][0] is launched[-2][0] is launched[-3][0]
        assert launched[-1][1] == list(launched[-1][2]) == [x.data_ptr(), result.data_ptr()]
    plans = {plan for plan, *_ in launched}
    assert len(plans) == 2
    others = [
        (x.reshape(6, 4), out.reshape(6, 4)), (x.t().reshape(4, 6).t().contiguous().t(), out), (x.bfloat16(), out),
        (x, out.t().reshape(4, 6).clone().as_strided((4, 6), (1, 4))), (x[:2], out[:2]),
    ]  # fmt: skip
    for other, other_out in others:
        for given in ((other_out,), (None,)):
            function((x,), (out,), True)
            function((other,), given, True)
            if (other.shape, other.stride(), other.dtype) != (x.shape, x.stride(), x.dtype) or given != (None,):
                assert launched[-1][0] not in plans
    function((x,), (out,), False)
    assert launched[-1][0] not in plans


@pytest.mark.skipif(deep_gemm._call.TensorGuards is None, reason="this torch has no tensor guards")
def test_repeated_calls_need_no_key():
    function, launched = planned()
    x, out = torch.ones(4, 6), torch.ones(4, 6)
    for given in ((out,), (None,)):
        function((x,), given)
        function.plans.clear()  # and not what is remembered of the latest call
        function((x,), given)
        function((torch.zeros(4, 6),), given)
        assert not function.plans and len({plan for plan, *_ in launched[-3:]}) == 1


def test_repeated_calls_check_what_a_plan_does_not_say():
    function, launched = planned()
    x, out, twice = torch.ones(4, 6), torch.ones(4, 6), torch.ones(8, 6)
    for given in ((out,), (None,)):
        function((x,), given)
    count = len(launched)
    with pytest.raises(ValueError, match="out overlaps x"):
        function((x,), (x,))
    with pytest.raises(ValueError, match="out overlaps x"):
        function((twice[:4],), (twice[2:6],))
    with pytest.raises(ValueError, match="requires grad"):
        function((x,), (torch.ones(4, 6, requires_grad=True),))
    for other in (x.numpy(), [x], None, 1.0):
        for given in ((out,), (None,)):
            with pytest.raises(TypeError, match="x must be a tensor"):
                function((other,), given)
    for other in (out.numpy(), 1.0):
        with pytest.raises(TypeError, match="out must be a tensor"):
            function((x,), (other,))
    for freed in (torch.ones(4, 6), torch.ones(8, 6)[4:]):
        freed.untyped_storage().resize_(0)
        for forget_first in (False, True):
            for given in ((out,), (None,)):
                if forget_first:
                    forget(function)
                with pytest.raises(ValueError, match="x has no memory"):
                    function((freed,), given)
    assert len(launched) == count
    for given in ((out,), (None,)):
        function((x,), given)
    count = len(launched)
    # A sign that is yet to be applied: what the reference computes is copied.
    function((torch._neg_view(x),), (out,))
    assert len(launched) == count and (out == -1).all()
    assert (function((torch._neg_view(x),), (None,))[0] == -1).all()
    negated = torch._neg_view(torch.zeros(4, 6))
    function((x,), (negated,))
    assert len(launched) == count and (negated == 1).all()
    version = out._version
    function((x,), (out,))
    assert out._version == version + 1 and len(launched) == count + 1
    # Gradients of the input and its class are not the launch's concern.
    function((x.clone().requires_grad_(),), (out,))
    function((torch.nn.Parameter(x.clone()),), (out,))
    with torch.inference_mode():
        function((x.clone(),), (torch.ones(4, 6),))
    assert len(launched) == count + 4


@pytest.mark.skipif(deep_gemm._call.TensorGuards is None, reason="this torch has no tensor guards")
def test_a_change_of_mode_needs_a_key_but_once():
    function, launched = planned()
    x, out = torch.ones(4, 6), torch.ones(4, 6)
    function((x.requires_grad_(),), (out,))
    for _ in range(2):
        function((x.detach(),), (out,))
    function.plans.clear()
    function((x.detach(),), (out,))
    assert not function.plans and len(launched) == 4


def test_a_refused_call_spoils_no_plan():
    """Sizes that are no integers are found out when outputs are made; equal ones that are integers come to the same key."""
    sf, ks = torch.ones(4, 8, device=DEVICE), torch.tensor([512], dtype=torch.int32, device=DEVICE)
    function = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor
    for bad in (([512.0], 128), ([512], 128.0)):
        with pytest.raises(TypeError):
            function(sf, ks, *bad)
    assert function(sf, ks, [512], 128).dtype == torch.int32


def test_outputs_that_are_no_tensors():
    x = distinct(4, 512)
    cast(x, *FLOAT), cast(x, *FLOAT)
    for bad in (numpy.zeros(3), numpy.array([None])):
        with pytest.raises(TypeError, match="out_sf must be a tensor or None"):
            cast(x, *FLOAT, out_sf=bad)


@pytest.mark.parametrize("hidden", [4096, 7168, 1000, 1023])
@each_recipe
def test_rows_do_not_change_the_constants(hidden, recipe):
    """What Triton compiles for follows from dtypes, hidden size and recipe, for a contiguous x and a slice of rows."""
    pytest.importorskip("triton")
    if sf_spec(1, hidden, recipe) is None:
        pytest.skip("the recipe refuses this number of groups")

    def constants(x):
        (m, n), (shape, sf_dtype) = x.shape, sf_spec(*x.shape, recipe)
        out, out_sf = torch.empty(m, n, dtype=E4M3, device="meta"), torch.empty(shape, dtype=sf_dtype, device="meta")
        launch = fused_cast.bind_per_token_cast(x, *recipe, out, out_sf)
        assert launch.grid[1] <= 65535 and launch.grid[2] <= 65535
        names = launch.kernel.arg_names[3:]
        return [value for name, value in zip(names, launch.args) if name.isupper()], launch.options

    row = torch.empty(1, hidden, dtype=torch.bfloat16, device="meta")
    expected = constants(row)
    assert len(expected[0]) > 8
    for m in (1, 2, 3, 4, 7, 8, 16, 127, 128, 129, 600, 8192, 65537, 2**22 + 1):
        assert constants(row.new_empty(m, hidden)) == expected, m
        if hidden % 8 == 0:
            assert constants(row.new_empty(m, 3 * hidden)[:, hidden : 2 * hidden]) == expected, m
        assert constants(row.as_strided((1, hidden), (m, 1))) == expected, "stride of a single row"


def test_options_of_the_launch():
    """Fused multiply-adds are off whatever this Triton's default is, and e4m3 memory is bytes to kernels."""
    pytest.importorskip("triton")

    class Kernel:
        def __getitem__(self, grid):
            self.grid = grid
            return self.launch

        def launch(self, *args, **options):
            self.args, self.options = args, options

    kernel, x = Kernel(), torch.zeros(2, 64)
    out = x.to(E4M3)
    launch = launching.Launch(kernel, (3, 2, 1), (7, True), 8, -1)
    launch((x, out), (x.data_ptr(), out.data_ptr()))
    assert kernel.grid == (3, 2, 1)
    assert kernel.options == {"num_warps": 8, "enable_fp_fusion": False}
    assert kernel.args[0] is x and kernel.args[1].dtype is torch.uint8 and kernel.args[1].data_ptr() == out.data_ptr()
    assert kernel.args[2:] == (7, True)


# On the GPU


@gpu
@pytest.mark.parametrize("recipe", [FLOAT, PACKED], ids=["fp32-128", "packed-32"])
def test_cuda_graph(recipe):
    graphs = []
    for m in (7, 130):
        x = distinct(m, 4096)
        out, out_sf = outputs(m, 4096, recipe)
        cast(x, *recipe, out=out, out_sf=out_sf), cast(x, *recipe)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cast(x, *recipe, out=out, out_sf=out_sf)
            made = cast(x, *recipe)
        graphs.append((graph, x, (out, out_sf), made))
    for seed in range(1, 4):
        for graph, x, given, made in graphs:
            x.copy_(distinct(*x.shape, seed=seed))
            for t in (*given, *made):
                t.view(torch.uint8).fill_(0x7F)
            graph.replay()
            expected = reference(x, *recipe)
            assert_same(given, expected, f"given, replay {seed}")
            assert_same(made, expected, f"made, replay {seed}")


def on_side_stream(stream, m=300):
    """A cast on a stream whose input arrives late; the launch on any other stream reads zeros."""
    values, x = distinct(m, 4096), torch.zeros(m, 4096, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(values)
        result = cast(x, *FLOAT)
    stream.synchronize()
    assert_same(result, reference(values, *FLOAT))


@gpu
def test_side_stream(cold):
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()):
        for _ in range(2):  # Triton's launch, then the direct one
            on_side_stream(stream)


@gpu
def test_fresh_thread(cold):
    errors = []

    def run():
        try:
            check(distinct(5, 512), PACKED)
            on_side_stream(torch.cuda.Stream(), 301)
        except BaseException as error:
            errors.append(error)

    for _ in range(2):
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors


@gpu
def test_device_that_is_not_current(cold):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for seed in range(3):
        for device in ("cuda:1", "cuda:0"):
            check(distinct(7, 4096, seed=seed).to(device), PACKED)
            check(distinct(7, 4096, seed=seed).to(device).requires_grad_(), FLOAT)
    assert torch.cuda.current_device() == 0
    x = distinct(7, 512)
    with pytest.raises(ValueError, match="out"):
        cast(x, *FLOAT, out=torch.empty(7, 512, dtype=E4M3, device="cuda:1"))


@gpu
def test_no_host_sync(cold):
    x = distinct(7, 4096)
    out, out_sf = outputs(7, 4096, PACKED)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            made = cast(x, *PACKED)
            cast(x, *PACKED, out=out, out_sf=out_sf)
            cast(x.t(), *FLOAT)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(made, reference(x, *PACKED))
    assert_same((out, out_sf), made)


def allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


@gpu
def test_nothing_is_allocated_when_outputs_are_given(cold):
    x = distinct(40, 1024)
    for name, view in (same_values(x) | other_values(x)).items():
        out, out_sf = outputs(*view.shape, FLOAT)
        for _ in range(2):
            before = allocations()
            cast(view, *FLOAT, out=out, out_sf=out_sf)
            assert allocations() == before, name
        before = allocations()
        cast(view, *FLOAT)
        assert allocations() == before + 2, name


@gpu
def test_one_kernel_a_call():
    x = distinct(40, 1024)
    views = [x, x.t().contiguous().t(), x[:, ::2], x[::3, 5:600]]
    for view in views:
        cast(view, *FLOAT)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for view in views:
            cast(view, *FLOAT)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert names == ["per_token_cast_kernel"] * len(views)


@gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_both_launch_paths(recipe, cold, monkeypatch):
    known = launching._VERSION in launching._DIRECT_VERSIONS
    x = distinct(130, 1000)
    offset = torch.empty(130 * 1000 + 3, dtype=x.dtype, device=DEVICE)[3:].view(130, 1000).copy_(x)  # not on 16 bytes
    views = (x, x.t().contiguous().t(), x[:, ::2], offset)
    expected = [reference(view, *recipe) for view in views]
    for direct in (known, False):
        if not direct:
            monkeypatch.setattr(launching, "_DIRECT_VERSIONS", ())
        forget(fused_cast._per_token_cast)
        for view, want in zip(views, expected):
            for _ in range(3):
                assert_same(cast(view, *recipe), want, f"direct: {direct}")
        assert [any(plan.launch.entries.values()) for plan in cold.values()] == [direct] * len(cold)


@gpu
def test_direct_launch_is_used_where_it_should_be(cold, monkeypatch):
    """This Triton is one whose launcher is known, and only the first launch of each alignment goes through Triton."""
    assert launching._VERSION in launching._DIRECT_VERSIONS
    slow = []
    by_triton = launching.Launch._launch_by_triton
    monkeypatch.setattr(
        launching.Launch, "_launch_by_triton", lambda self, *args: (slow.append(1), by_triton(self, *args))[1]
    )
    memory = torch.zeros(8 * 512 + 16, dtype=torch.bfloat16, device="cuda")
    for offset, launches in ((0, 1), (8, 1), (1, 2), (3, 2), (16, 2)):
        x = memory[offset:][: 8 * 512].view(8, 512)
        for seed in range(2):
            x.copy_(distinct(8, 512, seed=seed))
            check(x, FLOAT, label=f"offset {offset}")
        assert len(slow) == launches, f"offset {offset}"


@gpu
def test_launch_hooks_are_called(cold):
    runtime = pytest.importorskip("triton").knobs.runtime
    x, calls = distinct(7, 512), []
    check(x, FLOAT), check(x, FLOAT)

    def hook(metadata):
        calls.append(metadata.get()["name"])

    runtime.launch_enter_hook.add(hook)
    try:
        for _ in range(3):
            check(x, FLOAT)
    finally:
        runtime.launch_enter_hook.remove(hook)
    check(x, FLOAT)
    assert calls == ["per_token_cast_kernel"] * 3


@gpu
@pytest.mark.parametrize("hidden", [4096, 7168, 1000])
@pytest.mark.parametrize("recipe", [FLOAT, PACKED], ids=["fp32-128", "packed-32"])
def test_no_recompilation_for_the_number_of_rows(hidden, recipe, cold):
    qkv = torch.zeros(600, 3 * hidden, dtype=torch.bfloat16, device="cuda")

    def compilations():
        return len(fused_cast.per_token_cast_kernel.device_caches[torch.cuda.current_device()][0])

    x = qkv[:, :hidden].contiguous()
    slice_of_qkv = qkv[:, hidden : 2 * hidden]
    cast(x[:2], *recipe), cast(slice_of_qkv[:2], *recipe)
    before = compilations()
    for m in range(1, 601):
        cast(x[:m], *recipe), cast(slice_of_qkv[:m], *recipe)
    assert before > 0 and compilations() == before


# In fresh processes


def run(code, *arguments, **environment):
    """Run code in a fresh process; environment variables with value None are removed."""
    tests = Path(__file__).parent
    path = os.pathsep.join(filter(None, [str(tests), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": None, **environment}
    variables = {name: str(value) for name, value in environment.items() if value is not None}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


CAST = """
from casting import check, distinct
for _ in range(2):
    check(distinct(7, 4096), (True, 32, True))
    check(distinct(130, 1000), (False, 128, False))
"""


@gpu
@pytest.mark.slow
def test_cold_cache_shared_by_processes(tmp_path):
    for output in [finish(process) for process in [run(CAST, TRITON_CACHE_DIR=tmp_path / "cache") for _ in range(8)]]:
        assert "Traceback" not in output
    assert any((tmp_path / "cache").iterdir())


@gpu
@pytest.mark.slow
def test_launcher_is_compiled_once(tmp_path):
    """What is compiled ahead beside the kernel is what Triton then looks for."""
    code = "from casting import check, distinct; check(distinct(7, 4096), (True, 32, True))"
    finish(run(code, TRITON_CACHE_DIR=tmp_path))
    launchers = [path.name for path in tmp_path.rglob("__triton_launcher*.so")]
    assert len(launchers) == (launching._VERSION == "3.6"), launchers


@gpu
@pytest.mark.slow
@pytest.mark.parametrize("home", ["read-only", "missing"])
def test_home_that_cannot_be_written(home, tmp_path):
    """/proc refuses to make a directory even to root, whom permissions do not stop."""
    (tmp_path / "home").mkdir(mode=0o555)
    path = tmp_path / "home" if home == "read-only" else "/proc/self/home"
    finish(run(CAST, HOME=path, TRITON_HOME=None, TRITON_CACHE_DIR=None, XDG_CACHE_HOME=None))


@gpu
@pytest.mark.slow
def test_missing_compiler(tmp_path):
    """Triton 3.6 compiles its launcher at the first call; where it cannot, the error says what to install."""
    code = """
import sys
from casting import cast, check, distinct
x = distinct(7, 4096)
for _ in range(2):
    try:
        check(x, (False, 128, False))
    except RuntimeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
"""
    process = run(code, CC=None, PATH="", TRITON_CACHE_DIR=tmp_path)
    output, _ = process.communicate(timeout=300)
    if process.returncode:
        assert "C compiler" in output.splitlines()[-1] and "gcc" in output.splitlines()[-1], output
    else:
        assert launching._VERSION not in ("3.6", "3.7")


@pytest.mark.slow
def test_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch
import torch._dynamo.testing
from generators import DEVICE, deep_gemm, forget
cast, reference = deep_gemm.fused_per_token_cast_to_fp8, deep_gemm.utils.per_token_cast_to_fp8
for device in {"cpu", DEVICE}:
    x = torch.randn(7, 512).to(device)
    try:
        result = cast(x, True, 32, True)
    except ImportError as error:
        assert device == "cuda" and "Triton" in str(error) and "pip install" in str(error), error
        print("refused", device)
    else:
        for got, expected in zip(result, reference(x, True, 32, True)):
            deep_gemm.testing.assert_bitwise_equal(got, expected)
        print("cast", device)
    empty = cast(x[:0], False)
    assert empty[0].shape == (0, 512)
"""
    output = finish(run(code))
    assert "cast cpu" in output
    assert ("refused cuda" in output) == (DEVICE == "cuda")


@pytest.mark.slow
def test_import_leaves_triton_and_cuda_as_they_were():
    pytest.importorskip("triton")
    code = """
import torch, triton
from triton.runtime import _allocation
state = lambda: (dict(vars(_allocation)), dict(vars(triton.knobs.runtime)))
before = state()
from generators import deep_gemm
assert state() == before
assert not torch.cuda.is_initialized()
"""
    finish(run(code))


# What launches directly


def _compiled(**attributes):
    launcher = types.SimpleNamespace(launch=print, arg_annotations=(), kernel_signature=b"", **attributes)
    return types.SimpleNamespace(run=launcher, function=1, packed_metadata=())


@pytest.mark.parametrize("version", ["3.6", "3.9"])
def test_kernels_that_need_more_take_the_ordinary_launch(version, monkeypatch):
    monkeypatch.setattr(launching, "_VERSION", version)
    assert launching._c_entry(_compiled()) is not None
    assert launching._c_entry(None) is None
    scratch, modes = ("global_scratch_size", "profile_scratch_size"), ("launch_cooperative_grid", "launch_pdl")
    for need in (*scratch, *modes, "gsan_enabled"):
        assert launching._c_entry(_compiled(**{need: 1})) is None, need


def test_other_internals_take_the_ordinary_launch(monkeypatch):
    newer = ("launch", "arg_annotations", "kernel_signature")
    for version, missing in (("3.6", "launch"), *(("3.8", name) for name in newer)):
        monkeypatch.setattr(launching, "_VERSION", version)
        compiled = _compiled()
        delattr(compiled.run, missing)
        assert launching._c_entry(compiled) is None, (version, missing)
    monkeypatch.setattr(launching, "_VERSION", "4.0")
    assert launching._c_entry(_compiled()) is None
