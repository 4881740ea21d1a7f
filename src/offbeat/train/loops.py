"""Owns the compiled loops that train chains of linear layers, one training after the other, without the GIL.

Rules kept here:
- Every sum is taken in its natural order and every operation is rounded by itself (no fast-math, no fused
  multiply-add), so the bits of a training depend on nothing but its own inputs.
- A weight is held as (inputs, outputs) while it trains: the innermost loops then run over neighbours in memory.
  Products go four rows and two terms at a time, which changes no sum's order.
- Batches are filled up with zeros to a multiple of four rows; the results of those rows are not used.

It needs numba, and is imported only where numba is installed.
"""

from math import exp, log, sqrt, tanh

import numpy as np
import numpy.typing as npt

from offbeat.core.compiled import Function, compiled
from offbeat.core.layout import Vector

Whole = npt.NDArray[np.int64]
Table = npt.NDArray[np.float32]

INPUTS, OUTPUTS, ACTIVATION, WEIGHT, BIAS, OWN = range(6)
"""Columns of the table of layers: sizes, the activation behind it, where weight and bias lie in a model (-1: no bias),
and where both lie in the loop's own vector."""
NONE, RELU, TANH, SIGMOID = range(4)
"""Activations behind a layer."""
BEGIN, SIZE, ITERATIONS, INDICES, COUNTS = range(5)
"""Columns of the table of trainings: where the device's samples begin, size and number of its batches, and where its
indices and counts begin."""
ROWS = 4
EVALUATED_ROWS = 64
"""Samples whose scores are calculated together, a multiple of ROWS: they stay in the cache."""
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)


def _compiled(function: Function) -> Function:
    """As in the kernel; a division by 0 is infinite or NaN, as everywhere in float32."""
    return compiled(function, error_model="numpy")


@_compiled
def _product(
    y: Vector,
    y_at: int,
    x: Vector,
    x_at: int,
    row_step: int,
    term_step: int,
    w: Vector,
    w_at: int,
    rows: int,
    terms: int,
    columns: int,
) -> None:
    """y (rows, columns) += x (rows, terms) @ w (terms, columns); y and w lie row by row, x in steps."""
    row = 0
    while row + ROWS <= rows:
        lo = y_at + row * columns
        y0, y1 = y[lo : lo + columns], y[lo + columns : lo + 2 * columns]
        y2, y3 = y[lo + 2 * columns : lo + 3 * columns], y[lo + 3 * columns : lo + 4 * columns]
        term = 0
        while term + 2 <= terms:
            at = x_at + row * row_step + term * term_step
            a0, b0 = x[at], x[at + term_step]
            a1, b1 = x[at + row_step], x[at + row_step + term_step]
            a2, b2 = x[at + 2 * row_step], x[at + 2 * row_step + term_step]
            a3, b3 = x[at + 3 * row_step], x[at + 3 * row_step + term_step]
            lo = w_at + term * columns
            upper, lower = w[lo : lo + columns], w[lo + columns : lo + 2 * columns]
            for i in range(columns):
                u, v = upper[i], lower[i]
                y0[i] = (y0[i] + a0 * u) + b0 * v
                y1[i] = (y1[i] + a1 * u) + b1 * v
                y2[i] = (y2[i] + a2 * u) + b2 * v
                y3[i] = (y3[i] + a3 * u) + b3 * v
            term += 2
        if term < terms:
            at = x_at + row * row_step + term * term_step
            a0, a1, a2, a3 = x[at], x[at + row_step], x[at + 2 * row_step], x[at + 3 * row_step]
            upper = w[w_at + term * columns : w_at + (term + 1) * columns]
            for i in range(columns):
                y0[i] += a0 * upper[i]
                y1[i] += a1 * upper[i]
                y2[i] += a2 * upper[i]
                y3[i] += a3 * upper[i]
        row += ROWS
    while row < rows:
        y0 = y[y_at + row * columns : y_at + (row + 1) * columns]
        for term in range(terms):
            a0 = x[x_at + row * row_step + term * term_step]
            upper = w[w_at + term * columns : w_at + (term + 1) * columns]
            for i in range(columns):
                y0[i] += a0 * upper[i]
        row += 1


@_compiled
def _activate(y: Vector, kind: int) -> None:
    if kind == RELU:
        for i in range(len(y)):
            y[i] = ZERO if y[i] < ZERO else y[i]
    elif kind == TANH:
        for i in range(len(y)):
            y[i] = np.float32(tanh(y[i]))
    elif kind == SIGMOID:
        for i in range(len(y)):
            y[i] = ONE / (ONE + np.float32(exp(-y[i])))


@_compiled
def _activate_back(d: Vector, y: Vector, kind: int) -> None:
    """d times the slope of the activation, computed from its output."""
    if kind == RELU:
        for i in range(len(y)):
            d[i] = ZERO if y[i] <= ZERO else d[i]
    elif kind == TANH:
        for i in range(len(y)):
            d[i] = d[i] * (ONE - y[i] * y[i])
    elif kind == SIGMOID:
        for i in range(len(y)):
            d[i] = d[i] * ((ONE - y[i]) * y[i])


@_compiled
def _forward(y: Vector, places: Whole, w: Vector, layers: Whole, count: int) -> None:
    """Outputs of all layers, from the inputs at the beginning of y."""
    filled = -(-count // ROWS) * ROWS
    for number in range(len(layers)):
        terms, columns, own = layers[number, INPUTS], layers[number, OUTPUTS], layers[number, OWN]
        at, bias = places[number + 1], w[own + terms * columns : own + (terms + 1) * columns]
        for row in range(filled):
            part = y[at + row * columns : at + (row + 1) * columns]
            for i in range(columns):
                part[i] = bias[i]
        _product(y, at, y, places[number], terms, 1, w, own, filled, terms, columns)
        _activate(y[at : at + filled * columns], layers[number, ACTIVATION])


@_compiled
def _cross_entropy(y: Vector, d: Vector, own: int, share: np.float32) -> float:
    """The loss of one sample from its scores and its class; leaves its share of the gradient in d."""
    largest, mass = y[0], ZERO
    for i in range(1, len(y)):
        largest = max(largest, y[i])
    for i in range(len(y)):
        d[i] = np.float32(exp(y[i] - largest))
        mass += d[i]
    for i in range(len(y)):
        d[i] = d[i] / mass
    d[own] -= ONE
    for i in range(len(y)):
        d[i] *= share
    return log(np.float64(mass)) - np.float64(y[own] - largest)


@_compiled
def _square(y: Vector, d: Vector, answer: Vector, share: np.float32) -> float:
    """The mean square of one sample; leaves its share of the gradient in d."""
    total = 0.0
    for i in range(len(y)):
        apart = y[i] - answer[i]
        total += np.float64(apart) * np.float64(apart)
        d[i] = apart * share
    return total / len(y)


@_compiled
def _gather(y: Vector, inputs: Table, begin: int, rows: Whole) -> None:
    """The inputs of a batch, filled up with zeros."""
    features = inputs.shape[1]
    for row in range(len(rows)):
        sample, part = inputs[begin + rows[row]], y[row * features : (row + 1) * features]
        for i in range(features):
            part[i] = sample[i]
    y[len(rows) * features : -(-len(rows) // ROWS) * ROWS * features] = ZERO


@_compiled
def _loss(
    y: Vector, d: Vector, at: int, columns: int, classes: Whole, answers: Table, begin: int, rows: Whole
) -> float:
    """The mean loss of a batch from the scores that lie at `at`; leaves its gradient in d."""
    lost = 0.0
    for row in range(len(rows)):
        sample, lo = begin + rows[row], at + row * columns
        scores, slopes = y[lo : lo + columns], d[lo : lo + columns]
        if len(classes):
            lost += _cross_entropy(scores, slopes, classes[sample], ONE / np.float32(len(rows)))
        else:
            lost += _square(scores, slopes, answers[sample], TWO / np.float32(len(rows) * columns))
    return lost / len(rows)


@_compiled
def _backward(
    y: Vector, d: Vector, places: Whole, w: Vector, g: Vector, turned: Vector, layers: Whole, count: int
) -> None:
    """Gradients of all layers, from the gradient of the outputs."""
    g[:] = ZERO
    filled = -(-count // ROWS) * ROWS
    for number in range(len(layers) - 1, -1, -1):
        terms, columns, own = layers[number, INPUTS], layers[number, OUTPUTS], layers[number, OWN]
        here, below = places[number + 1], places[number]
        _activate_back(d[here : here + count * columns], y[here : here + count * columns], layers[number, ACTIVATION])
        _product(g, own, y, below, 1, terms, d, here, terms, count, columns)
        if layers[number, BIAS] >= 0:
            bias = g[own + terms * columns : own + (terms + 1) * columns]
            for row in range(count):
                part = d[here + row * columns : here + (row + 1) * columns]
                for i in range(columns):
                    bias[i] += part[i]
        if number:
            for i in range(columns):
                part = turned[i * terms : (i + 1) * terms]
                for term in range(terms):
                    part[term] = w[own + term * columns + i]
            d[here + count * columns : here + filled * columns] = ZERO
            d[below : below + filled * terms] = ZERO
            _product(d, below, d, here, columns, 1, turned, 0, filled, columns, terms)


@_compiled
def _step(
    w: Vector, start: Vector, g: Vector, gamma: np.float32, pull: np.float32, decay: np.float32, clip: float
) -> None:
    """`sgd.take_step`; a layer without bias has zeros in its place, which stay zeros."""
    if clip < np.inf:
        square = 0.0
        for i in range(len(g)):
            square += np.float64(g[i]) * np.float64(g[i])
        if sqrt(square) > clip:
            factor = np.float32(clip / sqrt(square))
            for i in range(len(g)):
                g[i] *= factor
    if decay > ZERO:
        for i in range(len(g)):
            g[i] += decay * w[i]
    for i in range(len(w)):
        w[i] = (w[i] + pull * (start[i] - w[i])) - gamma * g[i]


@_compiled
def _take(w: Vector, model: Vector, layers: Whole) -> None:
    """The loop's own vector from a model's: weights are transposed."""
    for number in range(len(layers)):
        terms, columns, own = layers[number, INPUTS], layers[number, OUTPUTS], layers[number, OWN]
        at, bias = layers[number, WEIGHT], layers[number, BIAS]
        for term in range(terms):
            for i in range(columns):
                w[own + term * columns + i] = model[at + i * terms + term]
        for i in range(columns):
            w[own + terms * columns + i] = model[bias + i] if bias >= 0 else ZERO


@_compiled
def _give(model: Vector, w: Vector, layers: Whole) -> None:
    for number in range(len(layers)):
        terms, columns, own = layers[number, INPUTS], layers[number, OUTPUTS], layers[number, OWN]
        at, bias = layers[number, WEIGHT], layers[number, BIAS]
        for i in range(columns):
            for term in range(terms):
                model[at + i * terms + term] = w[own + term * columns + i]
        if bias >= 0:
            for i in range(columns):
                model[bias + i] = w[own + terms * columns + i]


@_compiled
def train_many(
    first: int,
    last: int,
    models: Table,
    losses: npt.NDArray[np.float64],
    trainings: Whole,
    indices: Whole,
    counts: Whole,
    rates: Table,
    layers: Whole,
    inputs: Table,
    classes: Whole,
    answers: Table,
    decay: np.float32,
    clip: float,
) -> None:
    """Train models[first:last] from their current values, each on its own batches.

    `rates`: gamma, and gamma * rho, of every training. Targets are `classes`; where that is empty, `answers`.
    `clip` is infinite where gradients are not clipped.
    """
    widest, across = ROWS, 0
    for number in range(first, last):
        widest = max(widest, trainings[number, SIZE] + ROWS)
    places = np.zeros(len(layers) + 1, np.int64)
    for number in range(len(layers)):
        places[number + 1] = places[number] + widest * layers[number, INPUTS]
        across = max(across, layers[number, INPUTS] * layers[number, OUTPUTS])
    last_layer, columns = len(layers) - 1, layers[-1, OUTPUTS]
    room = places[-1] + widest * columns
    weights = layers[last_layer, OWN] + (layers[last_layer, INPUTS] + 1) * columns
    y, d, turned = np.zeros(room, np.float32), np.zeros(room, np.float32), np.zeros(across, np.float32)
    w, start, g = np.zeros(weights, np.float32), np.zeros(weights, np.float32), np.zeros(weights, np.float32)
    for number in range(first, last):
        _take(w, models[number], layers)
        _take(start, models[number], layers)
        size, total = trainings[number, SIZE], 0.0
        for iteration in range(trainings[number, ITERATIONS]):
            count = counts[trainings[number, COUNTS] + iteration]
            at = trainings[number, INDICES] + iteration * size
            rows = indices[at : at + count]
            _gather(y, inputs, trainings[number, BEGIN], rows)
            _forward(y, places, w, layers, count)
            total += _loss(y, d, places[-1], columns, classes, answers, trainings[number, BEGIN], rows)
            _backward(y, d, places, w, g, turned, layers, count)
            _step(w, start, g, rates[number, 0], rates[number, 1], decay, clip)
        _give(models[number], w, layers)
        losses[number] = total / trainings[number, ITERATIONS]


@_compiled
def evaluate(model: Vector, layers: Whole, inputs: Table, classes: Whole, answers: Table) -> tuple[float, float]:
    """The mean loss over all samples, and the share of those whose largest score is that of their class."""
    columns, samples = layers[-1, OUTPUTS], len(inputs)
    places = np.zeros(len(layers) + 1, np.int64)
    for number in range(len(layers)):
        places[number + 1] = places[number] + EVALUATED_ROWS * layers[number, INPUTS]
    room, weights = places[-1] + EVALUATED_ROWS * columns, layers[-1, OWN] + (layers[-1, INPUTS] + 1) * columns
    y, d, w = np.zeros(room, np.float32), np.zeros(room, np.float32), np.zeros(weights, np.float32)
    _take(w, model, layers)
    total, right = 0.0, 0
    for begin in range(0, samples, EVALUATED_ROWS):
        rows = np.arange(min(EVALUATED_ROWS, samples - begin))
        _gather(y, inputs, begin, rows)
        _forward(y, places, w, layers, len(rows))
        total += _loss(y, d, places[-1], columns, classes, answers, begin, rows) * len(rows)
        for row in range(len(rows) if len(classes) else 0):
            lo = places[-1] + row * columns
            right += _largest_place(y[lo : lo + columns]) == classes[begin + row]
    return total / samples, right / samples


@_compiled
def _largest_place(y: Vector) -> int:
    """The first place of the largest; NaN is larger than anything, as in torch."""
    found = 0
    for i in range(1, len(y)):
        if y[found] != y[found]:
            break
        if y[i] > y[found] or y[i] != y[i]:
            found = i
    return found
