"""One folder behind vLLM's OpenAI-style server: `ask_http.py FOLDER REFERENCE.npz DTYPE [--trust-remote-code]`."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
from figures import answer, compare, equal_prefix, read_reference


TOP = 5
START_SECONDS = 300


def main(folder: str, reference: str, dtype: str, *options: str) -> None:
    expected = read_reference(reference)
    ids, greedy = expected["ids"].tolist(), expected["greedy"]
    port = free_port()
    # Not `vllm serve`, which asks for the metadata of a package called vllm that the CPU build is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", folder, "--served-model-name", "gated", "--dtype", dtype, "--enforce-eager"]
    command += ["--max-model-len", str(len(ids) + len(greedy) + 8), "--max-num-seqs", "2", *options]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        wait(server, f"http://127.0.0.1:{port}/health")
        request = {"model": "gated", "prompt": ids, "max_tokens": len(greedy), "temperature": 0, "ignore_eos": True}
        request |= {"logprobs": TOP, "return_tokens_as_token_ids": True}
        choice = post(f"http://127.0.0.1:{port}/v1/completions", request)["choices"][0]
    finally:
        server.terminate()
        server.wait(60)
    tokens = [token_id(token) for token in choice["logprobs"]["tokens"]]
    tops = [{token_id(token): score for token, score in top.items()} for top in choice["logprobs"]["top_logprobs"]]
    figures = equal_prefix(greedy, tokens)
    known = figures["greedy_prefix"] or 1  # behind a token that differs the reference says nothing
    logits = expected["logits"][len(ids) - 1 :][:known].astype(np.float64)  # a sum over the vocabulary follows
    scores = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    answer(compare(scores, tops[:known]) | figures | {"text": choice["text"]})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait(server: subprocess.Popen, url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            raise SystemExit(f"The server ended with code {server.returncode}.")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise SystemExit(f"The server did not answer within {START_SECONDS} seconds.")


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def token_id(text: str) -> int:
    return int(text.removeprefix("token_id:"))


if __name__ == "__main__":
    main(*sys.argv[1:])
