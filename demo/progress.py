"""A progress bar on a terminal; elsewhere a line every few seconds."""

import sys
import time


class Progress:
    def __init__(self, total: int):
        self.total, self.done, self.start = total, 0, time.monotonic()
        self.tty, self.shown = sys.stderr.isatty(), time.monotonic()

    def step(self, what: str):
        self.done += 1
        now, last = time.monotonic(), self.done == self.total
        if now - self.shown < (0.1 if self.tty else 10) and not last:
            return
        self.shown, left = now, (now - self.start) / self.done * (self.total - self.done)
        if self.tty:
            bar = "█" * (30 * self.done // self.total)
            line = f"\r\033[K  {bar:░<30} {self.done}/{self.total} steps, {left:.0f} s left · {what}"
            print("\r\033[K" if last else line, end="", file=sys.stderr, flush=True)
        elif not last:
            print(f"  {self.done}/{self.total} steps, about {left:.0f} s left ({what})", file=sys.stderr, flush=True)
