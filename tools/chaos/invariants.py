"""The invariants: what must hold whatever clients do. `Watch` checks them and collects the violations."""

import asyncio
import collections
import time

from server import metrics, requests_by_route
from wire import Broken

INVARIANTS = {
    "ends": "every request whose client stays ends",
    "text": "answers equal those of a lone client",
    "status": "statuses and streams are as documented",
    "memory": "memory stays within --memory and returns to its level",
    "rest": "the idle server uses no processor time",
    "metrics": "/metrics adds up",
    "alive": "the server lives, answers /health in time and does not panic",
    "leaves": "SIGTERM ends the server in time",
}

# An idle server may use this share of one processor.
IDLE_SHARE = 0.03
IDLE_SECONDS = 4
# Resident memory may exceed its level by this much, because allocators keep memory.
SLACK = 16 << 20
SETTLE_SECONDS = 10
# Most of /health's time is waiting for one of two processors.
HEALTH_SECONDS = 3


class Watch:
    """Collects events and checks the invariants."""

    def __init__(self, faults, log):
        self.faults, self.log = faults, log
        self.origin = time.monotonic()
        self.open = {}
        self.moved = time.monotonic()
        self.outcomes = collections.Counter()
        self.checked = collections.Counter()
        self.violations = []
        self.place = "start"
        self.forget()

    def forget(self):
        """Resets the counts for a new server."""
        self.prompt_tokens = self.tokens = 0
        # What requests that were not seen to their end may have added.
        self.loose_prompt_tokens = self.loose_tokens = self.loose_answers = 0

    # What clients report.

    def begin(self, record):
        self.open[id(record)] = record
        self.checked["ends"] += 1

    def end(self, record):
        self.open.pop(id(record), None)
        self.progress()
        self.outcomes[record.kind, record.outcome] += 1
        print(record.line(self.origin), file=self.log, flush=True)
        self.checked["status"] += 1
        # An error is right if the drive fails; a connection that breaks off is not.
        excused = record.outcome == "failed" and self.faults.could_fail(record.start, record.end)
        wrong = record.outcome in ("failed", "broken") or (record.outcome == "refused" and record.kind != "malformed")
        if wrong and not excused:
            self.violate("status", f"{record.outcome}, status {record.status}: {record.detail}", record)

    def answered(self, record, question, answer, expected):
        self.prompt_tokens += answer.prompt_tokens * question.n
        self.tokens += answer.completion_tokens
        self.checked["text"] += 1
        if answer.choices != expected.choices:
            self.violate("text", f"{answer.choices} instead of {expected.choices}", record)

    def may_leave(self, question):
        self.may_generate(question.most_tokens, question.answers, question.answers * 1024)

    def may_generate(self, tokens, answers, prompt_tokens):
        self.loose_tokens += tokens
        self.loose_answers += answers
        self.loose_prompt_tokens += prompt_tokens

    def progress(self):
        self.moved = time.monotonic()

    def violate(self, invariant, what, record=None):
        line = record.line(self.origin) if record else None
        self.violations.append((invariant, self.place, what, line))
        print(f"VIOLATION ({invariant}, {self.place}): {what[:600]}" + (f"\n  {line}" if line else ""), flush=True)

    def holds(self, invariant, condition, what):
        """Checks an invariant, and returns whether it holds."""
        self.checked[invariant] += 1
        if not condition:
            self.violate(invariant, what)
        return condition

    # Checked while there are clients.

    async def listen(self, wire, over):
        """Asks /health again and again; the time that this process itself is late is subtracted."""
        while not over.is_set():
            start = time.monotonic()
            await asyncio.sleep(0.3)
            late = time.monotonic() - start - 0.3
            start = time.monotonic()
            try:
                status, _ = await asyncio.wait_for(wire.get("/health"), 60)
            except (Broken, asyncio.TimeoutError) as error:
                self.holds("alive", False, f"/health: {error!r} after {time.monotonic() - start:.1f} s")
                await asyncio.sleep(1)
                continue
            took = time.monotonic() - start - late
            self.holds("alive", status == 200 and took < HEALTH_SECONDS, f"/health: {status} after {took:.1f} s")

    async def drain(self, tasks, patience):
        """Waits for the clients that are left. Returns those that wait for ever: no client received anything for `patience` seconds."""
        self.progress()
        while pending := [task for task in tasks if not task.done()]:
            await asyncio.wait(pending, timeout=1)
            if time.monotonic() - self.moved > patience:
                for record in self.open.values():
                    self.violate("ends", f"no answer, and no client received anything for {patience} s", record)
                return pending
        for task in tasks:
            task.result()
        return []

    # Checked after the clients have left.

    async def quiet(self, server, wire, level):
        """Checks a server without clients. `level` is the level that its memory must return to, if that is known."""
        numbers = await self.gauges(wire)
        self.add_up(numbers, wire.ledger)
        await self.at_rest(server)
        if level is not None:
            await self.memory(server, level)
        said = server.said()
        self.holds("alive", server.is_alive(), f"the server ended with {server.process.poll()}")
        # A log line of a request may quote these words, but does not begin with them.
        panics = [line for line in said.splitlines() if line.startswith("thread ") and "panicked at" in line]
        self.holds("alive", not panics, f"the server panicked: {panics[:3]}")
        status, body = await wire.get("/ready")
        self.holds("alive", status == 200, f"/ready: {status} {body}")
        return numbers

    async def gauges(self, wire):
        """Waits until nothing is open, and gives the metrics of that moment."""
        deadline = time.monotonic() + SETTLE_SECONDS
        names = [f"forebay_requests_{name}" for name in ("running", "waiting", "open")]
        while True:
            before = wire.ledger.answered.copy()
            _, text = await wire.get("/metrics")
            numbers = metrics(text)
            left = {name: numbers[name] for name in names if numbers[name]}
            if not left or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.2)
        self.ledger = before
        self.holds("metrics", not left, f"there are no clients, but {left}")
        return numbers

    def add_up(self, numbers, ledger):
        counted = requests_by_route(numbers)
        for route in {route for route, _ in [*counted, *self.ledger]}:
            extra = 0
            for status in {status for r, status in [*counted, *self.ledger] if r == route}:
                seen, told = self.ledger[route, status], counted.get((route, status), 0)
                self.holds("metrics", told >= seen, f"{route} {status}: clients got {seen}, the server counts {told}")
                extra += max(0, told - seen)
            unknown = ledger.unknown[route]
            self.holds("metrics", extra <= unknown, f"{route}: {extra} too many are counted, only {unknown} clients left early")
        for name, least, loose in [
            ("prompt_tokens", self.prompt_tokens, self.loose_prompt_tokens),
            ("generated_tokens", self.tokens, self.loose_tokens),
            ("answers_cancelled", 0, self.loose_answers),
        ]:
            told = int(numbers[f"forebay_{name}_total"])
            text = f"{name} is {told}, but clients know of {least} and at most {loose} more"
            self.holds("metrics", least <= told <= least + loose, text)
        errors = self.faults.counts.get("error", 0)
        failed = int(numbers["forebay_answers_failed_total"])
        self.holds("metrics", failed == 0 or errors > 0, f"{failed} answers failed, but no read did")

    async def at_rest(self, server):
        """CPU time during a few seconds without clients. The server may need a moment to become idle."""
        for attempt in range(3):
            before, busy = server.processor_seconds(), set()
            for _ in range(IDLE_SECONDS * 5):
                await asyncio.sleep(0.2)
                busy.update(server.busy_threads())
            used = server.processor_seconds() - before
            if used <= IDLE_SHARE * IDLE_SECONDS:
                break
        text = f"{used:.2f} s of processor time in {IDLE_SECONDS} idle seconds (threads: {sorted(busy)})"
        self.holds("rest", used <= IDLE_SHARE * IDLE_SECONDS, text)

    async def memory(self, server, level):
        """Waits a while for resident memory to return to its level."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (now := server.resident()[0]) > level + SLACK and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
        self.holds("memory", now <= level + SLACK, f"resident memory stays at {mib(now)}, its level was {mib(level)}")

    def within(self, budget, peak):
        self.holds("memory", peak <= budget, f"resident memory reached {mib(peak)}, --memory is {mib(budget)}")


def mib(size):
    return f"{size / 2**20:.0f} MiB"
