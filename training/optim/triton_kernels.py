"""Device code of a step on path values: four launches, whatever the number of tensors.

All tensors are described by two tables, one row each: pointers (they may change from step to step)
and numbers (they do not). Numbers are computed in float64 and rounded once, when they are written.
"""

# (no postponed annotations here: the compiler reads them)
# mypy: ignore-errors
import torch
import triton
import triton.language as tl

SUPPORTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types that the kernels read and write."""
# rows and columns of one program, rows processed together, and groups of 32 threads
HEIGHT, BLOCK, AT_ONCE, WARPS = 32, 128, 4, 4
# columns below which rows with constant factors are one long row
SHORT = BLOCK
# columns of the table of pointers
WEIGHT, GRAD, FIRST, SECOND, FRESH = (tl.constexpr(i) for i in range(5))
POINTERS = tl.constexpr(5)
# columns of the table of numbers; addresses of tails and heads are ``start + row * stride +
# column // taps % period``
TYPE, ROWS, COLUMNS, GROUP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
TAIL, HEAD, EDGE, KIND = tl.constexpr(4), tl.constexpr(8), tl.constexpr(12), tl.constexpr(13)
NUMBERS = tl.constexpr(14)
# kinds of factors by tail
NONE, DYNAMIC, STATIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# columns of the table of settings, one row for each group
LR, DECAY, UP, MOMENTUM, DAMPENING, NESTEROV, STARTED = (tl.constexpr(i) for i in range(7))
BETA1, BETA2, LOG1, LOG2, EPS, CAP = (tl.constexpr(i) for i in range(7, 13))
SETTINGS = tl.constexpr(13)
# addresses in the table of chains, of vectors of one float64 per chain
TOTAL, VALUE, LEAST, HELD, MEAN, SQUARE, AGE = (tl.constexpr(i) for i in range(7))


@triton.jit
def load(pointer, place, mask, kind):
    """Numbers of a tensor of any type, as float64; 0 where the pointer is 0."""
    # (a mask in place of a branch, so that a program waits for several loads at once)
    here = tl.where(pointer != 0, mask, False)
    if kind == 0:
        found = tl.load(pointer.to(tl.pointer_type(tl.float64)) + place, mask=here, other=0.0)
    elif kind == 1:
        found = tl.load(pointer.to(tl.pointer_type(tl.float32)) + place, mask=here, other=0.0).to(
            tl.float64
        )
    elif kind == 2:
        found = tl.load(pointer.to(tl.pointer_type(tl.bfloat16)) + place, mask=here, other=0.0).to(
            tl.float64
        )
    else:
        found = tl.load(pointer.to(tl.pointer_type(tl.float16)) + place, mask=here, other=0.0).to(
            tl.float64
        )
    return found


@triton.jit
def store(pointer, place, value, mask, kind):
    """Write numbers into a tensor of any type."""
    if kind == 0:
        tl.store(pointer.to(tl.pointer_type(tl.float64)) + place, value, mask=mask)
    elif kind == 1:
        tl.store(pointer.to(tl.pointer_type(tl.float32)) + place, value.to(tl.float32), mask=mask)
    elif kind == 2:
        # by way of float32, as all conversions to bfloat16 go
        tl.store(
            pointer.to(tl.pointer_type(tl.bfloat16)) + place,
            value.to(tl.float32).to(tl.bfloat16),
            mask=mask,
        )
    else:
        tl.store(pointer.to(tl.pointer_type(tl.float16)) + place, value.to(tl.float16), mask=mask)


@triton.jit
def by_chain(chains, row, chain, mask):
    """One of the vectors kept by chain; 0 where there is none."""
    return load(tl.load(chains + row), chain, mask, 0)


@triton.jit
def set_chain(chains, row, chain, value, mask):
    """Write one of them."""
    tl.store(tl.load(chains + row).to(tl.pointer_type(tl.float64)) + chain, value, mask=mask)


@triton.jit
def address(numbers, row, column):
    """Places by tail or head of edges, given the four numbers at ``numbers``."""
    # as kept in 32 bits, but products may be longer
    start, stride = tl.load(numbers), tl.load(numbers + 1).to(tl.int64)
    taps, period = tl.load(numbers + 2), tl.load(numbers + 3)
    return start + row * stride + column // taps % period


@triton.jit
def reduce(pointers, numbers, programs, total, target, signs, tree, places, tails, settings, rates,
           groups, SIGNED: tl.constexpr, KINDS: tl.constexpr, AT_ONCE: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Add ``c_k`` to ``total``: products of weights and gradients by tail, and those of tree edges.

    The first program also fetches learning rates that are tensors.
    """
    if tl.program_id(0) == 0:
        for group in range(groups):
            pointer = tl.load(rates + 2 * group)
            if pointer != 0:
                rate = load(
                    pointer,
                    tl.zeros((1,), tl.int32),
                    tl.full((1,), True, tl.int1),
                    tl.load(rates + 2 * group + 1),
                )
                tl.store(settings + group * SETTINGS + LR + tl.zeros((1,), tl.int32), rate)
    program = programs + 4 * tl.program_id(0)
    tensor, first_row, last_row, first = (
        tl.load(program), tl.load(program + 1), tl.load(program + 2), tl.load(program + 3)
    )  # fmt: skip
    about, at = numbers + tensor * NUMBERS, pointers + tensor * POINTERS
    columns, weight, grad = tl.load(about + COLUMNS), tl.load(at + WEIGHT), tl.load(at + GRAD)
    if KINDS >= 0:
        kind: tl.constexpr = KINDS
    else:
        kind = tl.load(about + TYPE)
    column = first + tl.arange(0, BLOCK)
    if last_row < 0:
        # edges on the trees, from the first to the one before -last_row
        inside = column < -last_row
        edge = tl.load(about + EDGE) + column
        entry = load(grad, tl.load(places + edge, mask=inside, other=0), inside, kind)
        entry = entry * tl.load(tree + edge, mask=inside, other=0.0)
        if SIGNED:
            entry = entry * tl.load(signs + tails + edge, mask=inside, other=0.0)
        tl.atomic_add(
            total + tl.load(target + tails + edge, mask=inside, other=0), entry, mask=inside
        )
    elif tl.load(about + TAIL + 1) == 0:
        # the tail does not depend on the row: sum rows first
        inside = column < columns
        by_row = tl.zeros((AT_ONCE, BLOCK), tl.float64)
        for start in range(first_row, last_row, AT_ONCE):
            row = start + tl.arange(0, AT_ONCE)
            here = (row < last_row)[:, None] & inside[None, :]
            place = row[:, None].to(tl.int64) * columns + column[None, :]
            by_row += load(weight, place, here, kind) * load(grad, place, here, kind)
        tail = address(about + TAIL, 0, column)
        added = -tl.sum(by_row, 0)
        if SIGNED:
            added = added * tl.load(signs + tail, mask=inside, other=0.0)
        tl.atomic_add(total + tl.load(target + tail, mask=inside, other=0), added, mask=inside)
    else:
        inside = column < columns
        for start in range(first_row, last_row, AT_ONCE):
            row = start + tl.arange(0, AT_ONCE)
            here = (row < last_row)[:, None] & inside[None, :]
            place = row[:, None].to(tl.int64) * columns + column[None, :]
            entry = load(weight, place, here, kind) * load(grad, place, here, kind)
            tail = address(about + TAIL, row[:, None], column[None, :])
            entry = -entry
            if SIGNED:
                entry = entry * tl.load(signs + tail, mask=here, other=0.0)
            tl.atomic_add(total + tl.load(target + tail, mask=here, other=0), entry, mask=here)


@triton.jit
def ratio_of(chains, chain, mask, settings, groups, ADAM: tl.constexpr):
    """``R_k``, with what the last kernel needs: the ratio asked for, the
    smallest allowed, and moments.
    """
    table = settings + tl.load(groups + chain, mask=mask, other=0) * SETTINGS
    lr, decay, up = tl.load(table + LR), tl.load(table + DECAY), tl.load(table + UP)
    # the root has no path value; it stands for what is beyond the end, too
    value = tl.where(chain == 0, 1.0, by_chain(chains, VALUE, chain, mask))
    held = (by_chain(chains, HELD, chain, mask) != 0.0) | (chain == 0)
    total = by_chain(chains, TOTAL, chain, mask) * (1.0 - 2.0 * up)
    cap = tl.load(settings + CAP)
    if ADAM:
        # a bound on 1 / |p|
        size = tl.maximum(
            tl.abs(value), tl.where(cap == 0.0, 0.0, 1.0 / tl.where(cap == 0.0, 1.0, cap))
        )
        value = tl.where(value < 0.0, -size, size)
    gradient = tl.where(held, 0.0, total) / value
    mean = by_chain(chains, MEAN, chain, mask)
    if ADAM:
        second = by_chain(chains, SQUARE, chain, mask)
        age = by_chain(chains, AGE, chain, mask) + 1.0
        one, two = tl.load(table + BETA1), tl.load(table + BETA2)
        after = mean * one + gradient * (1.0 - one)
        squared = second * two + gradient * gradient * (1.0 - two)
        root = tl.sqrt(squared) / tl.sqrt(1.0 - tl.exp(age * tl.load(table + LOG2))) + tl.load(
            table + EPS
        )
        # with eps = 0, what never had a gradient keeps its value
        moved = (
            after
            / (1.0 - tl.exp(age * tl.load(table + LOG1)))
            / tl.where(root == 0.0, float("inf"), root)
        )
        after, squared = tl.where(held, mean, after), tl.where(held, second, squared)
        relative = moved / value
    else:
        momentum = tl.load(table + MOMENTUM)
        # as torch does, the first gradient enters whole
        after = mean * momentum + gradient * (
            1.0 - tl.load(table + DAMPENING) * tl.load(table + STARTED)
        )
        ahead = tl.where(tl.load(table + NESTEROV) != 0.0, gradient + momentum * after, after)
        moved = tl.where(momentum != 0.0, ahead, gradient)
        after, squared = tl.where(held | (momentum == 0.0), mean, after), mean
        # over p^2, with a bound on 1 / p^2
        square = value * value
        square = tl.where(
            cap == 0.0, square, tl.maximum(square, 1.0 / tl.where(cap == 0.0, 1.0, cap))
        )
        relative = moved * value / square
    asked = tl.where(held, 1.0, 1.0 - lr * decay - lr * relative)
    least = by_chain(chains, LEAST, chain, mask)
    size = tl.maximum(tl.abs(asked), least)
    return tl.where(asked < 0.0, -size, size), asked, least, after, squared


@triton.jit
def pass_on(chains, count, settings, groups, factor, limits, step, keep, tree, of_tails, of_edges,
            tails, edges, OTHERS: tl.constexpr, ADAM: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Factors by tail, and the weights on the trees, after the ratios."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < tails + edges
    tail = number < tails
    edge = inside & (number >= tails)
    place = tl.load(of_tails + number, mask=tail, other=0)
    place = tl.where(tail, place, tl.load(of_edges + number - tails, mask=edge, other=0))
    chain = place % count
    ratio, _, _, _, _ = ratio_of(chains, chain, inside, settings, groups, ADAM)
    change = tl.where(place >= count, 1.0 / ratio, ratio)
    old = tl.load(factor + number, mask=tail, other=0.0)
    tl.store(keep + number, change, mask=tail)
    moves = old
    if tl.load(settings + CAP) != 0.0:
        most = tl.load(limits + number, mask=tail, other=0.0)
        moves = tl.minimum(tl.maximum(old, -most), most)
    tl.store(step + number, moves * change, mask=tail)
    if not ADAM:
        change = tl.where(tail, change * change, change)
    tl.store(factor + number, old * change, mask=tail)
    weight = tl.load(tree + number - tails, mask=edge, other=0.0) * change
    if OTHERS:
        place = tl.load(of_edges + number - tails + edges, mask=edge, other=0)
        ratio, _, _, _, _ = ratio_of(chains, place % count, edge, settings, groups, ADAM)
        weight = weight * tl.where(place >= count, 1.0 / ratio, ratio)
    tl.store(tree + number - tails, weight, mask=edge)


@triton.jit
def by_tail(step, keep, static, numbers, row, column, mask, factors):
    """By what weights are multiplied, and what the steps of weights are."""
    tail = address(numbers, row, column)
    # (neither depends on the place where nothing by tail changes)
    dynamic = tl.where(factors == DYNAMIC, mask, False)
    moves = tl.load(step + tail, mask=dynamic, other=1.0)
    moves *= tl.load(static + tail, mask=tl.where(factors == STATIC, mask, False), other=1.0)
    return tl.load(keep + tail, mask=dynamic, other=1.0), moves


@triton.jit
def update(pointers, numbers, programs, settings, step, keep, static, heads, shares, ages,
           ADAM: tl.constexpr, KINDS: tl.constexpr, MIXED: tl.constexpr, AT_ONCE: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """All weights, edges on the trees too (they are written once more later), and
    what is remembered of them.

    Unless MIXED, factors by tail depend on the column alone, and those by head on the row alone
    or on the column alone.
    """
    program = programs + 4 * tl.program_id(0)
    tensor, first_row, last_row, first = (
        tl.load(program), tl.load(program + 1), tl.load(program + 2), tl.load(program + 3)
    )  # fmt: skip
    about, at = numbers + tensor * NUMBERS, pointers + tensor * POINTERS
    columns, weight, grad = tl.load(about + COLUMNS), tl.load(at + WEIGHT), tl.load(at + GRAD)
    if KINDS >= 0:
        kind: tl.constexpr = KINDS
    else:
        kind = tl.load(about + TYPE)
    first_moment, second_moment = tl.load(at + FIRST), tl.load(at + SECOND)
    table = settings + tl.load(about + GROUP) * SETTINGS
    lr, decay = tl.load(table + LR), tl.load(table + DECAY)
    up, share = 1.0 - 2.0 * tl.load(table + UP), tl.load(shares + tensor)
    column = first + tl.arange(0, BLOCK)
    inside = column < columns
    factors, tails, ends = tl.load(about + KIND), about + TAIL, about + HEAD
    # whether factors by tail depend on the row; those by head on the row, and on the column
    by_row, stride, period = tl.load(tails + 1), tl.load(ends + 1), tl.load(ends + 3)
    once = tl.where(by_row == 0, inside, False)
    kept_once, moves_once = by_tail(step, keep, static, tails, 0, column, once, factors)
    once = tl.where(stride == 0, inside, False)
    moves_once *= share * tl.load(heads + address(ends, 0, column), mask=once, other=1.0)
    if ADAM:
        one, two, age = tl.load(table + BETA1), tl.load(table + BETA2), tl.load(ages + tensor) + 1.0
        root = tl.sqrt(1.0 - tl.exp(age * tl.load(table + LOG2)))
        rate, eps = root / (1.0 - tl.exp(age * tl.load(table + LOG1))), tl.load(table + EPS) * root
    else:
        momentum, nesterov = tl.load(table + MOMENTUM), tl.load(table + NESTEROV) != 0.0
        # the first gradient enters whole
        damped = tl.where(tl.load(at + FRESH) != 0, 1.0, 1.0 - tl.load(table + DAMPENING))
    if weight != 0:
        for start in range(first_row, last_row, AT_ONCE):
            row = start + tl.arange(0, AT_ONCE)[:, None]
            here = (row < last_row) & inside[None, :]
            place = row.to(tl.int64) * columns + column[None, :]
            w, g = load(weight, place, here, kind), load(grad, place, here, kind) * up
            kept = tl.broadcast_to(kept_once[None, :], (AT_ONCE, BLOCK))
            moves = tl.broadcast_to(moves_once[None, :], (AT_ONCE, BLOCK))
            moves *= tl.load(
                heads + address(ends, row, row * 0),
                mask=tl.where((stride != 0) & (period == 1), row < last_row, False), other=1.0,
            )  # fmt: skip
            if MIXED:
                if by_row != 0:
                    kept, change = by_tail(
                        step, keep, static, tails, row, column[None, :], here, factors
                    )
                    moves *= change
                moves *= tl.load(
                    heads + address(ends, row, column[None, :]),
                    mask=tl.where((stride != 0) & (period != 1), here, False), other=1.0,
                )  # fmt: skip
            if ADAM:
                # by path values: 1 / (pre s) before the step
                g = g * (moves / kept)
                mean, square = (
                    load(first_moment, place, here, kind),
                    load(second_moment, place, here, kind),
                )
                mean = mean + (g - mean) * (1.0 - one)
                square = square * two + g * g * (1.0 - two)
                store(first_moment, place, mean, here, kind)
                store(second_moment, place, square, here, kind)
                bottom = tl.sqrt(square) + eps
                moved = tl.where(bottom == 0.0, 0.0, mean / tl.where(bottom == 0.0, 1.0, bottom))
                g = moved * rate
            elif first_moment != 0:
                buffer = load(first_moment, place, here, kind)
                after = tl.where(momentum != 0.0, buffer * momentum + g * damped, buffer)
                g = tl.where(momentum != 0.0, tl.where(nesterov, g + momentum * after, after), g)
                store(first_moment, place, after / kept, here, kind)
            w = w * (1.0 - lr * decay) * kept - lr * g * moves
            store(weight, place, w, here, kind)


@triton.jit
def finish(pointers, numbers, programs, chains, count, settings, groups, counts, places, tree, ages,
           tensors, blocks, ADAM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Everything that is kept by chain, how many steps tensors have taken, and
    the weights on the trees.
    """
    number = tl.arange(0, BLOCK)
    if tl.program_id(0) < blocks:
        chain = tl.program_id(0) * BLOCK + number
        inside = chain < count
        ratio, asked, least, after, squared = ratio_of(
            chains, tl.where(inside, chain, 0), inside, settings, groups, ADAM
        )
        for row in tl.static_range(2):
            found = (asked <= 0.0) if row == 0 else (tl.abs(asked) <= least)
            place = counts + row * count + chain
            tl.store(place, tl.load(place, mask=inside, other=0) + found.to(tl.int32), mask=inside)
        set_chain(chains, LEAST, chain, least / tl.abs(ratio), inside)
        set_chain(chains, MEAN, chain, after, inside)
        if ADAM:
            set_chain(chains, SQUARE, chain, squared, inside)
            held = by_chain(chains, HELD, chain, inside) != 0.0
            age = by_chain(chains, AGE, chain, inside)
            set_chain(chains, AGE, chain, tl.where(held, age, age + 1.0), inside)
        set_chain(chains, VALUE, chain, by_chain(chains, VALUE, chain, inside) * ratio, inside)
        set_chain(chains, TOTAL, chain, tl.zeros((BLOCK,), tl.float64), inside)
        if ADAM and tl.program_id(0) == 0:
            for start in range(0, tensors, BLOCK):
                tensor = start + number
                moved = tl.load(pointers + tensor * POINTERS, mask=tensor < tensors, other=0) != 0
                tl.store(
                    ages + tensor, tl.load(ages + tensor, mask=moved, other=0.0) + 1.0, mask=moved
                )
    else:
        program = programs + 4 * (tl.program_id(0) - blocks)
        tensor, last, first = tl.load(program), -tl.load(program + 2), tl.load(program + 3)
        about = numbers + tensor * NUMBERS
        weight = tl.load(pointers + tensor * POINTERS + WEIGHT)
        if weight != 0:
            inside = first + number < last
            edge = tl.load(about + EDGE) + first + number
            value = tl.load(tree + edge, mask=inside, other=0.0)
            store(
                weight,
                tl.load(places + edge, mask=inside, other=0),
                value,
                inside,
                tl.load(about + TYPE),
            )


def launch(_memory, kernel, programs, arguments, options):
    """Start a kernel with so many programs."""
    sizes = options | {"AT_ONCE": AT_ONCE, "BLOCK": BLOCK}
    own = {key: value for key, value in sizes.items() if key in kernel.arg_names}
    kernel[(programs,)](*arguments, **own, num_warps=WARPS)
