"""The kinds of clients. Each kind does one thing to the server, well-behaved or hostile, and records the outcome."""

import asyncio
import dataclasses
import json
import time

import bad
from faults import wait
from questions import Failed, Malformed, family, filler
from wire import Broken

PROBES = ("/health", "/ready", "/metrics", "/props", "/v1/models", "/openapi.json", "/v1/models/other", "/")
# A client is told to come back later when the server is full.
FULL = 429


@dataclasses.dataclass
class Record:
    """One line of the log of requests."""

    client: int
    kind: str
    what: str
    start: float
    end: float = None
    status: int = None
    outcome: str = "open"
    detail: str = ""

    def line(self, origin):
        fields = dataclasses.asdict(self)
        fields["start"] = round(self.start - origin, 3)
        fields["end"] = self.end and round(self.end - origin, 3)
        return json.dumps(fields, ensure_ascii=False)


class Crowd:
    """Many clients of one server, and what all of them share."""

    def __init__(self, wire, questions, groups, expected, watch):
        self.wire, self.questions, self.groups = wire, questions, groups
        # The answers of a lone client, by the questions' names.
        self.expected = expected
        # Receives all events (`invariants.Watch`).
        self.watch = watch
        # Names of kinds of clients to leave out.
        self.without = ()
        # New questions. The answers that a lone client gets are asked for when all others have left.
        self.unknown = []
        # Set when the round is over: no client begins anything new.
        self.over = asyncio.Event()

    async def live(self, number, chance):
        """Runs a client: it does one thing after the other, and rests in between."""
        await wait(self.over, chance.uniform(0, 4))
        kinds, weights = zip(*((kind, weight) for kind, weight in KINDS.items() if kind.__name__ not in self.without))
        while not self.over.is_set():
            kind = chance.choices(kinds, weights)[0]
            await kind(self, number, chance)
            await wait(self.over, chance.choice((0, 0, chance.uniform(0, 1), chance.uniform(0, 4))))

    async def attempt(self, record, work):
        """Runs one action of a client, and records its outcome."""
        self.watch.begin(record)
        try:
            record.outcome = await work
        except Failed as error:
            record.outcome, record.detail = "failed", str(error)
        except (Malformed, Broken, KeyError, ValueError, TypeError) as error:
            record.outcome, record.detail = "broken", repr(error)
        except asyncio.CancelledError:
            record.outcome = "given up"
            raise
        finally:
            record.end = time.monotonic()
            self.watch.end(record)
        return record

    async def ask(self, kind, number, chance, question, stream=None, pause=None, **how):
        """Asks a question and compares the answer with a lone client's. `pause` returns the seconds to wait between two events."""
        stream = chance.random() < 0.6 if stream is None else stream
        what = f"{question.name}, {'streamed' if stream else 'whole'}"
        record = Record(number, kind, what, time.monotonic())

        async def work():
            async with await self.wire.send("POST", question.api.path, question.body(stream), source(number), **how) as exchange:
                record.status = await exchange.head()
                if record.status != 200:
                    body = await exchange.body()
                    record.detail = body.decode()[:300]
                    return "full" if record.status == FULL else "failed" if record.status >= 500 else "refused"
                if stream:
                    answer = await question.api.stream(self.paced(exchange.events(), pause))
                else:
                    answer = question.api.whole(json.loads(await exchange.body()))
            # The first to ask is a lone client, but for strangers.
            self.watch.answered(record, question, answer, self.expected.setdefault(question.name, answer))
            return "answered"

        return await self.attempt(record, work())

    async def paced(self, events, pause):
        async for event in events:
            if event is None or event.get("type") != "ping":
                self.watch.progress()
            yield event
            if pause and not self.over.is_set():
                await wait(self.over, pause())

    # The kinds of clients. `chance` makes all their random choices.

    async def steady(self, number, chance):
        """Asks, waits, reads all of the answer."""
        await self.ask("steady", number, chance, chance.choice(self.questions))

    async def slow(self, number, chance):
        """Reads its answer slowly, through a small window."""
        pause = lambda: chance.uniform(0.05, 0.5)
        await self.ask("slow", number, chance, chance.choice(self.questions), stream=True, pause=pause, receive_buffer=4096)

    async def trickle(self, number, chance):
        """Sends its request in pieces."""
        await self.ask("trickle", number, chance, chance.choice(self.questions), trickle=lambda: chance.uniform(0, 0.3))

    async def leaver(self, number, chance, question=None):
        """Leaves before the answer is complete: politely or not, after some events or some time."""
        question = question or chance.choice(self.questions)
        stream, after = chance.random() < 0.7, chance.choice((0.01, 0.05, 0.15, 0.4, 1.0)) * chance.uniform(0.5, 1.5)
        record = Record(number, "leaver", f"{question.name}, leaves after {after:.3f} s", time.monotonic())

        async def work():
            exchange = await self.wire.send("POST", question.api.path, question.body(stream), source(number))
            self.watch.may_leave(question)
            try:
                async with asyncio.timeout(after):
                    record.status = await exchange.head()
                    async for _ in exchange.pieces():
                        pass
            except TimeoutError:
                pass
            exchange.leave(abruptly=chance.random() < 0.5)
            return "left"

        await self.attempt(record, work())

    async def mute(self, number, chance):
        """Asks and never reads."""
        question = chance.choice(self.questions)
        record = Record(number, "mute", question.name, time.monotonic())

        async def work():
            exchange = await self.wire.send(
                "POST", question.api.path, question.body(True), source(number), receive_buffer=4096
            )
            self.watch.may_leave(question)
            await wait(self.over, chance.uniform(1, 15))
            exchange.leave()
            return "left"

        await self.attempt(record, work())

    async def family(self, number, chance):
        """Several clients ask at the same time for texts with the same beginning; the first soon leaves."""
        await self.begin_alike(number, chance, chance.choice(self.groups))

    async def strangers(self, number, chance):
        """A family whose beginning the server has not seen yet, behind long texts that keep it busy."""
        name = f"stranger {number}/{chance.randrange(1 << 32)}"
        fillers = [filler(chance, f"{name}, filler {i}") for i in range(chance.randint(0, 6))]
        work = [asyncio.create_task(self.ask("filler", number, chance, question)) for question in fillers]
        group = family(chance, name)
        self.unknown += group
        await self.begin_alike(number, chance, group)
        await asyncio.gather(*work)

    async def begin_alike(self, number, chance, group):
        leader, *followers = chance.sample(group, len(group))
        tasks = [asyncio.create_task(self.leaver(number, chance, leader))]
        for question in followers:
            await asyncio.sleep(chance.choice((0, 0.01, 0.05)))
            leaves = chance.random() < 0.3
            work = self.leaver(number, chance, question) if leaves else self.ask("follower", number, chance, question)
            tasks.append(asyncio.create_task(work))
        await asyncio.gather(*tasks)

    async def prober(self, number, chance):
        """Sends requests that cost nothing."""
        path = chance.choice(PROBES)
        record = Record(number, "prober", path, time.monotonic())

        async def work():
            record.status, _ = await self.wire.get(path, source=source(number))
            return "answered"

        await self.attempt(record, work())

    async def malformed(self, number, chance):
        """Sends invalid requests."""
        method, path, body = chance.choice(bad.MALFORMED)
        record = Record(number, "malformed", f"{method} {path} {body[:60]!r}", time.monotonic())

        async def work():
            async with await self.wire.send(method, path, body, source(number)) as exchange:
                record.status = await exchange.head()
                record.detail = (await exchange.body()).decode()[:300]
            return "refused" if 400 <= record.status < 500 else "failed"

        await self.attempt(record, work())

    async def garbage(self, number, chance):
        """Sends bytes that are not a request."""
        data = chance.choice(bad.GARBAGE)
        record = Record(number, "garbage", repr(data[:40]), time.monotonic())

        async def work():
            reader, writer = await self.wire.connect(source(number))
            try:
                writer.write(data)
                async with asyncio.timeout(2):
                    record.detail = (await reader.read(100)).decode("latin-1").partition("\r\n")[0]
            except (TimeoutError, OSError):
                pass
            finally:
                writer.close()
            return "left"

        await self.attempt(record, work())

    async def unfinished(self, number, chance):
        """Begins a request, and leaves in the middle of it."""
        path = chance.choice(bad.UNFINISHED)
        record = Record(number, "unfinished", path, time.monotonic())
        data = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 400000\r\n\r\n".encode() + b"{" + b" " * 300_000
        data = data[: chance.choice((7, 60, len(data)))]

        async def work():
            _, writer = await self.wire.connect(source(number))
            # The server may or may not count it.
            self.wire.ledger.unknown[path] += 1
            writer.write(data)
            await wait(self.over, chance.uniform(0, 10))
            writer.close()
            return "left"

        await self.attempt(record, work())

    async def huge(self, number, chance):
        """Sends a body that is large in some way."""
        kind, path, body = bad.huge(chance)
        record = Record(number, "huge", f"{kind}, {len(body)} bytes", time.monotonic())
        self.watch.may_generate(tokens=96 * 24, answers=96, prompt_tokens=96 * 1024)

        async def work():
            async with await self.wire.send("POST", path, body, source(number)) as exchange:
                record.status = await exchange.head()
                whole = await exchange.body()
                record.detail = whole.decode()[:300] if record.status != 200 else f"{len(whole)} bytes"
            return "full" if record.status == FULL else "failed" if record.status >= 500 else "answered"

        await self.attempt(record, work())


def source(number):
    """The loopback address of a client: each has its own."""
    return f"127.0.1.{number + 1}"


# How often each kind is chosen.
KINDS = {
    Crowd.steady: 30, Crowd.slow: 8, Crowd.trickle: 6, Crowd.leaver: 20, Crowd.mute: 4, Crowd.family: 6, Crowd.strangers: 4,
    Crowd.prober: 8, Crowd.malformed: 8, Crowd.garbage: 3, Crowd.unfinished: 4, Crowd.huge: 4,
}
