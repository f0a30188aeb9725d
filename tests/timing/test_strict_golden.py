"""Small streams under `strict`, their cycles computed by hand.

nFAW 17, nRCDR 11, nRAS 25, nRP 11, nRTP 2, nCCDS 2, nTREE 1, nBL 2, nCL 11, nTURN 6, nREFI 1900,
nRFC 350. W is a GWRITE, A0..A3 the G_ACTs, C a COMP, R a READRES, P a PRE; ``X@t`` issues at clock t.
"""

from dataclasses import replace

import pytest
from timing_programs import act, act_all, comp, loop, program, read, with_timing, write

from pimflow.errors import SpecError, TraceError
from pimflow.simulators.pim.checker import violations
from pimflow.simulators.pim.timing import issue_program, time_program, time_trace

GOLDEN = {
    "empty": ((), 0),
    # W@1, its bus until 1 + 32*2 = 65
    "one GWRITE": ((write(),), 65),
    # W@1, its bus until 1 + 4*2 = 9
    "a short GWRITE": ((write(bursts=4),), 9),
    # R@1, data at 1 + nCL + nBL = 14
    "one READRES": ((read(),), 14),
    # A0@1; done at 1 + 1
    "one G_ACT": ((act(0),), 2),
    # A0@1 A1@18 A2@35 A3@52 (nFAW); C@52+11 = 63; done at 64
    "first COMP": ((*act_all(), comp()), 64),
    # A0@1 A1@18 A2@35 A3@52; 32 C@63, 65, …, 63+31*2 = 125; R@126; data at 126+13 = 139
    "one row": ((*act_all(), comp(32), read()), 139),
    # W@1 A0@2 A1@19 A2@36 A3@53 (C from 64); C@65 as W ends at 65, last C@127; R@128; data at 141
    "one block": ((write(), *act_all(), comp(32), read()), 141),
    # As above, but W ends at 1+2*8 = 17: C@64 (A3@53 + 11), last C@126; R@127; data at 140
    "one block, short GWRITE": ((write(bursts=8), *act_all(), comp(32), read()), 140),
    # R@1; W@1+6 = 7; bus until 7+64 = 71
    "READRES, GWRITE": ((read(), write()), 71),
    # W@1, its last burst at 1+31*2 = 63; R@63+6 = 69; data at 82
    "GWRITE, READRES": ((write(), read()), 82),
    # W@1; W@65; bus until 129
    "two GWRITEs": ((write(0), write(1)), 129),
    # R@1; R@3; data at 16
    "two READRESs": ((read(0), read(1)), 16),
    # A0@1; P0@1+25 = 26; A0@26+11 = 37; done at 38
    "G_ACT, G_ACT to the same row": ((act(0), act(0)), 38),
    # A0..A3@1, 18, 35, 52; C@63; P0@65 (nRTP); A0@76; P1@77; A1@93 (nFAW; nRP 88); P2@94; A2@110;
    # P3@111; A3@127; C@138; done at 139
    "row switch": ((*act_all(0), comp(row=0), *act_all(1), comp(row=1)), 139),
    # C@63 reads buffer 0 until 65: W@65; bus until 129
    "GWRITE into a buffer in use": ((*act_all(), comp(buffer=0), write(0)), 129),
    # C@63; W into the other buffer at 64; bus until 128
    "GWRITE into the other buffer": ((*act_all(), comp(buffer=0), write(1)), 128),
    # C b0@63; the latch of buffer 1 is free: R b1@64; data at 77
    "READRES of the other latch": ((*act_all(), comp(buffer=0), read(1)), 77),
    # A3@52; 919 C@63, 65, …, 63+918*2 = 1899; the next could issue at 1901, past the refresh due at 1900:
    # P0..P3@1901 (nRTP), 1902, 1903, 1904; REF@1904+11 = 1915; A0..A3@1915+350 = 2265, 2282, 2299, 2316;
    # C@2327; done at 2328
    "refresh amid COMPs": ((*act_all(), loop(920, comp())), 2328),
    # as above, one COMP fewer: no refresh; last C@1899; done at 1900
    "no refresh after the end": ((*act_all(), loop(919, comp())), 1900),
    # … REF@1915; the program's own A0..A3@2265, 2282, 2299, 2316, nothing reopened; done at 2317
    "G_ACTs after a refresh": ((*act_all(), loop(919, comp()), *act_all(1)), 2317),
    # … REF@1915; the program's A0@2265, reopened A1@2282 A2@2299 A3@2316; C@2327; done at 2328
    "some G_ACTs after a refresh": ((*act_all(), loop(919, comp()), act(0), comp()), 2328),
    # 950 R@1, 3, …, 1899; the next could issue at 1901; REF@1900; R@2250; data at 2263
    "refresh amid READRESs": ((loop(951, read()),), 2263),
    # 950 R up to 1899; W could issue at 1905; REF@1900; W@2250; bus until 2314
    "refresh before a GWRITE": ((loop(950, read()), write()), 2314),
    # A0@1; 949 R@2, 4, …, 1898; the next could issue at 1900; P0@1900; REF@1911; R@2261; data at 2274
    "READRES needs no row": ((act(0), loop(950, read())), 2274),
}


@pytest.mark.parametrize("stream, cycles", GOLDEN.values(), ids=GOLDEN)
def test_golden(newton, stream, cycles):
    golden = program(stream)
    assert time_program(golden, newton).cycles == cycles
    assert violations(issue_program(golden, newton, 0), newton, golden) == []


def test_reopened_gangs_are_the_needed_ones(newton):
    counts = {name: time_program(program(GOLDEN[name][0]), newton).commands for name in GOLDEN}
    assert counts["refresh amid COMPs"]["G_ACT"] == 8
    assert counts["G_ACTs after a refresh"]["G_ACT"] == 8
    assert counts["some G_ACTs after a refresh"]["G_ACT"] == 8
    assert counts["READRES needs no row"]["G_ACT"] == 1
    assert counts["refresh amid COMPs"]["REF"] == counts["READRES needs no row"]["REF"] == 1
    assert counts["no refresh after the end"]["REF"] == 0


def test_readres_of_two_bursts(newton):
    # R@1, bus until 5; R@5; data at 5 + 11 + 2*2 = 20
    assert time_program(program((loop(2, read()),), readres_bursts=2), newton).cycles == 20
    # R@1, its last burst at 3; W@3+6 = 9; bus until 73
    assert time_program(program((read(), write()), readres_bursts=2), newton).cycles == 73


def test_several_refreshes_during_one_transfer(newton):
    # nBL 100: W@1, bus until 3201; REF@1900; W@3201, bus until 6401; REF@3800, 5700; W@6401 until 9601
    slow = with_timing(newton, nBL=100)
    result = time_program(program((loop(3, write()),)), slow)
    assert (result.cycles, result.commands["REF"]) == (9601, 3)


def test_refreshes_that_pile_up(newton):
    # REF takes longer than nREFI until it has caught up: R@1..99; REF@100, 220 (due 200), 340, 460, …:
    # the k-th at 100 + 120*(k-1), due at 100*k; they never catch up.
    with pytest.raises(TraceError, match="command 50: refreshes leave no time for it"):
        time_program(program((loop(51, read()),)), with_timing(newton, nREFI=100, nRFC=120))


def test_trace_is_one_buffer_and_counts_wrong_rows(newton):
    text = b"0x00000000 GWRITE\n" + b"".join(b"0x%08x G_ACT%d\n" % (g << 27, g) for g in range(4))
    text += b"0x00000000 COMP\n0x00000800 COMP\n0x00000840 COMP\nREADRES\n"
    # W@1 A0@2 A1@19 A2@36 A3@53; C@65, 67, 69; R@70; data at 83
    result = time_trace(text, newton)
    assert (result.cycles, result.violations, result.gwrite_bursts) == (83, 2, 32)


@pytest.mark.parametrize(
    "stream, command",
    [
        ((comp(),), 0),
        ((act(0), act(1), act(2), comp()), 3),
        ((*act_all(0), comp(2, row=0), comp(row=1)), 6),
        ((*act_all(0), act(2, 1), comp(row=0)), 5),
    ],
)
def test_comp_on_a_row_that_is_not_open(newton, stream, command):
    with pytest.raises(TraceError, match=f"region 'test', channel 1: command {command}: COMP on a row"):
        time_program(program((), stream), newton)
    with pytest.raises(TraceError, match=f"command {command}: COMP on a row"):
        issue_program(program(stream), newton, 0)


@pytest.mark.parametrize("stream", [(write(7),), (act(4),), (read(-1),)])
def test_operand_that_the_device_lacks(newton, stream):
    with pytest.raises(TraceError, match=r"channel 0: command 0: (buffer|gang) -?[0-9] is out of range"):
        time_program(program(stream), newton)


def test_device_that_the_program_was_not_lowered_for(newton):
    with pytest.raises(SpecError, match="lower it again"):
        time_program(program((act(0),)), replace(newton, gangs=8))


def test_result_over_channels(newton):
    block, row = GOLDEN["one block"][0], GOLDEN["one row"][0]
    result = time_program(program(block, row, ()), newton)
    assert result.channel_cycles == (141, 139, 0)
    assert result.time_ns == pytest.approx(141 * 8 / 7)
    assert result.commands == {"GWRITE": 1, "G_ACT": 8, "COMP": 64, "READRES": 2, "PRE": 0, "REF": 0}
    assert result.gwrite_bursts == 32
    assert result.utilisation == pytest.approx(64 * 2 / 141 / 3)
    assert (result.timing, result.pim) == ("strict", "newton-gddr6")
