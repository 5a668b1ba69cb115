"""Owns one tenant of a recorded run: a habit, played by the clock of its run, and its own account beside it.

Refuses to sleep through a refusal: each is written down at its instant, then the habit says what follows.

Sizes are parts of the card, times are seconds of the run (all tenants of a run count from the same instant).
"""

import argparse
import json
import math
import os
import random
import signal
import sys
import time

from memory import BACKENDS, Refused
from training import training

# An account is written so often, and at each event.
ACCOUNT = 0.25


class Tenant:
    def __init__(self, options):
        self.begun, self.pace, self.seconds = options.begun, options.pace, options.seconds
        self.truth = open(options.truth, "a", buffering=1, encoding="utf-8")
        self.chance = random.Random(options.seed)
        self.last, self.held = 0.0, []
        self.say("started", pid=os.getpid(), habit=options.habit, given=options.given)
        self.memory = BACKENDS[options.backend]()
        free, self.total = self.memory.room()
        self.say("ready", free=free, total=self.total)

    def now(self):
        return (time.monotonic() - self.begun) / self.pace

    def say(self, event=None, **more):
        figures = self.memory.figures() if hasattr(self, "memory") else {}
        line = {"t": round(time.monotonic(), 3), "at": round(self.now(), 2), **figures, **more}
        self.truth.write(json.dumps({**line, "event": event} if event else line) + "\n")
        self.last = time.monotonic()

    def account(self):
        if time.monotonic() - self.last >= ACCOUNT:
            self.say()

    def rest(self, seconds):
        """Sleeps by the run's clock, and never past its end."""
        end = min(self.now() + seconds, self.seconds)
        while (left := end - self.now()) > 0:
            time.sleep(min(left * self.pace, ACCOUNT))
            self.account()

    def until(self, at):
        self.rest(at - self.now())

    def goes_on(self):
        self.account()
        return self.now() < self.seconds

    def size(self, part):
        return part * self.total

    def take(self, size):
        try:
            return self.memory.take(size)
        except Refused as refused:
            self.refused(refused)
            raise

    def work(self):
        try:
            self.memory.work()
        except Refused as refused:
            self.refused(refused)
            raise

    def refused(self, refused):
        self.say("refused", asked=refused.asked, answer=refused.answer)

    def base(self, part, piece=2 << 30):
        """What is there for good: weights, data."""
        left = self.size(part)
        while left > 0:
            self.held.append(self.take(min(piece, left)))
            left -= piece
            self.rest(0.05)
        self.say("based")

    def shrink(self, blocks, count=0):
        """Lets the last ones go, with no name left on any: a name would keep it allocated."""
        while len(blocks) > count:
            self.memory.free(blocks.pop())

    def ramp(self, since, wall, share, beyond):
        """The demand at each moment, in bytes: `share` of the room that is there at `since`, all of it at `wall`."""
        self.until(since)
        free, _ = self.memory.room()
        self.say("ramp", free=free, share=share, since=since, wall=wall)
        whole = free * share * beyond

        def demand():
            return whole * min(max((self.now() - since) / (wall - since), 0.0), 1.0)

        return demand


def steady(tenant, base, start=10, burst=None):
    """Fixed batches: what it has it keeps. With `burst` (at, part) it asks for that much in one call, once."""
    tenant.until(start)
    tenant.base(base)
    while tenant.goes_on():
        tenant.work()
        tenant.rest(0.2)
        if burst and tenant.now() >= burst[0]:
            tenant.say("burst")
            asked, burst = burst[1], None
            try:
                tenant.held.append(tenant.take(tenant.size(asked)))
            except Refused:
                tenant.say("goes on without")


def leak(tenant, base, since, wall, share=1.0, step=0.002, every=0.0, beyond=1.05, start=8):
    """Keeps a little of everything. `step` at once, by the demand or every so often; a refusal is its end."""
    tenant.until(start)
    tenant.base(base)
    demand, grown = tenant.ramp(since, wall, share, beyond), 0
    while tenant.goes_on():
        while demand() >= grown + tenant.size(step):
            tenant.held.append(tenant.take(tenant.size(step)))
            grown += tenant.size(step)
            tenant.say()
        tenant.work()
        tenant.rest(every or 0.15)


def levels(tenant, base, since, wall, share, start=8):
    """Loads up to its share of the room, then works with it."""
    leak(tenant, base, since, wall, share, step=0.004, beyond=1.0, start=start)


def lengthen(tenant, base, since, wall, share=1.0, stage=4.0, start=8, beyond=1.15):
    """Trains with sequences that get longer stage by stage; batches differ in length, the longest counts."""
    tenant.until(start)
    model = training(tenant.memory)
    tenant.say("model", per_token=model.per_token)
    tenant.base(base)
    shortest = tenant.size(0.02) / model.per_token
    while tenant.now() < since and tenant.goes_on():
        train(tenant, model, shortest * tenant.chance.uniform(0.7, 1.0))
    demand = tenant.ramp(since, wall, share, beyond)
    while tenant.goes_on():
        longest, end = max(demand() / model.per_token, shortest), tenant.now() + stage
        train(tenant, model, longest)
        while tenant.now() < end and tenant.goes_on():
            train(tenant, model, longest * tenant.chance.uniform(0.6, 1.0))


def train(tenant, model, tokens, last=True):
    begun = tenant.now()
    try:
        model.step(tokens, last)
    except Refused as refused:
        tenant.refused(refused)
        raise
    tenant.account()
    tenant.rest(0.25 - (tenant.now() - begun))


def accumulate(tenant, base, micro, checkpoint, period=25.0, micros=4, start=8):
    """Trains with micro-batches; now and then a checkpoint is gathered on the card, for some seconds."""
    tenant.until(start)
    model = training(tenant.memory)
    tenant.base(base)
    tokens, due = tenant.size(micro) / model.per_token, tenant.now() + period
    while tenant.goes_on():
        for number in range(micros):
            train(tenant, model, tokens, last=number == micros - 1)
        if tenant.now() >= due:
            due += period
            tenant.say("checkpoint")
            shards = []
            for _ in range(8):
                shards.append(tenant.take(tenant.size(checkpoint) / 8))
                tenant.rest(0.2)
            tenant.rest(2.0)
            tenant.shrink(shards)
            tenant.memory.tidy()


def evaluate(tenant, base, micro, evaluation, period=28.0, lasts=9.0, start=8):
    """Trains, and evaluates with larger batches every so often; the cache is given back after each evaluation."""
    tenant.until(start)
    model = training(tenant.memory)
    tenant.base(base)
    tokens, due = tenant.size(micro) / model.per_token, tenant.now() + period
    while tenant.goes_on():
        train(tenant, model, tokens)
        if tenant.now() >= due:
            due += period
            tenant.say("evaluation")
            end = tenant.now() + lasts
            while tenant.now() < end and tenant.goes_on():
                largest = tenant.size(evaluation) / model.evaluated_per_token()
                model.evaluate(largest * tenant.chance.uniform(0.5, 1.0))
                tenant.rest(0.3)
            tenant.memory.tidy()


def serve(tenant, base, low, swing, period, since=None, wall=None, share=1.0, block=0.001, tidies=True, start=8):
    """Answers requests: a block of KV cache for so many tokens each, batches that swing, and a context that grows."""
    tenant.until(start)
    tenant.base(base)
    blocks, demand = [], None
    while tenant.goes_on():
        if since is not None and demand is None and tenant.now() >= since:
            demand = tenant.ramp(since, wall, share, 1.1)
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * (tenant.now() - start) / period)
        wanted = tenant.size(low + swing * wave * tenant.chance.uniform(0.85, 1.0)) + (demand() if demand else 0)
        count = int(wanted / tenant.size(block))
        try:
            while len(blocks) < count:
                blocks.append(tenant.take(tenant.size(block)))
        except Refused:
            # The oldest requests are put off, as servers do: half of the batch.
            tenant.shrink(blocks, len(blocks) // 2)
            tenant.memory.tidy()
            tenant.say("preempts")
            demand = since = None
        if len(blocks) > count:
            tenant.shrink(blocks, count)
            if tidies:
                tenant.memory.tidy()
        tenant.say()
        tenant.work()
        tenant.rest(0.3)


def notebook(tenant, base, smallest, largest, pause, most=None, clears=0.0, since=10, start=8):
    """Cells: each keeps something of another size, some clear what the last ones kept. `most`: where it stops to grow."""
    tenant.until(start)
    tenant.base(base)
    tenant.until(since)
    parts, blocks = [], []
    while tenant.goes_on():
        if blocks and tenant.chance.random() < clears:
            tenant.shrink(blocks, len(blocks) // 2)
            del parts[len(blocks) :]
            tenant.memory.tidy()
        part = math.exp(tenant.chance.uniform(math.log(smallest), math.log(largest)))
        if most is None or sum(parts) + part <= most:
            blocks.append(tenant.take(tenant.size(part)))
            parts.append(part)
            tenant.say("cell", part=round(part, 4))
        for _ in range(tenant.chance.randint(1, 4)):
            tenant.work()
        tenant.rest(tenant.chance.uniform(*pause))


def service(tenant, base, ask, every=1.0, start=6):
    """A small service that returns what it took after each answer: it asks the driver each time. Refused, it tries again."""
    tenant.until(start)
    tenant.base(base)
    while tenant.goes_on():
        blocks = []
        try:
            blocks.append(tenant.take(tenant.size(ask)))
            tenant.say()
            tenant.work()
            tenant.rest(0.1)
        except Refused:
            pass
        tenant.shrink(blocks)
        tenant.memory.tidy()
        tenant.say()
        tenant.rest(every * tenant.chance.uniform(0.8, 1.2))


HABITS = {
    habit.__name__: habit
    for habit in (steady, leak, levels, lengthen, accumulate, evaluate, serve, notebook, service)
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("habit", choices=HABITS)
    parser.add_argument("--given", type=json.loads, default={})
    parser.add_argument("--truth", required=True)
    parser.add_argument("--backend", choices=BACKENDS, default="torch")
    parser.add_argument("--seed", required=True)
    for name in ("begun", "pace", "seconds"):
        parser.add_argument(f"--{name}", type=float, required=True)
    options = parser.parse_args()
    # Asked to stop, a tenant leaves as a program does: its exit frees its memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    tenant = Tenant(options)
    try:
        HABITS[options.habit](tenant, **options.given)
    except Refused as refused:
        tenant.say("dies")
        sys.exit(f"out of memory: {refused}")
    tenant.say("done")


if __name__ == "__main__":
    main()
