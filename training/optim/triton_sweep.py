"""Device code of a sweep of the gauge (``sweeps.py``): three launches,
whatever the number of tensors.

Entries are heads or tails of tensors that share a sum of squares; pairs say by which power of which
unit's scale an entry is multiplied, sorted by entry.
"""

# (no postponed annotations here: the compiler reads them)
# mypy: ignore-errors
import triton
import triton.language as tl

from pathspace.training.optim.triton_kernels import address, load, store

# columns of the table of tensors: type, rows, columns; twice four numbers that lead from row and
# column to an entry; then types of three buffers
TYPE, ROWS, COLUMNS, ONE, OTHER, BUFFERS = (tl.constexpr(i) for i in (0, 1, 2, 3, 7, 11))
NUMBERS = tl.constexpr(14)
# columns of the table of pointers: the tensor, then its buffers
POINTERS = tl.constexpr(4)


@triton.jit
def give(sums, found, entry, value, mask, starts, units, powers, voters, count, pairs):
    """Add squares to what enters or leaves the units of their entries, and to the group
    that their entry votes in.
    """
    first = tl.load(starts + entry, mask=mask, other=0)
    last = tl.load(starts + entry + 1, mask=mask, other=0)
    for i in range(pairs):
        here = mask & (first + i < last)
        power = tl.load(powers + first + i, mask=here, other=1.0)
        unit = tl.load(units + first + i, mask=here, other=0)
        tl.atomic_add(
            sums + tl.where(power < 0.0, unit + count, unit), value * tl.abs(power), mask=here
        )
    group = tl.load(voters + entry, mask=mask, other=-1)
    tl.atomic_add(found + tl.where(group < 0, 0, group), value, mask=mask & (group >= 0))


@triton.jit
def squares(pointers, numbers, programs, kinds, sums, found, starts, units, powers, voters, count,
            pairs, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sums of squares of weights, over the edges of each entry, for the units at it."""
    program = programs + 5 * tl.program_id(0)
    tensor, first_row, last_row = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    column = tl.load(program + 3) + tl.arange(0, BLOCK)
    about = numbers + tensor * NUMBERS
    side = about + tl.load(program + 4)
    kind, columns, weight = (
        tl.load(about + TYPE),
        tl.load(about + COLUMNS),
        tl.load(pointers + tensor * POINTERS),
    )
    shift = tl.load(kinds + 4 * tensor + 3)
    by_row, by_column = tl.load(side + 1) != 0, tl.load(side + 3) != 1
    inside = column < columns
    added = tl.zeros((BLOCK,), tl.float64)
    for start in range(first_row, last_row, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)
        here = (row < last_row)[:, None] & inside[None, :]
        value = load(weight, row[:, None].to(tl.int64) * columns + column[None, :], here, kind)
        # what the model adds to the tensor scales with it
        value = tl.where(here, value + shift, 0.0)
        value = value * value
        if by_row:
            if by_column:
                entry = address(side, row[:, None], column[None, :])
                give(sums, found, entry, value, here, starts, units, powers, voters, count, pairs)
            else:
                ends = address(side, row, row * 0)
                give(
                    sums,
                    found,
                    ends,
                    tl.sum(value, 1),
                    row < last_row,
                    starts,
                    units,
                    powers,
                    voters,
                    count,
                    pairs,
                )
        else:
            added += tl.sum(value, 0)
    if by_row == 0:
        give(
            sums,
            found,
            address(side, 0, column),
            added,
            inside,
            starts,
            units,
            powers,
            voters,
            count,
            pairs,
        )


@triton.jit
def change_units(sums, found, target, balanced, rate, changes, kept, phi, places, starts, groups,
                 weights, count, votes, BLOCK: tl.constexpr):  # fmt: skip
    """How the logarithm of every unit's scale changes, and by how much buffers follow."""
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < count
    entering = tl.load(sums + unit, mask=inside, other=0.0)
    leaving = tl.load(sums + count + unit, mask=inside, other=0.0)
    follows = tl.load(balanced + unit, mask=inside, other=0) != 0
    known = follows & (entering > 0.0) & (leaving > 0.0)
    ratio = tl.where(known, leaving, 1.0) / tl.where(known, entering, 1.0)
    change = tl.load(rate) * tl.log(ratio)
    first = tl.load(starts + unit, mask=inside, other=0)
    last = tl.load(starts + unit + 1, mask=inside, other=0)
    for i in range(votes):
        here = inside & (first + i < last)
        group = tl.load(groups + first + i, mask=here, other=0)
        size = tl.load(found + group, mask=here, other=0.0)
        off = tl.log(
            tl.where(size > 0.0, size / tl.load(target + group, mask=here, other=1.0), 1.0)
        )
        change += tl.load(weights + first + i, mask=here, other=0.0) * off
    tl.store(changes + unit, change, mask=inside)
    tl.store(kept + unit, tl.where(follows, change, 0.0), mask=inside)
    place = phi + tl.load(places + unit, mask=inside, other=0)
    tl.store(place, tl.load(place, mask=inside, other=0.0) + change, mask=inside)


@triton.jit
def log_factor(side, row, column, mask, starts, units, powers, changes, pairs):
    """The logarithm of the factor at an entry."""
    entry = address(side, row, column)
    first = tl.load(starts + entry, mask=mask, other=0)
    last = tl.load(starts + entry + 1, mask=mask, other=0)
    total = tl.zeros(entry.shape, tl.float64)
    for i in range(pairs):
        here = mask & (first + i < last)
        unit = tl.load(units + first + i, mask=here, other=0)
        power = tl.load(powers + first + i, mask=here, other=0.0)
        total += power * tl.load(changes + unit, mask=here, other=0.0)
    return total


@triton.jit
def scale(pointers, numbers, programs, kinds, starts, units, powers, changes, kept, sums, cleared,
          pairs, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Multiply tensors by the factors of both their sides, and buffers by a power
    of those of balanced units; clear the sums.
    """
    if tl.program_id(0) == 0:
        for start in range(0, cleared, BLOCK):
            number = start + tl.arange(0, BLOCK)
            tl.store(sums + number, tl.zeros((BLOCK,), tl.float64), mask=number < cleared)
    program = programs + 5 * tl.program_id(0)
    tensor, first_row, last_row = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    column = (tl.load(program + 3) + tl.arange(0, BLOCK))[None, :]
    about, at = numbers + tensor * NUMBERS, pointers + tensor * POINTERS
    kind, columns = tl.load(about + TYPE), tl.load(about + COLUMNS)
    for start in range(first_row, last_row, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)[:, None]
        here = (row < last_row) & (column < columns)
        place = row.to(tl.int64) * columns + column
        log = log_factor(about + ONE, row, column, here, starts, units, powers, changes, pairs)
        log += log_factor(about + OTHER, row, column, here, starts, units, powers, changes, pairs)
        held = log_factor(about + ONE, row, column, here, starts, units, powers, kept, pairs)
        held += log_factor(about + OTHER, row, column, here, starts, units, powers, kept, pairs)
        weight = tl.load(at)
        shift = tl.load(kinds + 4 * tensor + 3)
        store(
            weight,
            place,
            (load(weight, place, here, kind) + shift) * tl.exp(log) - shift,
            here,
            kind,
        )
        for i in tl.static_range(3):
            buffer = tl.load(at + 1 + i)
            if buffer != 0:
                own = tl.load(about + BUFFERS + i)
                power = tl.load(kinds + 4 * tensor + i)
                store(
                    buffer, place, load(buffer, place, here, own) * tl.exp(-power * held), here, own
                )
