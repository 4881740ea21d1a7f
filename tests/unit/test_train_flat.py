"""A flat module is the same module: its parameters, gradients and float buffers are views into flat tensors."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import Tensor, nn

from offbeat.core.layout import Model
from offbeat.errors import InvalidValue
from offbeat.train.flat import FlatModule

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Reads and writes with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        answer: Tensor = self.head(self.embed(tokens))
        return answer


def with_batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def flat_of(module: nn.Module, *, mix_statistics: bool = True) -> FlatModule:
    return FlatModule(module, mix_statistics=mix_statistics, accelerator=CPU)


def stored(flat: FlatModule) -> Model:
    carried = {carried.name: np.empty(carried.shape, carried.dtype) for carried in flat.layout.carried}
    model = Model(flat.layout, np.empty(flat.layout.size, np.float32), carried)
    flat.store(model)
    return model


def inside(part: Tensor | None, whole: Tensor) -> bool:
    return part is not None and np.shares_memory(part.detach().numpy(), whole.numpy())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_parameters_gradients_and_float_buffers_are_views() -> None:
    module = with_batch_norm()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    flat = flat_of(module)
    assert same(dict(module.state_dict()), before)
    for parameter in module.parameters():
        assert inside(parameter, flat.parameters)
        assert inside(parameter.grad, flat.gradients)
    for buffer in (module.get_buffer("1.running_mean"), module.get_buffer("1.running_var")):
        assert inside(buffer, flat.values)
        assert not inside(buffer, flat.parameters)


def test_gradients_land_in_the_flat_tensor() -> None:
    module = with_batch_norm()
    twin = with_batch_norm()
    twin.load_state_dict(module.state_dict())
    flat, inputs = flat_of(module), torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        flat.gradients.zero_()
        module(inputs).square().sum().backward()
    twin(inputs).square().sum().backward()
    expected = torch.cat([parameter.grad.ravel() for parameter in twin.parameters() if parameter.grad is not None])
    assert torch.allclose(flat.gradients, expected)
    assert all(inside(parameter.grad, flat.gradients) for parameter in module.parameters())


def test_load_and_store_round_trip_with_statistics_and_counter() -> None:
    first, second = with_batch_norm(), with_batch_norm()
    flat, other = flat_of(first), flat_of(second)
    first(torch.randn(16, 3))
    first(torch.randn(16, 3))
    model = stored(flat)
    assert model["1.num_batches_tracked"] == 2
    assert np.array_equal(model["1.running_mean"], first.get_buffer("1.running_mean").numpy())
    other.load(model.freeze())
    assert same(dict(first.state_dict()), dict(second.state_dict()))
    assert np.array_equal(stored(other).vector, model.vector)


def test_models_neither_share_memory_with_the_module_nor_with_each_other() -> None:
    flat = flat_of(with_batch_norm())
    model = stored(flat)
    before = model.vector.copy()
    flat.load(model)
    flat.values.zero_()
    assert np.array_equal(model.vector, before)
    model.vector[:] = 1
    assert not flat.values.any()


def test_the_layout_keeps_the_modules_names_and_order() -> None:
    layout = flat_of(with_batch_norm()).layout
    parameters = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert [slot.name for slot in layout.slots] == [*parameters, "1.running_mean", "1.running_var"]
    assert [carried.name for carried in layout.carried] == ["1.num_batches_tracked"]


def test_statistics_that_do_not_mix_stay_in_the_module() -> None:
    module = with_batch_norm()
    flat = flat_of(module, mix_statistics=False)
    assert flat.layout.size == flat.layout.parameter_size == sum(p.numel() for p in module.parameters())
    assert flat.layout.carried == ()
    assert not inside(module.get_buffer("1.running_mean"), flat.values)


def test_other_buffers_travel_and_those_not_saved_stay() -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("scale", torch.tensor(3.0))
    module.register_buffer("steps", torch.tensor([4, 5]))
    module.register_buffer("constant", torch.tensor(6.0), persistent=False)
    flat = flat_of(module, mix_statistics=False)
    model = stored(flat)
    assert set(model) == {"weight", "bias", "scale", "steps"}
    assert model["scale"] == 3
    assert model["steps"].tolist() == [4, 5]


def test_tied_parameters_have_one_slice_and_two_names() -> None:
    module = Tied()
    flat = flat_of(module)
    assert flat.layout.size == 15
    assert flat.layout.tied == (("head.weight", "embed.weight"),)
    model = stored(flat)
    assert np.shares_memory(model["head.weight"], model["embed.weight"])
    model.vector[:] = 7
    flat.load(model)
    assert module.head.weight is module.embed.weight
    assert (module.head.weight == 7).all()


def test_the_gradient_of_a_tied_parameter_is_the_sum() -> None:
    module = Tied()
    apart = Tied()
    apart.head.weight = nn.Parameter(module.embed.weight.detach().clone())
    apart.embed.weight = nn.Parameter(module.embed.weight.detach().clone())
    tokens, flat = torch.tensor([0, 3, 3, 1]), flat_of(module)
    for network in (module, apart):
        network(tokens).square().sum().backward()
    assert apart.head.weight.grad is not None
    assert apart.embed.weight.grad is not None
    assert torch.allclose(flat.gradients.view(5, 3), apart.head.weight.grad + apart.embed.weight.grad)


def test_frozen_parameters_are_not_in_the_layout() -> None:
    module = with_batch_norm()
    module[0].requires_grad_(False)
    before = module.get_parameter("0.weight").clone()
    flat = flat_of(module)
    assert not any(name.startswith("0.") for name in stored(flat))
    flat.values.fill_(9)
    assert torch.equal(module.get_parameter("0.weight"), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_module_of_another_type_is_refused_by_name(dtype: torch.dtype) -> None:
    module = with_batch_norm()
    module[2].to(dtype)
    with pytest.raises(InvalidValue, match=rf"'2\.weight' is {dtype}: .* must be float32; try model\.float\(\)"):
        flat_of(module)


def test_a_buffer_of_another_type_is_refused_by_name() -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
    with pytest.raises(InvalidValue, match=r"'mean' is torch\.float64"):
        flat_of(module)


def test_a_module_without_anything_to_train_is_refused() -> None:
    for module in (nn.ReLU(), nn.Linear(2, 1).requires_grad_(False)):
        with pytest.raises(InvalidValue, match="the model is empty"):
            flat_of(module)


def test_scalars_and_transposed_parameters_are_laid_out() -> None:
    module = nn.Linear(2, 3)
    module.weight = nn.Parameter(torch.arange(6.0).view(2, 3).T)
    module.register_parameter("scale", nn.Parameter(torch.tensor(5.0)))
    flat = flat_of(module)
    assert stored(flat)["weight"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert stored(flat)["scale"] == 5


def test_the_layers_that_keep_statistics_are_found() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False))
    assert list(flat_of(module).batch_norms()) == [module[1]]
