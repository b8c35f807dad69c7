"""Device code of a sweep of the gauge (``sweeps.py``): three launches,
whatever the number of tensors.

Entries are heads or tails of tensors that share a sum of squares; pairs say by which power of which
unit's scale an entry is multiplied, sorted by entry.
"""

# (no postponed annotations here: the compiler reads them)
# mypy: ignore-errors
import triton
import triton.language as tl

from .triton_kernels import address, load, store

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
            pairs, KINDS: tl.constexpr, MIXED: tl.constexpr, AT_ONCE: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Sums of squares of weights, over the edges of each entry, for the units at it.

    Unless MIXED, an entry depends on the row alone or on the column alone.
    """
    program = programs + 5 * tl.program_id(0)
    tensor, first_row, last_row = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    column = tl.load(program + 3) + tl.arange(0, BLOCK)
    about = numbers + tensor * NUMBERS
    side = about + tl.load(program + 4)
    columns, weight = tl.load(about + COLUMNS), tl.load(pointers + tensor * POINTERS)
    if KINDS >= 0:
        kind: tl.constexpr = KINDS
    else:
        kind = tl.load(about + TYPE)
    shift = tl.load(kinds + 4 * tensor + 3)
    by_row = tl.load(side + 1) != 0
    inside = column < columns
    added = tl.zeros((AT_ONCE, BLOCK), tl.float64)
    for start in range(first_row, last_row, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)
        here = (row < last_row)[:, None] & inside[None, :]
        value = load(weight, row[:, None].to(tl.int64) * columns + column[None, :], here, kind)
        # what the model adds to the tensor scales with it
        value = tl.where(here, value + shift, 0.0)
        value = value * value
        if by_row:
            if MIXED:
                # (an entry of a row alone is the same for all columns)
                entry = address(side, row[:, None], column[None, :])
                give(sums, found, entry, value, here, starts, units, powers, voters, count, pairs)
            else:
                ends, ones = address(side, row, row * 0), tl.sum(value, 1)
                give(
                    sums, found, ends, ones, row < last_row, starts, units, powers, voters, count,
                    pairs,
                )  # fmt: skip
        else:
            added += value
    if by_row == 0:
        entry, ones = address(side, 0, column), tl.sum(added, 0)
        give(sums, found, entry, ones, inside, starts, units, powers, voters, count, pairs)


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
def logs(about, row, column, mask, starts, units, powers, changes, kept, pairs,
         BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr):  # fmt: skip
    """The logarithms of a tensor's factors, and of what its buffers follow, from those of its
    two sides whose entries depend on the row, on the column, or on both.
    """
    total, held = tl.zeros(mask.shape, tl.float64), tl.zeros(mask.shape, tl.float64)
    for i in tl.static_range(2):
        side = about + (ONE if i == 0 else OTHER)
        if BY_ROW and BY_COLUMN:
            own = tl.where((tl.load(side + 1) != 0) & (tl.load(side + 3) != 1), mask, False)
        elif BY_ROW:
            own = tl.where((tl.load(side + 1) != 0) & (tl.load(side + 3) == 1), mask, False)
        else:
            own = tl.where(tl.load(side + 1) == 0, mask, False)
        entry = address(side, row, column)
        first = tl.load(starts + entry, mask=own, other=0)
        last = tl.load(starts + entry + 1, mask=own, other=0)
        for k in range(pairs):
            here = own & (first + k < last)
            unit = tl.load(units + first + k, mask=here, other=0)
            power = tl.load(powers + first + k, mask=here, other=0.0)
            total += power * tl.load(changes + unit, mask=here, other=0.0)
            held += power * tl.load(kept + unit, mask=here, other=0.0)
    return total, held


@triton.jit
def scale(pointers, numbers, programs, kinds, starts, units, powers, changes, kept, sums, cleared,
          pairs, KINDS: tl.constexpr, MIXED: tl.constexpr, AT_ONCE: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
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
    columns, weight = tl.load(about + COLUMNS), tl.load(at)
    shift, inside = tl.load(kinds + 4 * tensor + 3), column < columns
    # entries by column alone are read once, those by row alone once for each row
    log, held = logs(
        about, 0, column, inside, starts, units, powers, changes, kept, pairs, False, True
    )
    factor = tl.exp(log)
    for start in range(first_row, last_row, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)[:, None]
        here = (row < last_row) & inside
        place = row.to(tl.int64) * columns + column
        by_row, held_by_row = logs(
            about, row, row * 0, row < last_row, starts, units, powers, changes, kept, pairs,
            True, False,
        )  # fmt: skip
        total, follows = tl.exp(by_row) * factor, held_by_row + held
        if MIXED:
            both, held_by_both = logs(
                about, row, column, here, starts, units, powers, changes, kept, pairs, True, True
            )
            total, follows = total * tl.exp(both), follows + held_by_both
        if KINDS >= 0:
            value = load(weight, place, here, KINDS)
            store(weight, place, (value + shift) * total - shift, here, KINDS)
        else:
            value = load(weight, place, here, tl.load(about + TYPE))
            store(weight, place, (value + shift) * total - shift, here, tl.load(about + TYPE))
        for i in tl.static_range(3):
            buffer = tl.load(at + 1 + i)
            if buffer != 0:
                power = tl.load(kinds + 4 * tensor + i)
                moved = tl.exp(-power * follows)
                if KINDS >= 0:
                    value = load(buffer, place, here, KINDS) * moved
                    store(buffer, place, value, here, KINDS)
                else:
                    kind = tl.load(about + BUFFERS + i)
                    store(buffer, place, load(buffer, place, here, kind) * moved, here, kind)
