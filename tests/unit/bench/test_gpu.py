"""`bench.gpu` where there is no GPU, and what it says of layouts."""

import numpy as np
import pytest
import torch

from bench import gpu
from kernels.page_gather import PageGather


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "bench gpu: device 'cuda': torch" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("layout", gpu.LAYOUTS)
def test_the_places_of_a_layout_fill_the_buffer(layout: str) -> None:
    rows, layers, page, heads, head = 3, 2, 4, 2, 5
    pools = [[torch.ones(rows * page, heads, head, dtype=torch.uint8) for _ in range(2)] for _ in range(layers)]
    buffer = torch.zeros(2 * rows * layers * page * heads * head, dtype=torch.uint8)
    PageGather(pools, gpu.places_of(layout, rows, layers, page, heads, head), page).gather(np.arange(rows), buffer)
    assert buffer.all()


def test_its_checks_compare_the_cpu_with_itself_and_find_no_difference() -> None:
    cpu = torch.device("cpu")
    rows = list(gpu.checks(cpu, longest=50))
    assert len(rows) == 3 * 3 + 1 + 4
    assert [row.value for row in rows if not row.ok] == []


def test_a_difference_is_the_largest_and_nan_is_one() -> None:
    assert gpu._difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])) == 0.5
    assert gpu._difference(torch.tensor([torch.nan]), torch.tensor([1.0])) == torch.inf
