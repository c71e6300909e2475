"""A bar on a terminal, if tqdm is there."""

import io
import sys

import forebay
from conftest import DEMO
from forebay._progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_shows_what_is_done(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressBar() as bar:
        bar("downloading", 10, 50)
        bar("loading", 20, 100)
        bar("loading", 60, 100)
        shown = bar._bar
        assert (shown.desc, shown.n, shown.total) == ("loading", 60, 100)
        shown.refresh()
    assert "loading:  60%" in sys.stderr.getvalue() and bar._bar is None


def test_there_is_no_bar_without_a_terminal_or_tqdm(monkeypatch):
    with ProgressBar() as bar:
        bar("loading", 20, 100)
        assert bar._bar is None
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with ProgressBar() as bar:
        bar("loading", 20, 100)
        assert bar._bar is None
    forebay.Model(DEMO, device="cpu").close()
    assert sys.stderr.getvalue() == ""


def test_a_callback_is_told_of_loading():
    told = []
    forebay.Model(DEMO, device="cpu", progress=lambda *what: told.append(what)).close()
    assert told and all(doing == "loading" and done <= total for doing, done, total in told)
    assert told[-1][1] == told[-1][2]
