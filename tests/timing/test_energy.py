"""Energy against sums written out anew, per command, channel and layer."""

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pimflow.core.kernel import ConvGeometry
from pimflow.errors import UnknownNameError
from pimflow.hardware import PimSpec, spec_names
from pimflow.hardware.pim import COMMANDS, ENERGY
from pimflow.pim_backend.programs.lowering import ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.simulators.pim.energy import CommandCounts, channel_energies_pj, pim_energy_pj, total_energy_pj
from pimflow.simulators.pim.timing import TimingResult, time_program, time_trace

with tarfile.open(Path(__file__).parent / "data/ramulator.tar.xz") as archive:
    TRACES = {name: archive.extractfile(name).read() for name in archive.getnames() if name.endswith(".pim")}
NONE = dict.fromkeys(COMMANDS, 0)
counts = st.fixed_dictionaries({name: st.integers(0, 10**6) for name in COMMANDS})
devices = st.sampled_from(spec_names("pim")).map(PimSpec.load)


def fork_joule(comp: int, gwrite: int, readres: int, prea: int) -> float:
    """Joule, with the literal numbers of its source."""
    return (
        comp / 32 * 16 * (32 * 16 * 1.1e-12 + 32 * 0.175814e-9 + 1.16822e-9 + 32 * 16 * 0.4e-12)
        + gwrite * 0.181995e-9
        + readres * 0.175814e-9
        + prea * 16 * 0.03183e-9
    )


@given(counts, devices)
def test_the_forks_energy(commands, pim):
    """On every device: the fork knows one."""
    energy = pim_energy_pj(CommandCounts(commands=commands), pim, pim.dtypes[0], "ramulator-pimflow")
    expected = fork_joule(*(commands[name] for name in ("COMP", "GWRITE", "READRES", "PRE")))
    assert sum(energy.values()) * 1e-12 == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", sorted(TRACES)[::6])
def test_the_forks_energy_of_its_traces(newton, name):
    """Commands counted in the text; a refresh closes all banks, once for every one that found a row open."""
    result = time_trace(TRACES[name], newton, "ramulator-pimflow")
    lines = TRACES[name].decode().splitlines()
    text = {word: sum(word in line for line in lines) for word in ("COMP", "GWRITE", "READRES")}
    counts = CommandCounts(commands=result.commands)
    energy = pim_energy_pj(counts, newton, "fp16", "ramulator-pimflow")
    expected = fork_joule(text["COMP"], text["GWRITE"], text["READRES"], result.commands["PRE"])
    assert sum(energy.values()) * 1e-12 == pytest.approx(expected, rel=1e-12)
    assert 0 < result.commands["PRE"] <= result.commands["REF"]


def test_a_block_by_hand(newton):
    """A GWRITE of 32 columns, four G_ACTs, 32 COMPs, a READRES, four PREs and a REF on newton-gddr6."""
    commands = {"GWRITE": 1, "G_ACT": 4, "COMP": 32, "READRES": 1, "PRE": 4, "REF": 1}
    energy = pim_energy_pj(CommandCounts(commands=commands, gwrite_bursts=32), newton, "fp16")
    assert energy == pytest.approx(
        {
            # 32 columns in 16 banks: 16 x (1.1 + 0.4) + 175.814 + 36.507 = 236.321 pJ each
            "comp": 512 * 236.321,
            "gwrite": 32 * 181.995,
            "readres": 175.814,
            "activate": 16 * 909.0,
            "precharge": 16 * 31.83,
            "refresh": 28000.0,
            # 33 bursts of 256 bit
            "io": 33 * 256 * 7.5,
        }
    )


def test_a_mac_of_aim_costs_what_its_power_script_says():
    """Three times the read power for 1 ns, over 256 MACs."""
    aim = PimSpec.load("aim-gddr6")
    energy = pim_energy_pj(CommandCounts(commands=NONE | {"COMP": 1000, "G_ACT": 1}), aim, "bf16")
    assert energy["comp"] == pytest.approx(1000 * 3 * 876.3 / 2 * 1.0, rel=1e-4)
    assert energy["activate"] == pytest.approx(16 * 132.6 / 2 * 44.5, rel=1e-4)


@given(counts, devices, st.integers(0, 10**6))
def test_commands_are_charged_alone(commands, pim, bursts):
    """Energy is the sum over commands of each kind's own, and grows with every one."""
    dtype = pim.dtypes[0]

    def energy_pj(commands: dict[str, int], bursts: int = 0) -> float:
        counts = CommandCounts(commands=commands, gwrite_bursts=bursts, readres_bursts=2)
        return sum(pim_energy_pj(counts, pim, dtype).values())

    total_pj, sum_pj = energy_pj(commands, bursts), energy_pj(NONE, bursts)
    for name in COMMANDS:
        command_pj = energy_pj(NONE | {name: 1})
        sum_pj += commands[name] * command_pj
        assert command_pj >= 0
    assert total_pj == pytest.approx(sum_pj)


@pytest.mark.parametrize("key", ENERGY)
def test_every_price_of_a_file_is_charged(newton, key):
    counts = CommandCounts(commands=dict.fromkeys(COMMANDS, 1), gwrite_bursts=1)

    def energy(pim: PimSpec) -> float:
        return sum(total_energy_pj(channel_energies_pj([counts], pim, "fp16", time_ns=1.0)).values())

    dearer = replace(newton, energy=newton.energy | {key: newton.energy[key] + 1})
    assert energy(dearer) > energy(newton) + 0.5


@pytest.mark.parametrize("name", ["newton-gddr6", "newton-hbm2", "aim-gddr6"])
def test_channels_add_up_to_the_layer(name):
    """Each channel timed as a program of its own, against the layer's counts."""
    pim = PimSpec.load(name)
    dtype = pim.dtypes[0]
    geometry = ConvGeometry(n=1, h=7, w=7, c=40, oc=70)
    order = schedules(geometry, pim, dtype)[0]
    program = lower(ProgramRequest("r", geometry, order), pim, dtype=dtype, channels=3)
    layer = time_program(program, pim)

    def counts(result: TimingResult) -> CommandCounts:
        bursts = {"gwrite_bursts": result.gwrite_bursts, "readres_bursts": program.readres_bursts}
        return CommandCounts(commands=result.commands, **bursts)

    channel_results = [time_program(replace(program, channels=(nodes,)), pim) for nodes in program.channels]
    channels = channel_energies_pj(list(map(counts, channel_results)), pim, dtype, time_ns=layer.time_ns)
    assert len(channels) == 3
    total = total_energy_pj(channels)
    background = total.pop("background")
    assert total == pytest.approx(pim_energy_pj(counts(layer), pim, dtype))
    # mW times ns are pJ
    assert background == pytest.approx(3 * pim.energy["background_mw_per_channel"] * layer.time_ns)


def test_the_fork_charges_no_background(newton):
    counts = CommandCounts(commands=dict.fromkeys(COMMANDS, 1), gwrite_bursts=32)
    channels = channel_energies_pj([counts] * 2, newton, "fp16", time_ns=1e3, mode="ramulator-pimflow")
    assert set(total_energy_pj(channels)) == {"comp", "gwrite", "readres", "precharge"}
    assert total_energy_pj(()) == {}


def test_an_unknown_mode(newton):
    with pytest.raises(
        UnknownNameError, match="unknown energy mode 'ramulator'; did you mean ramulator-pimflow"
    ):
        pim_energy_pj(CommandCounts(commands=NONE), newton, "fp16", mode="ramulator")


@pytest.mark.parametrize("name", spec_names("pim"))
def test_a_write_pays_for_its_columns_and_the_pins(name):
    pim = PimSpec.load(name)
    dtype = pim.dtypes[0]
    counts = CommandCounts(commands=NONE, gwrite_bursts=7)
    without = pim_energy_pj(counts, pim, dtype)
    with_write = replace(counts, commands=NONE | {"WRITE": 2}, write_bursts=5)
    written = pim_energy_pj(with_write, pim, dtype)
    assert written["write"] == 5 * pim.energy["column_write_pj"] > 0
    pins_pj = 5 * 8 * pim.column_bytes * pim.energy["io_pj_per_bit"]
    assert written["io"] - without["io"] == pytest.approx(pins_pj)


def test_written_latches_have_a_price_on_the_channels_that_write_them():
    """Other channels may be idle; the total is of all."""
    pim = PimSpec.load("aim-gddr6")
    idle, reads = CommandCounts(commands=NONE), CommandCounts(commands=NONE | {"READRES": 3})
    works = CommandCounts(commands={**reads.commands, "WRBIAS": 3})
    channels = channel_energies_pj([idle, works], pim, "fp16")
    plain = channel_energies_pj([reads], pim, "fp16")
    total = total_energy_pj(channels)
    assert "wrbias" not in channels[0] and total["wrbias"] == 3 * pim.energy["latch_write_pj"]
    assert channels[1]["io"] == 2 * plain[0]["io"]
    assert sum(total.values()) == pytest.approx(sum(sum(channel.values()) for channel in channels))
