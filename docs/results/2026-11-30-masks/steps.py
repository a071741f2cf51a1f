"""Time between tokens of eight streams, with and without a JSON schema, taking turns.

    python steps.py PORT [rounds] [tokens]

The server must be idle otherwise. A gap counts while all eight streams run; medians of gaps are compared.
"""

import http.client
import json
import statistics
import sys
import threading
import time

STREAMS, LIMIT = 8, 2000
KINDS = ["string", "integer", "boolean", "number"]


def closed(properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


RECORD = closed({
    "name": {"type": "string", "minLength": 1, "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
})
SCHEMAS = {
    "none": None,
    "free text in an object": closed({"text": {"type": "string"}}),
    "40 records or more": {"type": "array", "minItems": 40, "items": RECORD},
    "100 properties": closed({f"property_{index}": {"type": KINDS[index % 4]} for index in range(100)}),
}


def stream(port, body, tokens, barrier, times):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    barrier.wait()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    for line in reply:
        if line.startswith(b"data: {"):
            count = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens")
            if count:
                times.append((count, time.perf_counter()))
                if count >= tokens:
                    break
    connection.close()


def median_gap(port, schema, tokens):
    body = {
        "messages": [{"role": "user", "content": "Write."}], "temperature": 1, "max_tokens": LIMIT, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    barrier, times = threading.Barrier(STREAMS), [[] for _ in range(STREAMS)]
    threads = [threading.Thread(target=stream, args=(port, {**body, "seed": seed}, tokens, barrier, times[seed])) for seed in range(STREAMS)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    begin, end = max(seen[0][1] for seen in times), min(seen[-1][1] for seen in times)
    pairs = [pair for seen in times for pair in zip(seen, seen[1:]) if pair[0][1] >= begin and pair[1][1] <= end]
    return statistics.median((later - earlier) / (after - before) * 1e3 for (before, earlier), (after, later) in pairs if after > before)


def main():
    port, rounds, tokens = map(int, (sys.argv[1:] + ["5", "40"][len(sys.argv) - 2:])[:3])
    seen = {name: [] for name in SCHEMAS}
    for _ in range(rounds):
        for name, schema in SCHEMAS.items():
            seen[name].append(median_gap(port, schema, tokens))
    plain = statistics.median(seen["none"])
    for name, gaps in seen.items():
        print(f"{name:<24} {statistics.median(gaps):8.2f} ms {100 * (statistics.median(gaps) / plain - 1):+6.1f} %   best {min(gaps):8.2f} ms")


main()
