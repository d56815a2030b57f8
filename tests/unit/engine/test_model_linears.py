from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kvferry.engine import model
from kvferry.engine.model import PrepackedLinear, prepack_linears


def make_stack(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 32)).to(dtype)


@torch.inference_mode()
def test_the_same_results_for_any_number_of_rows() -> None:
    plain = make_stack()
    packed = copy.deepcopy(plain)
    if prepack_linears(packed) == 0:
        pytest.skip("this build of the tensor library has no prepacked linear layers")
    assert isinstance(packed[0], PrepackedLinear)
    for num_rows in (1, 2, 17, 300):
        rows = torch.randn(1, num_rows, 64).bfloat16()
        expected, found = plain(rows).float(), packed(rows).float()
        assert found.shape == expected.shape
        assert (found - expected).norm() <= 0.02 * expected.norm()


def test_float32_stays_as_it_is() -> None:
    stack = make_stack(torch.float32)
    assert prepack_linears(stack) == 0
    assert type(stack[0]) is nn.Linear


@pytest.mark.parametrize("fault", ["raises", "wrong", "shape"])
def test_a_layer_that_fails_the_check_stays_plain(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(PrepackedLinear):
        def __init__(self, source: nn.Linear) -> None:
            nn.Module.__init__(self)
            self.source = source

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            if fault == "raises":
                raise RuntimeError("no such operator")
            result: torch.Tensor = self.source(rows)
            return result + 1 if fault == "wrong" else result[..., :-1]

    monkeypatch.setattr(model, "PrepackedLinear", Broken)
    stack = make_stack()
    assert prepack_linears(stack) == 0
    assert type(stack[0]) is nn.Linear
    assert fault == "shape" or "prepacked" in caplog.text
