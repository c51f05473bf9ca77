"""
llama.cpp, asked in a process of its own, which it may abort: `python llama_cpp.py < question.json > answer.json`.

A question names a GGUF file ("model"), a context size ("context"), a number of threads ("threads"), texts to tokenize
("texts"), prompts as lists of ids ("prompts"), and how many tokens to decode greedily after each ("steps") with how
many log-probabilities at each ("width"). The answer has the ids of the texts, special tokens included ("ids"), and for
each prompt the decoded ids ("tokens") and the ids and natural log-probabilities of the likeliest tokens at each step
("likeliest"). Keys and values are cached in float32, without flash attention.
"""

import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from typing import Any


PACKAGE = "xllamacpp"


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def ask(question: dict[str, Any]) -> dict[str, Any]:
    """The answer; ValueError with the first error that llama.cpp reports when it does not run the file."""
    result = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(question),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["it ended without a word"]
        reason = next((line for line in lines if "rror" in line or "ASSERT" in line), lines[-1])
        raise ValueError(
            f"llama.cpp does not run the written file: {reason.strip()}. Update {PACKAGE}, or switch verifying off."
        )
    return json.loads(result.stdout.splitlines()[-1])


def answer(question: dict[str, Any]) -> dict[str, Any]:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = question["model"]
    parameters.n_ctx = question["context"]
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = question["threads"]
    parameters.n_parallel = 1
    parameters.n_gpu_layers = 0
    parameters.warmup = False
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(parameters)
    return {
        "ids": [
            post(server, "tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
            for text in question["texts"]
        ],
        "completions": [decode(server, ids, question) for ids in question["prompts"]],
    }


def decode(server, ids: list[int], question: dict[str, Any]) -> dict[str, Any]:
    # One request for each step: the server drops the probabilities of tokens that end within a character. So a plain
    # letter is what it "decodes", by a bias that the reported probabilities do not see.
    letter = post(server, "tokenize", {"content": "a", "add_special": False})["tokens"][-1]
    forced = {"n_predict": 1, "temperature": 0, "logit_bias": [[letter, 1e6]], "cache_prompt": True}
    tokens, likeliest = [], []
    for _ in range(question["steps"]):
        body = {"prompt": ids + tokens, "n_probs": question["width"], **forced}
        step = post(server, "completion", body)["completion_probabilities"][0]["top_logprobs"]
        likeliest.append([(token["id"], token["logprob"]) for token in step])
        tokens.append(step[0]["id"])
    return {"tokens": tokens, "likeliest": likeliest}


def post(server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{server.listening_address}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine, whatever the proxy settings
    with opener.open(request) as reply:
        return json.load(reply)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(json.load(sys.stdin))))
    sys.stdout.flush()
    os._exit(0)  # the server's threads need not be wound down
