"""One folder in vLLM, offline: `ask_vllm.py FOLDER REFERENCE.npz DTYPE [--trust-remote-code]`."""

import sys

from figures import answer, compare, equal_prefix, read_reference


TOP = 20


def main(folder: str, reference: str, dtype: str, *options: str) -> None:
    from vllm import LLM, SamplingParams

    expected = read_reference(reference)
    ids, greedy = expected["ids"].tolist(), expected["greedy"]
    engine = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=len(ids) + len(greedy) + 8,
        max_num_seqs=2,
        logprobs_mode="raw_logits",
        trust_remote_code="--trust-remote-code" in options,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=len(greedy), ignore_eos=True, prompt_logprobs=TOP, logprobs=TOP, detokenize=False
    )
    output = engine.generate({"prompt_token_ids": ids}, sampling)[0]
    # The first prompt token has no scores; those of the others belong to the position before.
    after_prompt = output.outputs[0].logprobs[0]
    tops = [
        {token: entry.logprob for token, entry in top.items()} for top in [*output.prompt_logprobs[1:], after_prompt]
    ]
    answer(compare(expected["logits"][: len(ids)], tops) | equal_prefix(greedy, list(output.outputs[0].token_ids)))


if __name__ == "__main__":
    main(*sys.argv[1:])
