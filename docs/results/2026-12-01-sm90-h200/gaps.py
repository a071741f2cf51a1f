"""Time a token of eight concurrent requests, with and without a JSON schema, taking turns.

    python gaps.py PORT [rounds] [tokens]

Requests do not stream, so that no client is in the way: the time of an answer over its tokens, median of the eight.
"""

import http.client
import importlib.util
import json
import pathlib
import statistics
import sys
import threading
import time

spec = importlib.util.spec_from_file_location("steps", pathlib.Path(__file__).with_name("steps.py"))
steps = importlib.util.module_from_spec(spec)
spec.loader.exec_module(steps)


def ask(port, body, barrier, found):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    barrier.wait()
    start = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    assert reply.status == 200, answer
    found.append((1e3 * (time.perf_counter() - start), answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]))


def round_of(port, schema, tokens, seed):
    body = {"messages": [{"role": "user", "content": "Write."}], "temperature": 1, "max_tokens": tokens, "ignore_eos": True}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    barrier, found = threading.Barrier(8), []
    threads = [threading.Thread(target=ask, args=(port, {**body, "seed": 8 * seed + i}, barrier, found)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return statistics.median(ms / count for ms, count, _ in found), [count for _, count, _ in found], {reason for _, _, reason in found}


def main():
    port, rounds, tokens = int(sys.argv[1]), int((sys.argv[2:] or [3])[0]), int((sys.argv[3:] or [1500])[0])
    seen = {name: [] for name in steps.SCHEMAS}
    for turn in range(rounds):
        for name, schema in steps.SCHEMAS.items():
            seen[name].append(round_of(port, schema, tokens, turn))
    plain = statistics.median(gap for gap, _, _ in seen["none"])
    for name, results in seen.items():
        gap = statistics.median(gap for gap, _, _ in results)
        print(f"{name:24s} {gap:8.3f} ms {100 * (gap / plain - 1):+6.1f} %  tokens {results[-1][1]} {results[-1][2]}")


main()
