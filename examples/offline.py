"""Several prompts at once, in one process: `python examples/offline.py`."""

from penstock import LLM, SamplingParams

llm = LLM()  # the embedded model; or LLM("path/to/a/checkpoint")
params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=60, seed=7)
for output in llm.generate(["Once upon a time", "The little dog", "It was raining"], params):
    completion = output.outputs[0]
    print(f"{output.prompt}…{completion.text}  [{completion.finish_reason}]\n")
