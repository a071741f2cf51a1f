"""Three replicas of one bundle behind published routers (vllm-router, and sglang-router for chats), all on loopback.

    router_test.py --run oxide-run --bundle tiny.oxb

Needs httpx, vllm-router and sglang-router in this Python. Behind vllm-router each replica answers with a model name of
its own, so that every answer tells who gave it; clients name no model.
Nothing is timed: every wait polls for a condition and fails by name. The routers do time their health checks, by the
second, so that a machine that stalls looks to them like dead replicas: a run that fails is told and repeated.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

HOST = "127.0.0.1"
KEY = "secret-key"
REPLICAS = 3
TRIES = 3
MODEL = "oxide-tiny"
PAGE = 16
LONG = 1800  # tokens of an answer that is still under way when its replica is killed or drained
# What a client may send again: the OpenAI clients do so by themselves.
RETRYABLE = {408, 409, 429, 500, 502, 503, 504}


def check(truth: bool, message: str) -> None:
    if not truth:
        raise AssertionError(message)


async def until(what: str, condition, seconds: float = 60):
    """The condition's first true value; polls, because processes have no events to wait for."""
    deadline = time.monotonic() + seconds
    while True:
        value = await condition()
        if value:
            return value
        check(time.monotonic() < deadline, f"within {seconds} s: {what}")
        await asyncio.sleep(0.02)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


class Replica:
    """One `oxide-run … serve` process; `start` after a stop takes the same port again."""

    def __init__(self, run: str, bundle: str, work: Path, client: httpx.AsyncClient, name: str, model: str = ""):
        self.run, self.bundle, self.work, self.client = run, bundle, work, client
        self.name, self.model = name, model or name
        self.port = 0
        self.process = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        port_file = self.work / f"{self.name}.port"
        port_file.unlink(missing_ok=True)
        # Plain code on one thread: answers last long enough to be met under way.
        command = [self.run, self.bundle, "serve", "--host", HOST, "--port", str(self.port), "--port-file", port_file,
                   "--model-name", self.model, "--api-key", KEY, "--threads", "1", "--isa", "portable"]
        with open(self.work / f"{self.name}.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

        async def ported():
            check(self.process.poll() is None, f"{self.name} exited at its start with {self.process.returncode}")
            return port_file.exists() and port_file.read_text().strip()

        self.port = int(await until(f"{self.name} serves", ported))

    async def metrics(self) -> Counter:
        """Values by metric, summed over labels."""
        found = Counter()
        for line in (await self.client.get(f"{self.url}/metrics")).text.splitlines():
            if not line.startswith("#"):
                sample, value = line.rsplit(" ", 1)
                found[sample.partition("{")[0]] += float(value)
        return found

    async def generations(self) -> int:
        return int((await self.metrics())["oxide_engine_admitted_total"])

    async def live(self) -> int:
        return int((await self.metrics())["oxide_requests_in_flight"])

    async def ready(self) -> int:
        return (await self.client.get(f"{self.url}/ready")).status_code

    def end(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Router:
    """The published router. Health checks read `/ready`, so that a draining replica counts as unhealthy at once."""

    def __init__(self, module: str, replicas: list, work: Path, client: httpx.AsyncClient):
        self.client = client
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        command = [sys.executable, "-m", module, "--host", HOST, "--port", str(port),
                   "--prometheus-host", HOST, "--prometheus-port", str(free_port()),
                   "--worker-urls", *(replica.url for replica in replicas),
                   "--policy", "cache_aware", "--worker-startup-check-interval", "1",
                   "--health-check-endpoint", "/ready", "--health-check-interval-secs", "1",
                   "--health-check-timeout-secs", "1",
                   "--health-failure-threshold", "1", "--health-success-threshold", "1",
                   "--cb-failure-threshold", "3", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "1",
                   "--retry-max-retries", "5", "--retry-initial-backoff-ms", "20", "--retry-max-backoff-ms", "200"]
        with open(work / f"{module}.log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"})

    async def healthy(self) -> set:
        """URLs of the replicas that the router sends requests to."""
        try:
            workers = (await self.client.get(f"{self.url}/workers")).json()["workers"]
        except httpx.TransportError:
            check(self.process.poll() is None, f"the router exited with {self.process.returncode}")
            return set()
        return {worker["url"] for worker in workers if worker["is_healthy"]}

    async def sees(self, replicas: list) -> None:
        wanted = {replica.url for replica in replicas}

        async def seen():
            return await self.healthy() == wanted

        await until(f"the router counts exactly {sorted(r.name for r in replicas)} as healthy", seen)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Answer:
    """What became of one request, and who answered it."""

    replica: str | None = None
    tokens: int = 0
    cached: int = 0
    status: int | None = None
    broken: str | None = None
    finished: bool = False
    text: str = ""
    began: float = field(default_factory=time.monotonic)
    first: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def whole(self) -> bool:
        return self.finished and self.status == 200

    @property
    def retryable(self) -> bool:
        """A status to try again on, or a connection that broke before the end of the answer."""
        return self.status in RETRYABLE or self.broken is not None


def prompt_of(label: str, words: int = 20) -> str:
    """A prompt that shares no beginning with another label's."""
    return f"{label}: " + " ".join(f"{label}{number}" for number in range(words))


class Clients:
    def __init__(self, router: Router, client: httpx.AsyncClient):
        self.router, self.client = router, client

    def request(self, prompt: str, tokens: int) -> dict:
        """Arguments of a POST."""
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return {"url": f"{self.router.url}/v1/completions", "headers": {"Authorization": f"Bearer {KEY}"}, "json": body}

    async def whole(self, prompt: str, tokens: int = 16) -> Answer:
        answer = Answer()
        try:
            response = await self.client.post(**self.request(prompt, tokens))
        except httpx.TransportError as error:
            answer.broken = repr(error)
            return answer
        answer.status = response.status_code
        if response.status_code == 200:
            self.read(answer, response.json())
        return answer

    async def chat(self, messages: list) -> Answer:
        """A whole answer to a conversation."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
        headers = {"Authorization": f"Bearer {KEY}"}
        response = await self.client.post(f"{self.router.url}/v1/chat/completions", headers=headers, json=body)
        answer = Answer(status=response.status_code)
        if response.status_code == 200:
            self.read(answer, response.json())
        return answer

    async def stream(self, prompt: str, tokens: int, answer: Answer | None = None) -> Answer:
        answer = answer or Answer()
        request = self.request(prompt, tokens)
        request["json"] |= {"stream": True, "stream_options": {"include_usage": True}}
        ended = False
        try:
            async with self.client.stream("POST", **request) as response:
                answer.status = response.status_code
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        ended = True
                    elif line.startswith("data: ") and response.status_code == 200:
                        self.read(answer, json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as error:
            answer.broken = repr(error)
        answer.finished = answer.finished and ended and answer.broken is None
        answer.first.set()
        return answer

    async def together(self, prompts) -> list:
        """Whole answers to prompts sent at once: the router spreads new prompts by the requests under way."""
        return await asyncio.gather(*(self.whole(prompt) for prompt in prompts))

    def read(self, answer: Answer, chunk: dict) -> None:
        check("error" not in chunk, f"an error inside an answer: {chunk}")
        answer.replica = chunk["model"]
        answer.first.set()
        if usage := chunk.get("usage"):
            answer.tokens = usage["completion_tokens"]
            answer.cached = usage["prompt_tokens_details"]["cached_tokens"]
        for choice in chunk["choices"]:
            answer.text += choice["text"] if "text" in choice else choice["message"]["content"]
            answer.finished |= choice["finish_reason"] is not None


class Cluster:
    def __init__(self, replicas: list, router: Router, clients: Clients):
        self.replicas, self.router, self.clients = replicas, router, clients

    def named(self, name: str) -> Replica:
        return next(replica for replica in self.replicas if replica.name == name)

    def others(self, gone: Replica) -> list:
        return [replica for replica in self.replicas if replica is not gone]

    async def generations(self) -> Counter:
        return Counter({replica.name: await replica.generations() for replica in self.replicas})

    async def long_streams(self, label: str, count: int) -> list:
        """Streams that have all begun, as (answer, task)."""
        pairs = []
        for number in range(count):
            answer = Answer()
            task = asyncio.create_task(self.clients.stream(prompt_of(f"{label}{number}"), LONG, answer))
            await answer.first.wait()
            check(answer.replica is not None, f"a stream did not begin: {answer}")
            pairs.append((answer, task))
        return pairs

    async def rejoin(self, replica: Replica, label: str) -> int:
        """Starts a stopped replica again and sends new prompts until it has answered some."""
        await replica.start()
        await self.router.sees(self.replicas)
        sent = 0
        while await replica.generations() < 2:
            check(sent < 60, f"{replica.name} is back and got no requests")
            answers = await self.clients.together(prompt_of(f"{label}{sent + number}") for number in range(6))
            check(all(answer.whole for answer in answers), f"failed while {replica.name} came back: {answers}")
            sent += len(answers)
        return sent


async def balancing(cluster: Cluster) -> str:
    """Prompts that share nothing are spread over all replicas, and every one is answered once."""
    before = await cluster.generations()
    answers = await cluster.clients.together(prompt_of(f"spread{number}", 60) for number in range(30))
    check(all(answer.whole for answer in answers), f"not every request was answered: {answers}")
    by_metrics = await cluster.generations() - before
    by_answers = Counter(answer.replica for answer in answers)
    check(by_metrics == by_answers, f"replicas count {by_metrics}, clients {by_answers}")
    check(all(by_metrics[replica.name] >= 5 for replica in cluster.replicas), f"uneven: {by_metrics}")
    return f"30 requests: {dict(sorted(by_metrics.items()))}"


async def prefix_cache(cluster: Cluster) -> str:
    """Conversations that go on return to the replica that has their pages, and are found there."""
    families, turns = 9, 4
    before = [await replica.metrics() for replica in cluster.replicas]
    homes, hits = {}, Counter()
    talks = [prompt_of(f"family{family}", 60) for family in range(families)]
    for turn in range(turns):
        for family, answer in enumerate(await cluster.clients.together(talks)):
            check(answer.whole, f"family {family}, turn {turn}: {answer}")
            home = homes.setdefault(family, answer.replica)
            check(answer.replica == home, f"family {family} moved from {home} to {answer.replica}")
            if turn == 0:
                check(answer.cached < 2 * PAGE, f"a new conversation found {answer.cached} tokens in a cache")
            else:
                check(answer.cached >= 12 * PAGE, f"family {family} found only {answer.cached} cached tokens")
            hits[answer.replica] += answer.cached
            talks[family] += answer.text + " And then?"
    check(len(set(homes.values())) == REPLICAS, f"all families live on {set(homes.values())}")
    for replica, old in zip(cluster.replicas, before):
        found = (await replica.metrics())["oxide_prefix_hit_tokens_total"] - old["oxide_prefix_hit_tokens_total"]
        check(found == hits[replica.name], f"{replica.name} counts {found} hit tokens, clients {hits[replica.name]}")
    spread = dict(sorted(Counter(homes.values()).items()))
    return f"{families} families × {turns} turns on {spread}; cached tokens {dict(sorted(hits.items()))}"


async def killed(cluster: Cluster) -> str:
    """A replica dies under load: of all requests only those it was answering fail, and can be sent again."""
    admitted_before = await cluster.generations()
    streams = await cluster.long_streams("doomed", 9)
    victim = cluster.named(streams[0][0].replica)
    doomed = [answer for answer, _ in streams if answer.replica == victim.name]
    load_ended = asyncio.Event()
    short = []

    async def load(number: int) -> None:
        sent = 0
        while not load_ended.is_set():
            short.append(await cluster.clients.stream(prompt_of(f"load{number}x{sent}"), 16))
            sent += 1

    loads = [asyncio.create_task(load(number)) for number in range(3)]

    async def under_load():
        return len(short) >= 6

    await until("short requests are answered beside the streams", under_load)
    check(all(not answer.finished for answer in doomed), "the victim's streams ended before the kill")
    before = len(short)
    killed_at = time.monotonic()
    victim.process.kill()
    victim.process.wait()
    await cluster.router.sees(cluster.others(victim))

    async def served_on():
        return len(short) >= before + 12

    await until("short requests are answered after the kill", served_on)
    load_ended.set()
    await asyncio.gather(*loads)
    answers = [await task for _, task in streams]
    failed = [answer for answer in answers + short if not answer.whole]
    for answer in failed:
        # None: broken between the head and the first token.
        check(answer.replica in (victim.name, None), f"a request of another replica failed: {answer}")
        check(answer.began < killed_at, f"a request sent after the kill failed: {answer}")
        check(answer.retryable, f"a failure does not tell clients to try again: {answer}")
    for survivor in cluster.others(victim):
        admitted = await survivor.generations() - admitted_before[survivor.name]
        whole = sum(answer.whole and answer.replica == survivor.name for answer in answers + short)
        check(admitted == whole, f"{survivor.name} admitted {admitted} requests, {whole} were answered in whole")
    check(all(not answer.whole for answer in doomed), "an answer ended although its replica was killed")
    # Of each client under load at most one short request can have been under way on the victim.
    check(len(failed) <= len(doomed) + len(loads), f"{len(failed)} failed, {len(doomed)} streams were the victim's")
    again = await asyncio.gather(*(cluster.clients.stream(prompt_of(f"again{n}"), 16) for n in range(len(failed))))
    check(all(answer.whole for answer in again), f"a request failed when sent again: {again}")
    total = len(answers) + len(short)
    sent = await cluster.rejoin(victim, "back")
    kinds = Counter((answer.broken or str(answer.status)).partition("(")[0] for answer in failed)
    return (f"{total} requests, {len(failed)} failed ({dict(kinds)}), {len(doomed)} streams were {victim.name}'s; "
            f"all {len(failed)} succeed again; restarted, it answered within {sent} new prompts")


async def whole_answers_survive(cluster: Cluster) -> str:
    """Of answers that are not streamed nothing was sent yet when a replica dies: the router sends them again."""
    prompts = [prompt_of(f"whole{number}") for number in range(9)]
    before = await cluster.generations()
    tasks = [asyncio.create_task(cluster.clients.whole(prompt, LONG // 2)) for prompt in prompts]

    async def spread():
        return sum((await cluster.generations() - before).values()) == len(prompts)

    await until("all requests are under way", spread)
    victim = cluster.replicas[-1]
    lost = await victim.live()
    check(lost > 0, f"{victim.name} has no request to lose")
    victim.process.kill()
    victim.process.wait()
    answers = await asyncio.gather(*tasks)
    failed = [answer for answer in answers if not answer.whole]
    check(all(answer.retryable for answer in failed), f"a failure is not retryable: {failed}")
    check(len(failed) <= lost, f"{len(failed)} failed, {lost} were {victim.name}'s")
    check(all(answer.replica != victim.name for answer in answers), "an answer of a killed replica")
    sent = await cluster.rejoin(victim, "return")
    return f"{len(answers)} requests, {lost} on {victim.name}, {len(failed)} failed; back within {sent} new prompts"


async def drained(cluster: Cluster) -> str:
    """SIGTERM: /ready turns 503, live streams finish, the router sends elsewhere, no request fails; then it rejoins."""
    streams = await cluster.long_streams("drain", 9)
    leaving = cluster.named(streams[1][0].replica)
    live = await leaving.live()
    check(live > 0, f"{leaving.name} has no live stream")
    leaving.process.send_signal(signal.SIGTERM)

    async def unready():
        return await leaving.ready() == 503

    await until("/ready answers 503", unready)
    admitted = await leaving.generations()
    # Continuations of what it is answering: the router chooses the leaving replica itself, which refuses.
    at_home = [f"drain{number}" for number, (answer, _) in enumerate(streams) if answer.replica == leaving.name]
    early = await cluster.clients.together(prompt_of(label) + " early" for label in at_home * 3)
    check(all(answer.whole and answer.replica != leaving.name for answer in early), f"while draining: {early}")
    await cluster.router.sees(cluster.others(leaving))
    check(leaving.process.poll() is None and await leaving.live() > 0, "the router noticed only after the end")
    late = await cluster.clients.together(prompt_of(label) + " late" for label in at_home * 3)
    check(all(answer.whole and answer.replica != leaving.name for answer in late), f"once unhealthy: {late}")
    check(leaving.process.poll() is None, f"{leaving.name} exited before the check")
    check(await leaving.generations() == admitted, f"{leaving.name} took requests while draining")
    answers = [await task for _, task in streams]
    check(all(answer.whole and answer.tokens == LONG for answer in answers), f"a stream was cut: {answers}")

    async def exited():
        return leaving.process.poll() is not None

    await until(f"{leaving.name} exits", exited)
    check(leaving.process.returncode == 0, f"{leaving.name} exited with {leaving.process.returncode}")
    sent = await cluster.rejoin(leaving, "anew")
    return (f"{leaving.name} finished its {live} of {len(answers)} streams and exited with 0; "
            f"{len(early) + len(late)} requests meanwhile, 0 failed; restarted, it answered within {sent} new prompts")


async def chats(cluster: Cluster) -> str:
    """Chats that go on find their pages, which only the replica that answered before has."""
    families, turns = 9, 4
    talks = [[{"role": "user", "content": prompt_of(f"chat{family}", 60)}] for family in range(families)]
    found = 0
    for turn in range(turns):
        for talk, answer in zip(talks, await asyncio.gather(*map(cluster.clients.chat, talks))):
            check(answer.whole, f"turn {turn}: {answer}")
            bound = answer.cached < 3 * PAGE if turn == 0 else answer.cached >= 12 * PAGE
            check(bound, f"turn {turn} found {answer.cached} cached tokens")
            found += answer.cached
            talk += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
    answered = await cluster.generations()
    check(sum(answered.values()) == families * turns, f"{families * turns} requests sent, {answered} answered")
    check(all(answered[replica.name] >= turns for replica in cluster.replicas), f"uneven: {answered}")
    hits = sum([(await replica.metrics())["oxide_prefix_hit_tokens_total"] for replica in cluster.replicas])
    check(hits == found, f"replicas count {hits} hit tokens, clients {found}")
    return f"{families} chats × {turns} turns: {dict(sorted(answered.items()))}; {found} cached tokens"


# Runs: the router, the phases, and the model that all replicas serve ("": each its own name).
RUNS = [
    ("vllm_router.launch_router", [balancing, prefix_cache, killed, whole_answers_survive, drained], ""),
    ("vllm_router.launch_router", [chats], MODEL),
    ("sglang_router.launch_router", [chats], MODEL),
]


async def test(run: str, bundle: str, work: Path, module: str, phases: list, model: str) -> None:
    async with httpx.AsyncClient(timeout=120, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
        replicas = [Replica(run, bundle, work, client, f"replica-{number}", model) for number in range(REPLICAS)]
        router = None
        try:
            await asyncio.gather(*(replica.start() for replica in replicas))
            router = Router(module, replicas, work, client)
            await router.sees(replicas)
            cluster = Cluster(replicas, router, Clients(router, client))
            for phase in phases:
                started = time.monotonic()
                told = await phase(cluster)
                print(f"{phase.__name__} ({time.monotonic() - started:.1f} s): {told}", flush=True)
        finally:
            if router:
                router.end()
            for replica in replicas:
                replica.end()


def telling(log: Path) -> list:
    """A log's lines, without the router's questions for token ids."""
    return [line for line in log.read_text().splitlines() if "/tokenize" not in line and "/render" not in line]


def attempt(run: str, bundle: str, module: str, phases: list, model: str, last: bool) -> bool:
    """Whether the test passed; its failure is printed with the logs' ends, and raised if it is the last try."""
    with tempfile.TemporaryDirectory() as work:
        try:
            asyncio.run(test(run, bundle, Path(work), module, phases, model))
            return True
        except Exception as error:
            for log in sorted(Path(work).glob("*.log")):
                print(f"--- {log.name}\n" + "\n".join(telling(log)[-20:]), file=sys.stderr)
            if last:
                raise
            print(f"{module} failed, once more: {error!r}", file=sys.stderr, flush=True)
            return False


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--run", required=True, help="the oxide-run binary")
    arguments.add_argument("--bundle", required=True, help="oxide-tiny for the cpu target")
    arguments = arguments.parse_args()
    for module, phases, model in RUNS:
        for tries_left in reversed(range(TRIES)):
            if attempt(arguments.run, arguments.bundle, module, phases, model, last=tries_left == 0):
                break


if __name__ == "__main__":
    main()
