"""Random buffers, and oracles that know nothing of the planners."""

from hypothesis import strategies as st

from pimflow.core.liveness import Lifetime


def live_together(a: Lifetime, b: Lifetime) -> bool:
    return any(b.begin <= step < b.end for step in range(a.begin, a.end))


SIZES = st.integers(1, 5)
ALIGNMENTS = st.sampled_from([1, 1, 2, 3])


@st.composite
def tables(draw, most=7, sizes=SIZES, alignments=ALIGNMENTS):
    """Up to `most` buffers of one region over eight steps, now and then with a required offset."""
    lifetimes = []
    for index in range(draw(st.integers(1, most))):
        begin = draw(st.integers(0, 7))
        alignment = draw(alignments)
        fixed = draw(st.integers(0, 11)) == 0
        lifetimes.append(
            Lifetime(
                name=f"b{index}",
                begin=begin,
                end=draw(st.integers(begin + 1, 8)),
                size_bytes=draw(sizes),
                alignment_bytes=alignment,
                offset_bytes=alignment * draw(st.integers(0, 4)) if fixed else None,
            )
        )
    return lifetimes


def collide(lifetimes: list[Lifetime]) -> bool:
    """Whether two required offsets cannot both be had."""
    fixed = [life for life in lifetimes if life.offset_bytes is not None]
    return any(
        live_together(a, b) and bytes_of(a, a.offset_bytes) & bytes_of(b, b.offset_bytes)
        for index, a in enumerate(fixed)
        for b in fixed[:index]
    )


def bytes_of(life: Lifetime, offset: int) -> set[int]:
    return set(range(offset, offset + life.size_bytes))


def fits(lifetimes: list[Lifetime], capacity: int) -> bool:
    """Try every offset of every buffer."""
    order = sorted(lifetimes, key=lambda life: life.offset_bytes is None)
    memory = [0] * 8  # of a step: the bytes taken, as bits

    def place(index: int) -> bool:
        if index == len(order):
            return True
        life = order[index]
        offsets = range(0, capacity - life.size_bytes + 1, life.alignment_bytes)
        for offset in offsets if life.offset_bytes is None else [life.offset_bytes]:
            mask = ((1 << life.size_bytes) - 1) << offset
            steps = range(life.begin, life.end)
            if offset + life.size_bytes > capacity or any(memory[step] & mask for step in steps):
                continue
            for step in steps:
                memory[step] |= mask
            if place(index + 1):
                return True
            for step in steps:
                memory[step] &= ~mask
        return False

    return place(0)


def smallest_pool(lifetimes: list[Lifetime]) -> int:
    capacity = max(sum(life.size_bytes for life in lifetimes if life.begin <= s < life.end) for s in range(8))
    while not fits(lifetimes, capacity):
        capacity += 1
    return capacity


def network(layers: int, random) -> list[Lifetime]:
    """What a network leaves to plan: activations read by the next layer, and some by a much later one."""
    lifetimes = []
    for i in range(layers):
        reach = random.choice([1, 1, 1, 2, 3, random.randint(4, 40)])
        size = 64 * random.randint(1, 2000)
        end = min(i + reach, layers) + 1
        lifetimes.append(Lifetime(name=f"t{i}", begin=i, end=end, size_bytes=size, alignment_bytes=64))
        if random.random() < 0.2:
            work = 64 * random.randint(1, 500)
            lifetimes.append(Lifetime(name=f"w{i}", begin=i, end=i + 1, size_bytes=work, alignment_bytes=64))
    return lifetimes
