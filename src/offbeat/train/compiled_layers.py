"""Owns the layers that torch's compiler is slow at on the CPU, and how they are calculated in compiled code instead.

Rules kept here:
- A layer is exchanged by giving it a subclass of its own class; it keeps its parameters, and outside of compiled code
  does what it always did.
- Max pooling is left to torch's own operator: the compiler's loop looks at one element at a time.
- Of a convolution the gradient with respect to the weight is a product of matrices, a few images at a time, where the
  processor has AVX2 and no more: torch's own takes half as long again. Where there are wider vectors, torch's is good.
"""

from typing import Any

import torch
from torch import Tensor, nn

COLUMNS_MAX = 2**18
"""Elements of the matrix that is made of a few images; it should stay in the processor's cache."""
IMAGES_NDIM = 4
CHANNELS_MIN = 16
"""With fewer channels, torch's own gradient is fast."""


def exchange_layers(module: nn.Module) -> None:
    """Let compiled code calculate these layers in the ways that are described above."""
    narrow = torch.backends.cpu.get_cpu_capability() == "AVX2"
    for layer in module.modules():
        if type(layer) is nn.MaxPool2d and not layer.return_indices:
            layer.__class__ = PooledApart
        elif type(layer) is nn.Conv2d and narrow and _is_plain(layer):
            layer.__class__ = ConvolvedByColumns


def _is_plain(layer: nn.Conv2d) -> bool:
    steps = (*layer.stride, *layer.dilation, layer.groups)
    padded = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return padded and set(steps) == {1} and layer.in_channels >= CHANNELS_MIN and min(layer.kernel_size) > 1


# --- max pooling -----------------------------------------------------------------------------------------------------


class PooledApart(nn.MaxPool2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        if not torch.compiler.is_compiling():
            usual: Tensor = super().forward(input)
            return usual
        stride = self.stride if self.stride is not None else self.kernel_size
        window = [_pair(value) for value in (self.kernel_size, stride, self.padding, self.dilation)]
        pooled: Tensor = max_pool_apart(input, *window, self.ceil_mode)[0]
        return pooled


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else [*value]


@torch.library.custom_op("offbeat::max_pool", mutates_args=())
def max_pool_apart(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool
) -> tuple[Tensor, Tensor]:
    """The largest of every window, and where it is."""
    pooled, indices = torch.ops.aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil)
    return pooled, indices


@max_pool_apart.register_fake
def _(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    pooled, indices = torch.ops.aten.max_pool2d_with_indices(x, *window)
    return pooled, indices


@torch.library.custom_op("offbeat::max_pool_backward", mutates_args=())
def max_pool_backward(
    gradient: Tensor,
    x: Tensor,
    indices: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil: bool,
) -> Tensor:
    window = (kernel, stride, padding, dilation, ceil)
    out: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(gradient, x, *window, indices)
    return out


@max_pool_backward.register_fake
def _(_gradient: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, *ctx.window = inputs
    ctx.save_for_backward(x, output[1])


def _pool_gradient(ctx: Any, gradient: Tensor, _indices: Tensor) -> tuple[Tensor | None, ...]:
    x, indices = ctx.saved_tensors
    return max_pool_backward(gradient, x, indices, *ctx.window), None, None, None, None, None


max_pool_apart.register_autograd(_pool_gradient, setup_context=_keep)


# --- convolutions ----------------------------------------------------------------------------------------------------


class ConvolvedByColumns(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        if not torch.compiler.is_compiling() or input.ndim != IMAGES_NDIM:
            return super().forward(input)
        out: Tensor = ByColumns.apply(input, self.weight, self.bias, [*self.padding])  # type: ignore[no-untyped-call]
        return out


class ByColumns(torch.autograd.Function):
    """A convolution in steps of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding, ctx.has_bias = padding, bias is not None
        return nn.functional.conv2d(x, weight, bias, padding=padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ones, zeros = [1, 1], [0, 0]
        of_x = None
        if ctx.needs_input_grad[0]:
            window = (ones, ctx.padding, ones, False, zeros, 1)
            of_x = torch.ops.aten.convolution_backward(gradient, x, weight, None, *window, [True, False, False])[0]
        of_weight = weight_gradient(x, gradient, [*weight.shape], ctx.padding)
        return of_x, of_weight, gradient.sum((0, 2, 3)) if ctx.has_bias else None, None


@torch.library.custom_op("offbeat::weight_gradient", mutates_args=())
def weight_gradient(x: Tensor, gradient: Tensor, shape: list[int], padding: list[int]) -> Tensor:
    """The gradient of a convolution with respect to its weight: columns of x times the gradient of what came out."""
    out, channels, height, width = shape
    images, slopes = x.permute(0, 2, 3, 1), gradient.permute(0, 2, 3, 1).contiguous()
    count, rows, columns, _ = slopes.shape
    at_once = min(count, max(1, COLUMNS_MAX // (rows * columns * height * width * channels)))
    framed = x.new_zeros(at_once, images.shape[1] + 2 * padding[0], images.shape[2] + 2 * padding[1], channels)
    inside = framed[:, padding[0] : padding[0] + images.shape[1], padding[1] : padding[1] + images.shape[2]]
    steps = framed.stride()
    windows = framed.as_strided((at_once, rows, columns, height, width, channels), (*steps[:3], *steps[1:3], 1))
    matrix = torch.empty_like(windows, memory_format=torch.contiguous_format)
    total = x.new_zeros(out, height * width * channels)
    for begin in range(0, count, at_once):
        some = slopes[begin : begin + at_once]
        inside[: len(some)].copy_(images[begin : begin + at_once])
        matrix[: len(some)].copy_(windows[: len(some)])
        total.addmm_(some.reshape(-1, out).t(), matrix[: len(some)].view(-1, height * width * channels))
    return total.view(out, height, width, channels).permute(0, 3, 1, 2).contiguous()


@weight_gradient.register_fake
def _(x: Tensor, _gradient: Tensor, shape: list[int], _padding: list[int]) -> Tensor:
    return x.new_empty(shape)
