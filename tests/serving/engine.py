"""One vLLM engine in one process: greedy tokens for prompts of token ids. Runs in the serving venv.

python engine.py FOLDER PROMPTS NEW_TOKENS    (PROMPTS: a JSON list of lists of ids; prints `TOKENS ` and the same)
"""

import json
import sys

from vllm import LLM, SamplingParams, TokensPrompt


def main() -> None:
    folder, prompts, new_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    engine = LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=len(prompts),
        distributed_executor_backend="uni",
        seed=0,
    )
    greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    outputs = engine.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], greedy)
    print("TOKENS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)


if __name__ == "__main__":
    main()
