#!/usr/bin/env python3
"""Make the golden files of this folder: chat requests, and what `transformers` renders for them.

    pip install transformers==5.24.0 jinja2==3.1.6
    python make_goldens.py

Each case holds the request as a client sends it, and the prompt that `apply_chat_template` makes of the same
conversation. Templates take less than the API: the arguments of a call are decoded, and parts are joined by a line
break, before transformers sees them. What a template refuses is written as an error. `tokens` are transformers' ids,
for the one tokenizer that is in the repository.
"""

import json
import re
from pathlib import Path

import transformers

HERE = Path(__file__).parent
REPO = HERE.parents[3]
TINY = REPO / "profiles/oxide-tiny"
TEMPLATES = REPO / "runtime/text/tests/goldens"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "temp > 10 & humidity < 50 (user's choice), \u00e9\u4f60",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["K\u00f6ln", "Z\"rich"]}, "days": {"type": "integer", "minimum": 1}, "at": {"type": "number", "default": 1.0}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
SYSTEM = {"role": "system", "content": "You are terse. "}
USER = {"role": "user", "content": "  What is the weather,\n<b>now</b> & \"then\"? \u4f60\u597d \U0001fae0 "}
ANSWER = {"role": "assistant", "content": "Sunny."}
THANKS = {"role": "user", "content": "Thanks\n"}


def call(name, arguments, index=1):
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


CALL = {"role": "assistant", "content": None, "tool_calls": [call("get_weather", "{\"days\": 2, \"city\": \"K\u00f6ln <&> 'x'\", \"deep\": {\"b\": 1.0, \"a\": [null, true]}}")]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "{\"temp\": 21, \"sky\": \"\u2600\"}"}
TWO_CALLS = {"role": "assistant", "content": "Let me see.", "tool_calls": [call("get_weather", "{\"city\":\"Z\\\"rich\"}"), call("get_time", "{}", 2)]}


def parts(role, *texts):
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


CASES = [
    ("no system", [USER], None),
    ("system", [SYSTEM, USER], None),
    ("turns", [SYSTEM, USER, ANSWER, THANKS], None),
    ("developer", [{**SYSTEM, "role": "developer"}, USER], None),
    ("tools", [USER], [WEATHER, TIME]),
    ("system and tools", [SYSTEM, USER], [WEATHER]),
    ("tool call", [USER, CALL], [WEATHER]),
    ("tool result", [SYSTEM, USER, CALL, RESULT], [WEATHER, TIME]),
    ("tool result and more", [USER, CALL, RESULT, ANSWER, THANKS], [WEATHER]),
    ("two calls", [USER, TWO_CALLS, RESULT, {**RESULT, "tool_call_id": "call_2", "content": "12:00"}], [WEATHER, TIME]),
    ("tool history without tools", [USER, CALL, RESULT, THANKS], None),
    ("parts", [parts("system", "One.", "Two."), parts("user", "a\n", " b", "\u4f60")], None),
    ("one part", [parts("user", "only")], None),
    ("parts and tools", [parts("user", "a", "b"), CALL, parts("tool", "x", "y")], [WEATHER]),
    ("empty user", [{"role": "user", "content": ""}], None),
]


def for_template(message):
    message = {**message}
    if message["role"] == "developer":
        message["role"] = "system"
    if isinstance(message.get("content"), list):
        message["content"] = "\n".join(part["text"] for part in message["content"])
    if "tool_calls" in message:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}} for call in message["tool_calls"]
        ]
    return message


def render(tokenizer, template, tokens, messages, tools, prompt):
    for name, text in tokens.items():
        setattr(tokenizer, name, text)
    try:
        return tokenizer.apply_chat_template(
            [for_template(message) for message in messages], tools=tools, chat_template=template, add_generation_prompt=prompt, tokenize=False
        )
    except Exception as error:  # Whatever a template does with what it was not made for.
        return error


def golden(name, template, tokens, own_ids):
    cases = []
    for title, messages, tools in CASES:
        for prompt in (True, False):
            # The ids are those of a fresh tokenizer, so that no case sees another's tokens.
            tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
            body = {"messages": messages, "add_generation_prompt": prompt} | ({"tools": tools} if tools else {})
            rendered = render(tokenizer, template, tokens, messages, tools, prompt)
            case = {"name": f"{title}, {'with' if prompt else 'without'} generation prompt", "body": body}
            if isinstance(rendered, Exception):
                case["error"] = f"{type(rendered).__name__}: {rendered}"
            else:
                case["prompt"] = rendered
                if own_ids:
                    case["tokens"] = " ".join(map(str, tokenizer.encode(rendered, add_special_tokens=False)))
            cases.append(case)
    value = {"transformers": transformers.__version__, "cases": cases}
    (HERE / f"{name}.json").write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def main():
    golden("oxide-tiny", json.loads((TINY / "tokenizer_config.json").read_text())["chat_template"], {}, True)
    for name, file in (("qwen2.5", "qwen2_5.jinja"), ("smollm2", "smollm2.jinja")):
        source = (TEMPLATES / file).read_text()
        first = source.split("\n", 1)[0]
        tokens = {f"{kind}_token": text for kind, text in re.findall(r"(bos|eos)=(\S+)", first)} if first.startswith("{#-") else {}
        golden(name, source, tokens, False)


if __name__ == "__main__":
    main()
