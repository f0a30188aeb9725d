"""Two published designs with narrow operands beside pimflow: ``compare_published_narrow.py [TABLE…]``.

It prints the tables of docs/results_narrow.md, which ``update_results.py`` writes.
"""

import argparse
from dataclasses import replace

from papers import narrow_designs
from papers.pimflow_tables import markdown

import pimflow
from pimflow.hardware import PimSpec

CASCADED, GAIN = 1.07, 1.55  # IEEE CAL 24(1) 2025: over fp16; and of plain dequantisation over that
ACCUMULATORS = (1, 4, 16, 64)
# Hot Chips 38, by secondary notes: Llama-3.1-8B, 320 tokens, W4A8; tokens a second without and with PIM.
PHONE_CONTEXT, PHONE_PUBLISHED = 320, (27.0, 81.3)


def span(values: tuple[float, ...]) -> str:
    """A range of speed-ups as text."""
    low, high = min(values), max(values)
    return f"{low:.2f}x" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}x"


def lpddr5x_table() -> str:
    """LPDDR5X-PIM beside Samsung's note, as Markdown."""
    pim = PimSpec.load("lpddr5x-pim")
    rows = []
    for row in narrow_designs.speedup_comparisons(pim):
        refreshed = tuple(value / (1 - row.refresh_share) for value in row.speedups)
        published = row.published
        rows.append(
            [
                published.name,
                span((published.low, published.high)),
                span(row.speedups),
                f"{row.error:+.1%}",
                span(row.short_speedups),
                span(refreshed),
                span(row.phase_fences) if published.fenced else "",
            ]
        )
    head = [
        *("operands", "theirs", "ours", "difference", "2048 inputs", "over a read with refresh"),
        "with fences at GWRITEs only",
    ]
    return markdown(head, rows)


def groups_table() -> str:
    """Scales of groups on HBM-PIM beside the published figures, as Markdown."""
    rows = []
    for times in narrow_designs.group_scales(PimSpec.load("hbm-pim-narrow")):
        over_fp16 = times.cascade_ns / times.fp16_ns
        gain = times.plain_ns / times.cascade_ns
        rows.append(
            [
                f"{times.inputs} x {times.outputs}",
                f"{times.fp16_ns / 1e3:.1f}",
                f"{times.in_unit_ns / times.fp16_ns:.3f}",
                f"{over_fp16:.3f}",
                f"{over_fp16 / CASCADED - 1:+.1%}",
                f"{gain:.2f}x",
                f"{gain / GAIN - 1:+.1%}",
            ]
        )
    head = [
        *("inputs x outputs", "fp16, us", "int4 over fp16, by the device's file"),
        *("with an instruction a group", f"beside {CASCADED}", "plain dequantisation over that"),
        f"beside {GAIN}x",
    ]
    return markdown(head, rows)


def registers_table() -> str:
    """What the number of sums that a bank holds changes on LPDDR5X-PIM, as Markdown."""
    rows = []
    for count in ACCUMULATORS:
        pim = replace(PimSpec.load("lpddr5x-pim"), accumulators=count)
        shown = narrow_designs.speedup_comparisons(pim)
        rows.append([str(count), *(span(row.speedups) for row in shown)])
    return markdown(["sums a bank", *(row.name for row in narrow_designs.PUBLISHED)], rows)


def phone_table() -> str:
    """Decoding of llama-3-8b on a phone beside figures of Hot Chips 38, as Markdown."""
    generation = pimflow.generate(
        "llama-3-8b",
        tokens=[1, 2, 3],
        n=2,
        weight_type="int4",
        activation_type="int8",
        system=pimflow.system("phone"),
        context=PHONE_CONTEXT,
    )
    assert generation.verified
    full = generation.full_cache
    alone, plan = (1e9 / ns for ns in (full.tpot_ns_gpu_only, full.tpot_ns))
    before, after = PHONE_PUBLISHED
    rows = [
        ["Samsung, W4A8", f"{before:.1f}", f"{after:.1f}", f"{after / before:.2f}x"],
        ["pimflow, W4A8", f"{alone:.1f}", f"{plan:.1f}", f"{plan / alone:.2f}x"],
    ]
    return markdown(["", "without PIM, tokens/s", "with PIM, tokens/s", "speed-up"], rows)


def p3_table() -> str:
    """A block of Llama-2-7B on HBM-PIM with fp16, and with what P3-LLM has, term by term, as Markdown."""
    times = list(narrow_designs.p3_times(PimSpec.load("hbm-pim")))
    rows = [
        [
            row.name,
            *(f"{ns / 1e3:.0f}" for ns in (row.weights_ns, row.comps_ns, row.vectors_ns, row.attention_ns)),
            *(
                f"{wide / ns:.2f}x"
                for wide, ns in (
                    (times[0].weights_ns, row.weights_ns),
                    (times[0].attention_ns, row.attention_ns),
                    (times[0].block_ns, row.block_ns),
                )
            ),
        ]
        for row in times
    ]
    rows.append(["P3-LLM, average over decoding", *[""] * 6, f"{narrow_designs.P3_PUBLISHED:.1f}x"])
    head = [
        *("units", "weights, us", "of COMPs", "of vectors", "cache, us"),
        *("weights", "cache", "both"),
    ]
    return markdown(head, rows)


TABLES = {
    "lpddr5x": lpddr5x_table,
    "registers": registers_table,
    "groups": groups_table,
    "phone": phone_table,
    "p3": p3_table,
}


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)} (default: all)")
    arguments = parser.parse_args()
    if unknown := set(arguments.tables) - set(TABLES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    print("\n\n".join(TABLES[name]() for name in arguments.tables or TABLES))


if __name__ == "__main__":
    main()
