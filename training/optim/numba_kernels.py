"""The kernels of ``triton_kernels`` for a processor: the same tables and results, in
loops that Numba compiles.

Each kernel handles the programs from ``first`` to ``last``. Where a program of Triton is a block of
columns, one is a group of rows here, as long as they are in memory, and sums over rows stay in the
cache. Numbers are computed in float64 and rounded once, when they are written.
"""

# (no postponed annotations here: the compiler reads them)
# mypy: ignore-errors
import math
from threading import Thread

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic

# types that the kernels read and write
SUPPORTED = (torch.float64, torch.float32)
# rows and columns of one program: whole rows; and columns below which rows with constant factors
# are one long row
HEIGHT, BLOCK, SHORT = 128, 1 << 16, 256
# programs of 128 rows from which on threads are worth starting
MANY = 16
WEIGHT, GRAD, FIRST, SECOND, FRESH = range(5)
TYPE, ROWS, COLUMNS, GROUP, TAIL, HEAD, EDGE, KIND = 0, 1, 2, 3, 4, 8, 12, 13
NONE, DYNAMIC, STATIC = range(3)
LR, DECAY, UP, MOMENTUM, DAMPENING, NESTEROV, STARTED, BETA1, BETA2, LOG1, LOG2, EPS, CAP = range(
    13
)
TOTAL, VALUE, LEAST, HELD, MEAN, SQUARE, AGE = range(7)


@intrinsic
def pointer(_typing, address):
    """An address as a pointer."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


kernel = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})


@kernel
def cells(address, start, count, kind, size):
    """Consecutive elements in memory, of ``size`` bytes each."""
    return carray(pointer(address + start * size), (count,), kind)


@kernel
def by_chain(chains, row, count):
    """A vector that is kept by chain; zeros if there is none."""
    address = chains[row]
    return carray(pointer(address), (count,), np.float64) if address != 0 else np.zeros(count)


@kernel
def positions(about, row, first, found):
    """Write ``start + row * stride + column // taps % period`` for all columns from
    ``first`` on to ``found``.
    """
    start, taps, period = about[0] + np.int64(row) * about[1], about[2], about[3]
    place, tap = first // taps % period, first % taps
    for column in range(len(found)):
        found[column] = start + place
        tap += 1
        if tap == taps:
            tap = 0
            place = place + 1 if place + 1 < period else 0


@kernel
def add_products(w, g, added):
    """Add ``w g``."""
    for i in range(len(added)):
        added[i] += np.float64(w[i]) * np.float64(g[i])


@kernel
def reduce_tile(at, about, program, total, target, signs, signed, kind, size):
    """The sums of one program, by tail."""
    if at[WEIGHT] == 0 or at[GRAD] == 0:
        return
    columns, first_row, last_row, first = (
        np.int64(about[COLUMNS]),
        program[1],
        program[2],
        program[3],
    )
    width = min(columns - first, BLOCK)
    added, tails = np.zeros(width), np.empty(width, np.int64)
    by_row = about[TAIL + 1] != 0
    for row in range(first_row, last_row):
        start = row * columns + first
        w, g = (
            cells(at[WEIGHT], start, width, kind, size),
            cells(at[GRAD], start, width, kind, size),
        )
        add_products(w, g, added)
        if by_row or row + 1 == last_row:
            # (if tails do not depend on rows: once)
            positions(about[TAIL:HEAD], row, first, tails)
            for column in range(width):
                tail = tails[column]
                total[target[tail]] -= added[column] * (signs[tail] if signed else 1.0)
            added[:] = 0


@kernel
def reduce_edges(at, about, program, total, target, signs, tree, places, tails, signed, kind, size):
    """The contributions of edges on the trees."""
    if at[GRAD] == 0:
        return
    g = cells(at[GRAD], 0, np.int64(about[ROWS]) * about[COLUMNS], kind, size)
    for edge in range(about[EDGE] + program[3], about[EDGE] + min(-program[2], program[3] + BLOCK)):
        entry = g[places[edge]] * tree[edge]
        total[target[tails + edge]] += entry * (signs[tails + edge] if signed else 1.0)


@kernel
def reduce(
    first, last, pointers, numbers, programs, total, target, signs, tree, places, tails, settings,
    rates, groups, signed
):  # fmt: skip
    """Add ``c_k`` to ``total``: products of weights and gradients by tail,
    and those of tree edges.
    """
    for i in range(first, last):
        program = programs[i]
        at, about = pointers[program[0]], numbers[program[0]]
        if program[2] < 0:
            if about[TYPE] == 0:
                reduce_edges(
                    at,
                    about,
                    program,
                    total,
                    target,
                    signs,
                    tree,
                    places,
                    tails,
                    signed,
                    np.float64,
                    8,
                )
            else:
                reduce_edges(
                    at,
                    about,
                    program,
                    total,
                    target,
                    signs,
                    tree,
                    places,
                    tails,
                    signed,
                    np.float32,
                    4,
                )
        elif about[TYPE] == 0:
            reduce_tile(at, about, program, total, target, signs, signed, np.float64, 8)
        else:
            reduce_tile(at, about, program, total, target, signs, signed, np.float32, 4)


@kernel
def ratio_of(chain, total, value, least, held, mean, square, age, table, cap, adam):
    """``R_k``, with what the last kernel needs: the ratio asked for, and moments."""
    # the root has no path value
    held = held != 0.0 or chain == 0
    value = 1.0 if chain == 0 else value
    if adam and cap != 0.0:
        # a bound on 1 / |p|
        value = math.copysign(max(abs(value), 1.0 / cap), value)
    gradient = (0.0 if held else total * (1.0 - 2.0 * table[UP])) / value
    after, squared = mean, square
    if adam:
        one, two = table[BETA1], table[BETA2]
        after, squared = (
            mean * one + gradient * (1.0 - one),
            square * two + gradient * gradient * (1.0 - two),
        )
        root = (
            math.sqrt(squared) / math.sqrt(1.0 - math.exp((age + 1.0) * table[LOG2])) + table[EPS]
        )
        # with eps = 0, what never had a gradient keeps its value
        moved = 0.0 if root == 0.0 else after / (1.0 - math.exp((age + 1.0) * table[LOG1])) / root
        relative = moved / value
    else:
        momentum, moved = table[MOMENTUM], gradient
        if momentum != 0.0:
            # as torch does, the first gradient enters whole
            after = mean * momentum + gradient * (1.0 - table[DAMPENING] * table[STARTED])
            moved = gradient + momentum * after if table[NESTEROV] != 0.0 else after
        # over p^2, with a bound on 1 / p^2
        relative = moved * value / (value * value if cap == 0.0 else max(value * value, 1.0 / cap))
    if held:
        return 1.0, 1.0, mean, square
    asked = 1.0 - table[LR] * table[DECAY] - table[LR] * relative
    return math.copysign(max(abs(asked), least), asked), asked, after, squared


@kernel
def ratios_of(chains, count, settings, groups, adam):
    """``[R, 1 / R]`` of all chains, the ratios asked for, and their moments after the step."""
    total, value, least = (
        by_chain(chains, TOTAL, count),
        by_chain(chains, VALUE, count),
        by_chain(chains, LEAST, count),
    )
    held, mean = by_chain(chains, HELD, count), by_chain(chains, MEAN, count)
    square, age = by_chain(chains, SQUARE, count), by_chain(chains, AGE, count)
    both, asked, after, squared = (
        np.empty(2 * count),
        np.empty(count),
        np.empty(count),
        np.empty(count),
    )
    for k in range(count):
        both[k], asked[k], after[k], squared[k] = ratio_of(
            k, total[k], value[k], least[k], held[k], mean[k], square[k], age[k],
            settings[groups[k]], settings[0, CAP], adam,
        )  # fmt: skip
        both[count + k] = 1.0 / both[k]
    return both, asked, after, squared


@kernel
def pass_on(
    first, last, chains, count, settings, groups, factor, limits, step, keep, tree, of_tails,
    of_edges, tails, edges, others, adam
):  # fmt: skip
    """Factors by tail, and the weights on the trees, after the ratios."""
    both, _, _, _ = ratios_of(chains, count, settings, groups, adam)
    bounded = settings[0, CAP] != 0.0
    for tail in range(tails):
        change, moves = both[of_tails[tail]], factor[tail]
        keep[tail] = change
        factor[tail] *= change if adam else change * change
        if bounded:
            moves = min(max(moves, -limits[tail]), limits[tail])
        step[tail] = moves * change
    for edge in range(edges):
        tree[edge] *= both[of_edges[edge]]
        if others:
            tree[edge] *= both[of_edges[edges + edge]]


@kernel
def descend(w, g, keep, moves, rate):
    """``w <- w keep - rate g moves``."""
    for i in range(len(w)):
        w[i] = w[i] * keep[i] - g[i] * (moves[i] * rate)


@kernel
def descend_with_momentum(w, g, keep, moves, rate, buffer, fresh, decay, table):
    """The same with momentum."""
    momentum, nesterov, up = table[MOMENTUM], table[NESTEROV] != 0.0, 1.0 - 2.0 * table[UP]
    # the first gradient enters whole
    damped = 1.0 if fresh else 1.0 - table[DAMPENING]
    for i in range(len(w)):
        after, slope = np.float64(buffer[i]), np.float64(g[i]) * up
        if momentum != 0.0:
            after = after * momentum + slope * damped
            slope = slope + momentum * after if nesterov else after
        # (the factor by tail alone)
        buffer[i] = after * decay / keep[i]
        w[i] = w[i] * keep[i] - slope * (moves[i] * rate)


@kernel
def descend_with_moments(w, g, keep, moves, scale, first, second, age, decay, table):
    """Adam's step; its moments are by path values, so gradients have the factor ``1 /
    (pre s)`` before the step.
    """
    one, two = table[BETA1], table[BETA2]
    root = math.sqrt(1.0 - math.exp(age * table[LOG2]))
    rate = table[LR] * scale * root / (1.0 - math.exp(age * table[LOG1]))
    by_value = (1.0 - 2.0 * table[UP]) * scale * decay
    for i in range(len(w)):
        slope = g[i] * by_value * (moves[i] / keep[i])
        mean, square = np.float64(first[i]), second[i] * two + slope * slope * (1.0 - two)
        mean += (slope - mean) * (1.0 - one)
        first[i], second[i] = mean, square
        bottom = math.sqrt(square) + table[EPS] * root
        moved = 0.0 if bottom == 0.0 else mean / bottom
        w[i] = w[i] * keep[i] - moved * (moves[i] * rate)


@kernel
def update_tile(at, about, program, table, step, keep, static, heads, share, age, adam, kind, size):
    """The weights of one program, and what is remembered of them."""
    columns, first_row, last_row, first = (
        np.int64(about[COLUMNS]),
        program[1],
        program[2],
        program[3],
    )
    width = min(columns - first, BLOCK)
    tails = np.empty(width, np.int64)
    kept, moves, none = np.empty(width, kind), np.empty(width, kind), np.zeros(width, kind)
    decay, up = 1.0 - table[LR] * table[DECAY], 1.0 - 2.0 * table[UP]
    # whether factors differ by row, and those by head also by column
    by_row, by_both = about[TAIL + 1] != 0, about[HEAD + 3] > 1
    for row in range(first_row, last_row):
        head = about[HEAD] + np.int64(row) * about[HEAD + 1]
        if row == first_row or by_row or by_both:
            positions(about[TAIL:HEAD], row, first, tails)
            for i in range(width):
                kept[i] = decay * (keep[tails[i]] if about[KIND] == DYNAMIC else 1.0)
                moves[i] = (
                    step[tails[i]]
                    if about[KIND] == DYNAMIC
                    else static[tails[i]]
                    if about[KIND] == STATIC
                    else 1.0
                )
            if by_both:
                positions(about[HEAD:EDGE], row, first, tails)
                for i in range(width):
                    moves[i] *= heads[tails[i]]
        scale = share * (1.0 if by_both else heads[head])
        start = row * columns + first
        w = cells(at[WEIGHT], start, width, kind, size)
        g = cells(at[GRAD], start, width, kind, size) if at[GRAD] != 0 else none
        if at[FIRST] == 0:
            descend(w, g, kept, moves, kind(table[LR] * up * scale))
            continue
        mean = cells(at[FIRST], start, width, kind, size)
        if adam:
            square = cells(at[SECOND], start, width, kind, size)
            descend_with_moments(w, g, kept, moves, scale, mean, square, age, decay, table)
        else:
            descend_with_momentum(
                w, g, kept, moves, table[LR] * scale, mean, at[FRESH] != 0, decay, table
            )


@kernel
def update(
    first,
    last,
    pointers,
    numbers,
    programs,
    settings,
    step,
    keep,
    static,
    heads,
    shares,
    ages,
    adam,
):
    """All weights, edges on the trees too (they are written once more later), and
    what is remembered of them.
    """
    # backwards, because what was read last is still in the cache
    for i in range(last - 1, first - 1, -1):
        program = programs[i]
        at, about = pointers[program[0]], numbers[program[0]]
        if at[WEIGHT] == 0:
            continue
        table, share, age = (
            settings[about[GROUP]],
            shares[program[0]],
            ages[program[0] if adam else 0] + 1.0,
        )
        if about[TYPE] == 0:
            update_tile(
                at,
                about,
                program,
                table,
                step,
                keep,
                static,
                heads,
                share,
                age,
                adam,
                np.float64,
                8,
            )
        else:
            update_tile(
                at,
                about,
                program,
                table,
                step,
                keep,
                static,
                heads,
                share,
                age,
                adam,
                np.float32,
                4,
            )


@kernel
def write_edges(at, about, program, tree, places, kind, size):
    """The weights on the trees, rounded to the tensor's type."""
    w = cells(at[WEIGHT], 0, np.int64(about[ROWS]) * about[COLUMNS], kind, size)
    for edge in range(about[EDGE] + program[3], about[EDGE] + min(-program[2], program[3] + BLOCK)):
        w[places[edge]] = tree[edge]


@kernel
def finish(
    first, last, pointers, numbers, programs, chains, count, settings, groups, counts, places, tree,
    ages, tensors, blocks, adam
):  # fmt: skip
    """Everything that is kept by chain, how many steps tensors have taken, and
    the weights on the trees.
    """
    both, asked, after, squared = ratios_of(chains, count, settings, groups, adam)
    value, least = by_chain(chains, VALUE, count), by_chain(chains, LEAST, count)
    total, mean = by_chain(chains, TOTAL, count), by_chain(chains, MEAN, count)
    square, age, held = (
        by_chain(chains, SQUARE, count),
        by_chain(chains, AGE, count),
        by_chain(chains, HELD, count),
    )
    for k in range(count):
        counts[0, k] += asked[k] <= 0.0
        counts[1, k] += abs(asked[k]) <= least[k]
        least[k] /= abs(both[k])
        mean[k], square[k] = after[k], squared[k]
        if held[k] == 0.0:
            age[k] += 1.0
        value[k] *= both[k]
        total[k] = 0.0
    for tensor in range(tensors if adam else 0):
        if pointers[tensor, WEIGHT] != 0:
            ages[tensor] += 1.0
    for i in range(last - blocks):
        program = programs[i]
        at, about = pointers[program[0]], numbers[program[0]]
        if at[WEIGHT] != 0 and about[TYPE] == 0:
            write_edges(at, about, program, tree, places, np.float64, 8)
        elif at[WEIGHT] != 0:
            write_edges(at, about, program, tree, places, np.float32, 4)


def launch(memory, function, programs, arguments, options):
    """Run a kernel; on large tensors, torch's number of threads share the sums and the update.

    Args:
        memory: arrays of tensors that were arguments before, by id.
        function: the kernel.
        programs: their number.
        arguments: tensors and numbers; the fourth of ``reduce`` receives the sums.
        options: the kernel's last parameters, in their order.
    """
    # (each loop is compiled for both types and all layouts)
    own = [value for key, value in options.items() if key not in ("KINDS", "MIXED")]
    given = [*(as_array(memory, one) for one in arguments), *own]
    count = torch.get_num_threads() if function in (reduce, update) and programs >= MANY else 1
    ends = [programs * i // count for i in range(count + 1)]
    lists = [list(given) for _ in range(count)]
    if function is reduce:
        for one in lists[1:]:
            one[3] = np.zeros_like(given[3])
    threads = [
        Thread(target=function, args=(*ends[i : i + 2], *one)) for i, one in enumerate(lists) if i
    ]
    for thread in threads:
        thread.start()
    function(*ends[:2], *given)
    for thread in threads:
        thread.join()
    if function is reduce:
        for one in lists[1:]:
            given[3] += one[3]


def as_array(memory, value):
    """A tensor's memory as an array; anything else unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    found = memory.get(id(value))
    if found is None:
        # (the tensor stays alive, so that no other gets its id)
        found = memory[id(value)] = value, value.numpy()
    return found[1]
