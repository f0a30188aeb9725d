"""Does Ctrl-C end whatever runs, at any instant, as KeyboardInterrupt?"""

import os
import random
import signal
import threading
import time

import pytest
import tvm
import tvm_ffi

import pimflow
from pimflow import frontend
from pimflow.compiler import build
from pimflow.compiler.verification import verify
from pimflow.hardware import system
from pimflow.host import interrupts
from pimflow.pim_backend.runtime import targets

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def as_on_the_command_line():
    before = {signum: signal.signal(signum, signal.default_int_handler) for signum in SIGNALS}
    yield
    assert [signal.getsignal(signum) for signum in SIGNALS] == [signal.default_int_handler] * 2
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture(scope="module")
def run():
    """Verifies a compiled network."""
    network, target_system = frontend.load("toy"), system()
    _, search_result = pimflow.search_network(network, target_system, None)
    built = build.build(network, search_result, targets.target_by_name("llvm+pim"))
    inputs = network.example_inputs()
    expected = network.reference(inputs)
    return lambda: verify(network, built, target_system, inputs, expected)


def is_interrupted(call, delay_seconds: float, stop: signal.Signals) -> bool:
    """Whether `call` was ended by `stop`, sent after a while."""
    timer = threading.Timer(delay_seconds, os.kill, (os.getpid(), stop))
    ended = False
    try:
        timer.start()
        call()
        timer.join()
        time.sleep(0.01)  # the signal is taken here at the latest
    except KeyboardInterrupt:
        ended = True
    timer.join()
    return ended


@pytest.mark.long
def test_verification_ends_at_any_instant_and_is_right_afterwards(run):
    run()
    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    draw = random.Random(0)
    for _ in range(60):
        assert is_interrupted(run, draw.uniform(0, seconds), draw.choice(SIGNALS))
    run().require()


@pytest.mark.parametrize("stop", SIGNALS)
def test_a_callback_ends_the_call(stop):
    seen = []
    with pytest.raises(KeyboardInterrupt), interrupts.defer_interrupts() as hold:
        callback = tvm_ffi.convert(hold.allow_interrupts(seen.append))
        callback("runs")
        signal.raise_signal(stop)
        callback("does not run")
        seen.append("not reached")
    assert seen == ["runs"]


def test_an_error_gives_way_to_an_interrupt():
    with pytest.raises(KeyboardInterrupt), interrupts.defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("what TVM makes of it")


def test_handlers_of_others_stay():
    def other(_number, _frame) -> None:
        raise ValueError("theirs")

    signal.signal(signal.SIGTERM, other)
    with interrupts.defer_interrupts():
        assert signal.getsignal(signal.SIGTERM) is other
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is other
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def test_another_thread_takes_no_signals():
    seen = []

    def work() -> None:
        with interrupts.defer_interrupts() as hold:
            seen.append(hold.allow_interrupts(lambda: signal.getsignal(signal.SIGINT))())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_pass_that_is_interrupted_says_so():
    @tvm.transform.module_pass(opt_level=0, name="interrupted")
    def signal_pass(mod, _context):
        signal.raise_signal(signal.SIGINT)
        return mod

    with pytest.raises(KeyboardInterrupt):
        tvm.transform.Sequential([signal_pass])(tvm.IRModule())


def test_what_is_done_is_not_interrupted():
    try:
        interrupts.ignore_signals()
        for signum in SIGNALS:
            signal.raise_signal(signum)
    finally:
        for signum in SIGNALS:
            signal.signal(signum, signal.default_int_handler)
