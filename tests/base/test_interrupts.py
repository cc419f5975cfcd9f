"""What a signal handler raises is told from what others raise; signals can wait until half a job is whole."""

import contextlib
import functools
import itertools
import signal
import subprocess
import sys
import threading

import pytest
from injection import InterruptAt

from sharded_loader.base.interrupts import is_from_outside, note_handlers, uninterrupted

SIGNAL = signal.SIGTERM


class TimeIsUp(Exception):
    pass


def raises(number, frame):
    raise TimeIsUp


class Handler:
    def __call__(self, number, frame):
        raise TimeIsUp

    method = __call__


HANDLERS = [raises, Handler(), Handler().method, functools.partial(lambda text, *_: raises(*_), "text")]


@contextlib.contextmanager
def handling(handler, number=SIGNAL):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def raised_by(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("handler", HANDLERS)
def test_what_a_handler_raises_is_from_outside(handler):
    with handling(handler):
        assert is_from_outside(raised_by(lambda: signal.raise_signal(SIGNAL)))
    assert not is_from_outside(raised_by(lambda: int("x")))
    assert is_from_outside(KeyboardInterrupt())


def test_a_replaced_handler_is_still_known_but_not_by_other_threads_nor_while_samples_are_read():
    def once(number, frame):
        signal.signal(SIGNAL, signal.SIG_IGN)
        raise TimeIsUp

    with handling(once):
        note_handlers()
        assert is_from_outside(raised_by(lambda: signal.raise_signal(SIGNAL)))
    with handling(raises):
        error = raised_by(lambda: signal.raise_signal(SIGNAL))
        assert is_from_outside(error) and not is_from_outside(error, reads=True)
    with handling(lambda number, frame: sys.exit(3)), pytest.raises(SystemExit) as caught:
        signal.raise_signal(SIGNAL)
    note_handlers()
    assert not is_from_outside(caught.value, reads=True)  # the handler is gone, and was not seen before
    with handling(raises):
        error = raised_by(lambda: signal.raise_signal(SIGNAL))
        assert in_thread(lambda: is_from_outside(error)) is False


def in_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found.pop()


def test_signals_of_this_thread_wait_for_the_end_of_the_block_and_all_handlers_run_once_in_order():
    came = []
    with handling(lambda *_: came.append("TERM")), handling(lambda *_: came.append("INT"), signal.SIGINT):
        with uninterrupted():
            for number in (SIGNAL, signal.SIGINT, SIGNAL):
                signal.raise_signal(number)
            with uninterrupted():
                signal.raise_signal(SIGNAL)
            assert came == []
        assert came == ["TERM", "INT"]
        signal.raise_signal(SIGNAL)
    assert came == ["TERM", "INT", "TERM"]
    came = []
    with handling(raises), handling(lambda *_: came.append("INT"), signal.SIGINT):
        with pytest.raises(TimeIsUp):
            with uninterrupted():
                signal.raise_signal(SIGNAL)
                signal.raise_signal(signal.SIGINT)
        assert came == ["INT"]
        assert signal.getsignal(SIGNAL) is raises
    before = signal.getsignal(SIGNAL)

    def inside():
        with uninterrupted():
            return signal.getsignal(SIGNAL) is before

    assert in_thread(inside)


def test_a_signal_at_any_line_loses_no_signal_and_all_handlers_are_put_back():
    for number in itertools.count(1):
        came = []

        def note_and_raise(number, frame, came=came):
            came.append(number)
            raise TimeIsUp

        has_begun, tracer, before = False, InterruptAt(number, ["interrupts.py"]), sys.gettrace()
        with handling(note_and_raise), handling(note_and_raise, signal.SIGINT):
            try:
                sys.settrace(tracer)
                with uninterrupted():
                    has_begun = True
                    signal.raise_signal(SIGNAL)
            except TimeIsUp:
                pass
            finally:
                sys.settrace(before)
            assert sorted(came) == [signal.SIGINT] * tracer.fired + [SIGNAL] * has_begun, number
            assert signal.getsignal(SIGNAL) is signal.getsignal(signal.SIGINT) is note_and_raise, number
        if not tracer.fired:
            assert number > 10
            return


def test_the_end_of_the_program_is_known_before_any_finalizer_runs():
    program = (
        "import weakref\nfrom sharded_loader.base.interrupts import program_ends\nclass Some: pass\nsome = Some()\n"
        "weakref.finalize(some, lambda: print(program_ends()))\nprint(program_ends())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
