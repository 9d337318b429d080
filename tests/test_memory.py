"""Which bytes views share, against an enumeration of them."""

import pytest
import torch
from generators import deep_gemm

memory = deep_gemm._memory
BUFFER = torch.empty(512, dtype=torch.uint8)


def view(element_size, offset, shape, stride):
    """A view of BUFFER that starts at a multiple of its element's size."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[element_size]
    return BUFFER.view(dtype).as_strided(shape, stride, offset)


def elements(tensor):
    """First byte of the element at each index, from the start of BUFFER."""
    first = torch.tensor(tensor.storage_offset() * tensor.element_size())
    for size, stride in zip(tensor.shape, tensor.stride()):
        first = first.unsqueeze(-1) + torch.arange(size) * stride * tensor.element_size()
    return first.flatten().tolist()


def touched(tensor):
    return {start + i for start in elements(tensor) for i in range(tensor.element_size())}


def check(a, b):
    assert memory.extent(a) == (max(touched(a)) + 1 - min(touched(a)) if a.numel() else 0)
    repeated = len(set(elements(a))) < a.numel()
    if a.dim() <= 2:
        assert memory.overlaps_itself(a) == repeated
    else:
        assert memory.overlaps_itself(a) or not repeated
    shared = bool(touched(a) & touched(b))
    assert memory.overlap(a, b) == shared
    assert memory.overlap(b, a) == shared


@pytest.mark.parametrize(
    "a, b",
    [
        ((1, 0, (4, 8), (8, 1)), (1, 32, (4, 8), (8, 1))),  # next to each other
        ((1, 0, (4, 8), (8, 1)), (1, 31, (4, 8), (8, 1))),
        ((1, 0, (4, 8), (16, 1)), (1, 8, (4, 8), (16, 1))),  # columns of one buffer
        ((1, 0, (4, 9), (16, 1)), (1, 8, (4, 8), (16, 1))),
        ((1, 0, (4, 8), (16, 1)), (4, 2, (4, 2), (4, 1))),  # rows of payload and scale factors
        ((1, 0, (4, 9), (16, 1)), (4, 2, (4, 2), (4, 1))),
        ((2, 0, (5, 3), (12, 4)), (2, 2, (5, 3), (12, 4))),
        ((2, 0, (5, 3), (6, 1)), (2, 3, (5, 3), (6, 1))),  # even and odd rows
        ((1, 0, (3, 4), (0, 1)), (1, 2, (1, 1), (9, 9))),
        ((4, 0, (7, 2), (1, 8)), (1, 28, (2, 4), (32, 1))),  # in the padding of MN-major scale factors
        ((1, 0, (0, 8), (8, 1)), (1, 0, (4, 8), (8, 1))),
        ((1, 5, (), ()), (1, 5, (1,), (1,))),
    ],
)
def test_chosen_views(a, b):
    check(view(*a), view(*b))
    check(view(*b), view(*a))


def test_random_views():
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @st.composite
    def views(draw):
        element_size = draw(st.sampled_from([1, 2, 4]))
        dims = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=0, max_size=3))
        room = BUFFER.numel() // element_size - sum(max(size - 1, 0) * stride for size, stride in dims) - 1
        hypothesis.assume(room >= 0)
        offset = draw(st.integers(0, min(room, 40)))
        return view(element_size, offset, [size for size, _ in dims], [stride for _, stride in dims])

    @hypothesis.settings(max_examples=1000, deadline=None, derandomize=True)
    @hypothesis.given(views(), views())
    def run(a, b):
        check(a, b)

    run()


def test_a_search_that_is_cut_short_says_overlap(monkeypatch):
    a, b = view(1, 0, (8, 5), (20, 3)), view(1, 1, (8, 5), (20, 3))
    assert not memory.overlap(a, b)
    monkeypatch.setattr(memory, "_MAX_STEPS", 0)
    assert memory.overlap(a, b)
