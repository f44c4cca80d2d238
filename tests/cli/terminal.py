"""A terminal of a few columns and rows that interprets the output of commands."""

import os
import pty
import re
import threading
import time

ESCAPE = re.compile(r"\x1b\[(?P<arguments>[?0-9;]*)(?P<kind>[A-Za-z])")


class Terminal:
    """Interprets rich's output, and rejects any other control sequence."""

    def __init__(self, columns=80, rows=24):
        self.columns, self.rows = columns, rows
        self.lines = [""]
        self.row = self.column = 0
        self.styles = set()
        self.frames = []  # the visible text each time the cursor came to rest
        self.is_cursor_shown = True

    def feed(self, text):
        place = 0
        while place < len(text):
            char = text[place]
            if char == "\x1b":
                escape = ESCAPE.match(text, place)
                assert escape, repr(text[place : place + 20])
                self._control(escape["arguments"], escape["kind"])
                place = escape.end()
                continue
            place += 1
            if char == "\r":
                self.column = 0
            elif char == "\n":
                self._down()
            else:
                assert char.isprintable(), repr(char)
                self._write(char)

    def _control(self, arguments, kind):
        if kind == "A":
            top = max(0, len(self.lines) - self.rows)  # lines that have left the screen cannot be reached
            self.row = max(top, self.row - int(arguments or 1))
        elif kind == "K":
            assert arguments == "2"
            self.lines[self.row] = ""
        elif kind in "hl" and arguments == "?25":
            self.is_cursor_shown = kind == "h"
        elif kind == "m":
            self.styles.add(arguments)
        else:
            raise AssertionError(f"ESC[{arguments}{kind}")

    def _down(self):
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def _write(self, char):
        if self.column == self.columns:
            self.column = 0
            self._down()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
        self.column += 1

    def wait_for(self, text):
        deadline = time.monotonic() + 20
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)

    @property
    def text(self):
        return "\n".join(line.rstrip() for line in self.lines).rstrip()


class Pseudo:
    """A pseudo-terminal whose output a `Terminal` reads as it arrives; closed at the end of the block."""

    def __init__(self, columns=80, rows=24):
        self.screen = Terminal(columns, rows)
        self.raw = ""

    def __enter__(self):
        self._ours, self.theirs = pty.openpty()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def _read(self):
        waiting = b""
        while True:
            try:
                more = os.read(self._ours, 65536)
            except OSError:  # the other side is closed
                return
            waiting += more
            # an incomplete character or sequence waits for the rest
            decoded = waiting.decode(errors="ignore")
            cut = decoded.rfind("\x1b") if re.search(r"\x1b\[?[?0-9;]*$", decoded) else len(decoded)
            text = decoded[:cut]
            waiting = waiting[len(text.encode()) :]
            self.raw += text
            self.screen.feed(text)
            self.screen.frames.append(self.screen.text)

    def __exit__(self, *error):
        os.close(self.theirs)
        self._reader.join(timeout=30)
        os.close(self._ours)
