#!/usr/bin/env python3
"""Builds every sm90 kernel artifact, on a machine without a GPU.

    python3.11 kernels/build.py                 build what changed, update artifacts/sm90
    python3.11 kernels/build.py --check         rebuild and compare with what is committed
    python3.11 kernels/build.py --subset 3/10   every tenth kernel, starting with the third

The compilers are installed once into a virtual environment from `requirements.lock`, which pins every
wheel by hash. Each kernel is built by its own process under `setarch -R`.
"""

import argparse
import concurrent.futures
import fcntl
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
STORE = ROOT / "artifacts" / "sm90"
LOCK = STORE / "kernels.lock"
REQUIREMENTS = HERE / "requirements.lock"
SIZE_MAX = 20 << 20
LOCKED_FIELDS = ("name", "sha256", "size_bytes", "source_sha256", "generated_source_sha256", "contract", "domain")


def ensure_venv(folder):
    """Python of the toolchain's virtual environment, made from the lock if it is not there or older."""
    python, stamp = folder / "bin" / "python", folder / "requirements.lock"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return python
    print(f"installing the toolchain into {folder}", flush=True)
    subprocess.run(["python3.11", "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r", REQUIREMENTS], check=True)
    stamp.write_text(REQUIREMENTS.read_text())
    return python


def worker(python, *arguments):
    """Runs `worker.py` and returns the JSON of its last line."""
    command = ["setarch", "-R", "nice", "-n", "10", str(python), "-W", "ignore", str(HERE / "tilelang" / "worker.py"), *map(str, arguments)]
    env = os.environ | {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    if result.returncode:
        raise RuntimeError((result.stderr or result.stdout)[-4000:])
    return json.loads(result.stdout.splitlines()[-1])


def read_lock():
    """Locked artifacts by name."""
    return {a["name"]: a for a in json.loads(LOCK.read_text())["artifacts"]} if LOCK.exists() else {}


def chosen(entries, args):
    """The entries that the options ask for."""
    if args.only:
        entries = [e for e in entries if any(fnmatch.fnmatch(e["name"], p) or p in e["name"] for p in args.only)]
    if args.subset:
        index, count = map(int, args.subset.split("/"))
        entries = [e for i, e in enumerate(entries) if i % count == index % count]
    return entries


def build_one(python, entry, out, args):
    """Builds one kernel, or finds it unchanged."""
    locked = args.locked.get(entry["name"])
    manifest = STORE / f"{locked['sha256']}.json" if locked else None
    if args.check or args.force or not manifest or not manifest.exists():
        manifest = None
    elif locked["source_sha256"] == entry["source_sha256"]:
        return "unchanged"
    extra = ["--store", STORE, "--previous", manifest] if manifest else []
    extra += ["--keep-source"] if args.keep_source else []
    return worker(python, "--build", entry["family"], entry["name"], "--out", out, *extra)


def build_all(python, entries, out, args):
    """Builds in parallel; returns results by name and failures by name."""
    results, failures = {}, {}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = {pool.submit(build_one, python, e, out, args): e for e in entries}
        for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            name = jobs[job]["name"]
            try:
                results[name] = job.result()
                line = results[name]
            except RuntimeError as error:
                failures[name] = line = str(error)
            report(done, len(jobs), name, line)
    return results, failures


def report(done, total, name, line):
    """One progress line."""
    if isinstance(line, dict):
        line = (f"{line['seconds']:6.1f} s  {line['size_bytes'] >> 10:4d} KiB  {line['registers']:3d} registers  "
                f"{line['spill_bytes']:3d} B spilled  {line['shared_bytes'] >> 10:3d} KiB shared")
    print(f"[{done:3d}/{total}] {name:44s} {line}", flush=True)


def compare(results, out, args):
    """Names whose rebuilt bytes differ from the committed ones."""
    differing = []
    for name, result in results.items():
        locked = args.locked.get(name)
        fresh = json.loads((out / f"{result['sha256']}.json").read_text())
        old = json.loads((STORE / f"{locked['sha256']}.json").read_text()) if locked else {}
        records = {"records": None}
        if fresh | records != old | records:
            differing.append(name)
    return differing


def locked_entry(manifest):
    """The lock's line for a manifest."""
    return {field: manifest[field] for field in LOCKED_FIELDS}


def publish(results, out, known):
    """Moves built artifacts into the store, rewrites the lock, drops what nothing refers to."""
    STORE.mkdir(parents=True, exist_ok=True)
    with open(tempfile.gettempdir() + "/oxide-kernels.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        artifacts = {name: a for name, a in read_lock().items() if known is None or name in known}
        for name, result in results.items():
            if result == "unchanged":
                continue
            for kind in ("cubin", "json"):
                (STORE / f"{result['sha256']}.{kind}").write_bytes((out / f"{result['sha256']}.{kind}").read_bytes())
            artifacts[name] = locked_entry(json.loads((STORE / f"{result['sha256']}.json").read_text()))
        write_lock(artifacts)
        prune({a["sha256"] for a in artifacts.values()})
        return sum(a["size_bytes"] for a in artifacts.values())


def write_lock(artifacts):
    """One artifact a line, by name."""
    lines = ",\n".join(json.dumps(artifacts[name]) for name in sorted(artifacts))
    LOCK.write_text(f'{{"format": 1, "target": "sm_90a", "artifacts": [\n{lines}\n]}}\n')


def prune(referenced):
    """Removes artifacts that the lock does not list."""
    for path in STORE.iterdir():
        if path.suffix in (".cubin", ".json") and path.stem not in referenced:
            path.unlink()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / "target" / "kernel-toolchain", help="virtual environment of the toolchain")
    parser.add_argument("--check", action="store_true", help="rebuild and compare hashes; changes nothing")
    parser.add_argument("--force", action="store_true", help="rebuild even what did not change")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names that match or contain PATTERN; may repeat")
    parser.add_argument("--family", action="append", help="one family's file; may repeat")
    parser.add_argument("--subset", metavar="I/N", help="every N-th kernel, starting with the I-th")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep-source", type=Path, metavar="DIR", help="write the generated CUDA source to DIR")
    parser.add_argument("--list", action="store_true", help="print the names only")
    return parser.parse_args()


def main():
    args = parse_arguments()
    python = ensure_venv(args.venv)
    started = time.time()
    listed = worker(python, "--list", *(["--families", ",".join(args.family)] if args.family else []))
    entries = chosen(listed, args)
    if args.list:
        return print(*(e["name"] for e in entries), sep="\n")
    args.locked = read_lock()
    with tempfile.TemporaryDirectory() as temporary:
        out = args.keep_source or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        results, failures = build_all(python, entries, out, args)
        if args.check:
            differing = compare(results, out, args)
            print(f"{len(results) - len(differing)} identical, {len(differing)} differ: {' '.join(differing)}")
            return bool(differing or failures)
        total = publish(results, out, None if args.family else {e["name"] for e in listed})
    print(f"{len(results)} kernels, {len(failures)} failed, {total / 2**20:.2f} MiB in all, {time.time() - started:.0f} s")
    if total > SIZE_MAX:
        print(f"artifacts take {total} bytes, the limit is {SIZE_MAX}")
    return bool(failures) or total > SIZE_MAX


if __name__ == "__main__":
    sys.exit(main())
